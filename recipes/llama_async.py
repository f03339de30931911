"""Asynchronous RL post-training: the main job.

    # One process, executors stepped in turn.
    python recipes/llama_async.py
    # Two ranks: trainer | generator and reward.
    torchrun --standalone --nproc-per-node=2 recipes/llama_async.py
    # Synchronous, on-policy.
    torchrun ... recipes/llama_async.py max_lag=0

prompts -> Generator -> Reward -> (Reference ->) Trainer
               ^------- policy weights -------------'

The channels follow from what each of them consumes and produces (llamarl/launch/graph.py).
"""

from llamarl.config import Config, main


@main
def run(config: Config) -> None:
    # Here: help and mistakes in the command line are answered before PyTorch is loaded.
    from executors.build import build_executors
    from llamarl.launch import launch

    with launch(config) as job:
        # References: none, or one.
        generator, reward, references, trainer = build_executors(config, job)
        job.run([generator, reward, *references, trainer])


if __name__ == "__main__":
    run()
