"""A reward model from preference pairs (Bradley and Terry), sharded over any number of ranks.

    python recipes/reward_model.py model.path=SFT_DIR task.path=PAIRS.jsonl out=DIR
    # Sharded by FSDP2; goes on where it was, if it was killed.
    torchrun --standalone --nproc-per-node=2 recipes/reward_model.py model.path=SFT_DIR \
        task.path=PAIRS.jsonl out=DIR resume=auto

A row is {"prompt": ..., "chosen": ..., "rejected": ...[, "margin": number]}, of texts or of chat
messages. DIR is a ...ForSequenceClassification directory at the end. docs/rewards.md tells
the rest, docs/keys.md what can be set.
"""

from llamarl.config.supervised import RewardModelConfig, reward_model_main


@reward_model_main
def run(config: RewardModelConfig) -> None:
    # Here: help and mistakes in the command line are answered before PyTorch is loaded.
    from executors.build_supervised import build_reward_model_trainer
    from llamarl.launch import launch_supervised
    from llamarl.learning.preference import read_preference_data

    with launch_supervised(config, read_preference_data) as job:
        job.run(build_reward_model_trainer(config, job))


if __name__ == "__main__":
    run()
