"""Asynchronous RL post-training: the main job.

python recipes/llama_async.py                                      one process, in turn
torchrun --standalone --nproc-per-node=2 recipes/llama_async.py    trainer | generator and reward
torchrun ... recipes/llama_async.py max_lag=0                      synchronous, on-policy

prompts -> Generator -> Reward -> (Reference ->) Trainer
               ^------- policy weights -------------'
"""

from itertools import pairwise

from executors.build import (
    build_generator,
    build_reference_weights,
    build_references,
    build_reward,
    build_trainer,
    build_weights,
)
from llamarl.comm.channel import Gather, Scatter
from llamarl.config.command_line import Config, main
from llamarl.controller import ExecutorController
from llamarl.launch.job import launch


@main
def run(config: Config) -> None:
    with launch(config) as job:
        generator = build_generator(config, job)
        reward = build_reward(config, job)
        references = build_references(config, job)  # none, or one
        trainer = build_trainer(config, job)
        scorers = [reward, *references]

        ExecutorController(
            executors=[generator, *scorers, trainer],
            channels=[
                Gather("completions", generator, reward),
                Gather("evaluations", generator, reward, spread=False),
                *(Gather("scored", a, b) for a, b in pairwise(scorers)),
                Scatter("groups", scorers[-1], trainer),
                build_weights(config, trainer, generator),
                *build_reference_weights(config, trainer, references),
            ],
            placement=job.placement,
            ledger=job.ledger(),
            world=job.world,
            settings=job.settings,
            make_writer=job.writer,
        ).run()


if __name__ == "__main__":
    run()
