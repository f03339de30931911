"""An executor of one's own in one screen: it makes long completions worth less.

torchrun --standalone --nproc-per-node=2 recipes/custom_executor.py max_steps=3

prompts -> Generator -> Reward -> (Reference ->) LengthPenalty -> Trainer
               ^------------------- policy weights -------------------'
"""

import dataclasses

from llamarl.config import Config, main
from llamarl.executor import Executor
from llamarl.types import Group


class LengthPenalty(Executor):
    """rewards [G] - per_token * lengths [G]. `trained` [G] stays what it is."""

    name = "length_penalty"
    consumes = (Group,)
    produces = (Group,)

    def __init__(self, *, per_token: float):
        self.per_token = per_token

    def step(self) -> bool:
        """Hand on the groups that have come. False if there was nothing to do."""
        sink = self.outputs.of(Group)
        groups = self.inputs.of(Group).take() if sink.has_room() else []
        for group in groups:
            rewards = group.rewards - self.per_token * group.lengths
            sink.put(dataclasses.replace(group, rewards=rewards))
        return bool(groups)

    def waiting_for(self) -> str | None:
        """Return what it lacks, for the message that ends a run where nothing moves."""
        has_room = self.outputs.of(Group).has_room()
        return None if has_room else "room: in the channel that the trainer empties"


@main
def run(config: Config) -> None:
    # Here: mistakes in the command line are answered before all this is loaded.
    from executors.build import build_executors
    from llamarl.launch import launch

    with launch(config) as job:
        generator, reward, references, trainer = build_executors(config, job)
        penalty = LengthPenalty(per_token=0.05)
        job.placement[penalty.name] = job.placement[reward.name]  # beside it: it is light
        job.run([generator, reward, *references, penalty, trainer])


if __name__ == "__main__":
    run()
