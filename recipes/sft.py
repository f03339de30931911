"""Supervised fine-tuning: a language model learns the answers of a file, or those of a task,
sharded over any number of ranks.

    torchrun --standalone --nproc-per-node=2 recipes/sft.py model.path=DIR task.path=ROWS.jsonl \
        out=DIR resume=auto
    # A warm start: the embedded model learns a task's answers until it is right often enough for RL
    # to begin.
    python recipes/sft.py model=tiny task=addition target_accuracy=0.6

A row has a "prompt" and a "completion" (or an "answer"), or "messages": a conversation, whose
assistant turns are learned, in the tokenizer's chat template. Any task of the main job that has
answers can stand in their place; then target_accuracy ends the run once the greedy answers to its
held-out prompts are right so often, by the task's own reward. Exit status 1: the last step came
first. docs/rewards.md tells the rest, docs/keys.md what can be set.
"""

from llamarl.config.supervised import SFTConfig, sft_main


@sft_main
def run(config: SFTConfig) -> None:
    # Here: help and mistakes in the command line are answered before PyTorch is loaded.
    from executors.build_supervised import build_sft_trainer
    from llamarl.launch import launch_supervised
    from llamarl.learning.sft import read_sft_data

    with launch_supervised(config, read_sft_data) as job:
        job.run(build_sft_trainer(config, job))


if __name__ == "__main__":
    run()
