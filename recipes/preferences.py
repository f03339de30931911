"""Preference pairs of a model's own completions, for recipes/reward_model.py. One process.

    python recipes/preferences.py model.path=SFT_DIR task.path=PROMPTS.jsonl samples=4 \
        reward=model reward.path=GOLD_DIR out=PAIRS.jsonl
    # A judge compares three completions and the row's own answer, each two in both orders.
    python recipes/preferences.py model.path=SFT_DIR task.path=PROMPTS.jsonl samples=3 \
        references=[answer] reward=judge reward.url=http://127.0.0.1:8000/v1 \
        reward.model=NAME reward.ask=group out=PAIRS.jsonl

The same command goes on where it was, if it was killed. docs/rewards.md tells the rest,
docs/keys.md what can be set.
"""

from contextlib import closing

from llamarl.config.preferences import PreferencesConfig, preferences_main


@preferences_main
def run(config: PreferencesConfig) -> None:
    # Here: help and mistakes in the command line are answered before PyTorch is loaded.
    from executors.build_scripts import build_pair_maker, build_scorer
    from llamarl.launch import launch_preferences

    with launch_preferences(config) as job:
        with closing(build_scorer(job.inputs, job.device)) as scorer:
            scorer.start()
            job.run(build_pair_maker(job, scorer).make)


if __name__ == "__main__":
    run()
