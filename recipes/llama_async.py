"""Asynchronous RL post-training: the main job.

    # One process, executors stepped in turn.
    python recipes/llama_async.py
    # Two ranks: trainer | generator and reward.
    torchrun --standalone --nproc-per-node=2 recipes/llama_async.py
    # Synchronous, on-policy.
    torchrun ... recipes/llama_async.py max_lag=0

prompts -> Generator -> Reward -> (Reference ->) Trainer
               ^------- policy weights -------------'
"""

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
from llamarl.launch import launch


@main
def run(config: Config) -> None:
    with launch(config) as job:
        generator = build_generator(config, job)
        reward = build_reward(config, job)
        references = build_references(config, job)  # none, or one
        trainer = build_trainer(config, job)
        scorers = [reward, *references]

        job.run(
            executors=[generator, *scorers, trainer],
            channels=[
                Gather("completions", generator, reward),
                Gather("evaluations", generator, reward, spread=False),
                *build_stretches(config, generator, reward, references),
                *(Gather("scored", a, b) for a, b in pairwise(scorers)),
                Scatter("groups", scorers[-1], trainer),
                build_weights(config, trainer, generator),
                *build_reference_weights(config, trainer, references),
            ],
        )


if __name__ == "__main__":
    run()
