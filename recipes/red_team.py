"""Red-teaming: a policy learns to find prompts to which a victim gives answers of a certain kind
(TBA, arXiv 2503.18929, 5.1 and B.3; Perez et al., arXiv 2202.03286).

    # one process: attacker and victim are the embedded model
    python recipes/red_team.py
    # trainer | attacker | victim and reward
    torchrun --standalone --nproc-per-node=3 recipes/red_team.py \\
        placement.trainer=[0] placement.generator=[1] placement.victim=[2] placement.reward=[2]

Its keys are the main job's, with other values (conf/red_team.yaml); docs/papers.md.

prompts -> Generator -> Victim -> Reward -> (Reference ->) Trainer
               ^------------- policy weights --------------'
"""

import functools

from llamarl.config import Config, main
from llamarl.config.command_line import RED_TEAM


@functools.partial(main, kind=RED_TEAM)
def run(config: Config) -> None:
    # Here: help and mistakes in the command line are answered before PyTorch is loaded.
    from executors.build import build_executors
    from executors.build_victim import build_victim
    from llamarl.launch import launch

    with launch(config) as job:
        generator, reward, references, trainer = build_executors(config, job)
        victim = build_victim(config, job)
        job.run([generator, victim, reward, *references, trainer])


if __name__ == "__main__":
    run()
