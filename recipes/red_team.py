"""Red-teaming: a policy learns to find prompts to which a victim gives answers of a certain kind
(TBA, arXiv 2503.18929, 5.1 and B.3; Perez et al., arXiv 2202.03286).

    # one process: attacker and victim are the embedded model
    python recipes/red_team.py
    # trainer | attacker | victim and reward
    torchrun --standalone --nproc-per-node=3 recipes/red_team.py \\
        placement.trainer=[0] placement.generator=[1] placement.victim=[2] placement.reward=[2]

Its keys are the main job's, with other values (conf/red_team.yaml); docs/red_teaming.md.

prompts -> Generator -> Victim -> Reward -> (Reference ->) Trainer
               ^------------- policy weights --------------'
"""

import functools
from itertools import pairwise

from executors.build import (
    build_generator,
    build_reference_weights,
    build_references,
    build_reward,
    build_stretches,
    build_trainer,
    build_victim,
    build_weights,
)
from llamarl.comm import Gather, Scatter
from llamarl.config import Config, main
from llamarl.config.command_line import RED_TEAM
from llamarl.launch import launch


@functools.partial(main, kind=RED_TEAM)
def run(config: Config) -> None:
    with launch(config) as job:
        generator = build_generator(config, job)
        victim = build_victim(config, job)
        reward = build_reward(config, job)
        references = build_references(config, job)  # none, or one
        trainer = build_trainer(config, job)
        scorers = [reward, *references]

        job.run(
            executors=[generator, victim, *scorers, trainer],
            channels=[
                Gather("completions", generator, victim),
                Gather("evaluations", generator, victim, spread=False),
                Gather("answered", victim, reward),
                Gather("eval_answered", victim, reward, spread=False),
                *build_stretches(config, generator, reward, references),
                *(Gather("scored", a, b) for a, b in pairwise(scorers)),
                Scatter("groups", scorers[-1], trainer),
                build_weights(config, trainer, generator),
                *build_reference_weights(config, trainer, references),
            ],
        )


if __name__ == "__main__":
    run()
