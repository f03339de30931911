"""A new executor in one screen: it makes long completions worth less.

It takes groups between reward and trainer.

torchrun --standalone --nproc-per-node=2 recipes/custom_executor.py max_steps=3

prompts -> Generator -> Reward -> (Reference ->) LengthPenalty -> Trainer
               ^------------------- policy weights -------------------'
"""

import dataclasses
from itertools import pairwise

from executors.build import (
    build_generator,
    build_reference_weights,
    build_references,
    build_reward,
    build_stretches,
    build_trainer,
    build_weights,
)
from llamarl.comm import Gather, Scatter
from llamarl.config import Config, main
from llamarl.executor import Executor
from llamarl.launch import launch


class LengthPenalty(Executor):
    """rewards [G] - per_token * lengths [G]. A masked completion (NaN) stays masked."""

    name = "length_penalty"

    def __init__(self, *, per_token: float):
        self.per_token = per_token

    def step(self) -> bool:
        (source,) = self.inputs.values()
        (sink,) = self.outputs.values()
        groups = source.take(64) if sink.has_room() else []
        for group in groups:
            rewards = group.rewards - self.per_token * group.lengths
            sink.put(dataclasses.replace(group, rewards=rewards))
        return bool(groups)

    def waiting_for(self) -> str | None:
        (sink,) = self.outputs.values()
        if sink.has_room():
            return None
        return f"room: in channel {sink.name}, which the trainer empties"


@main
def run(config: Config) -> None:
    with launch(config) as job:
        generator = build_generator(config, job)
        reward = build_reward(config, job)
        references = build_references(config, job)  # none, or one
        penalty = LengthPenalty(per_token=0.05)
        trainer = build_trainer(config, job)
        job.placement[penalty.name] = job.placement[reward.name]  # beside it: it is light
        scorers = [reward, *references, penalty]

        job.run(
            executors=[generator, *scorers, trainer],
            channels=[
                Gather("completions", generator, reward),
                Gather("evaluations", generator, reward, spread=False),
                *build_stretches(config, generator, reward, references),
                *(Gather("scored", a, b) for a, b in pairwise(scorers)),
                Scatter("groups", penalty, trainer),
                build_weights(config, trainer, generator),
                *build_reference_weights(config, trainer, references),
            ],
        )


if __name__ == "__main__":
    run()
