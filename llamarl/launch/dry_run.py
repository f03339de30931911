"""`+dry_run=true`: what a run would be, without running it. Checks the data and the reward on three
samples.
"""

from __future__ import annotations

import torch
from omegaconf import OmegaConf

from llamarl.config.command_line import to_values
from llamarl.ddma.layout import Destination, Source, parameters_to_send
from llamarl.ddma.plan import make_plan
from llamarl.launch.job import Job
from llamarl.models.config import read_config
from llamarl.tasks.pool import check_reward

_FP32, _MOMENTS, _GRADIENT = 4, 8, 4  # bytes a parameter that the trainer holds


def dry_run(job: Job) -> None:
    """Print config, rank map, memory and bytes a sync, and score three samples. Rank 0 prints;
    errors are the run's own.
    """
    samples = [job.task.train_prompt(i) for i in range(min(3, job.task.num_train))]
    fn = job.config.reward.fn or job.task.default_reward
    r = job.config.reward
    answers = [(p.text, str(p.meta.get("answer", "")), p.meta) for p in samples]
    outcomes = check_reward(fn, answers, timeout_s=r.timeout_s, memory_mb=r.memory_mb)
    if job.world.rank == 0:
        print(OmegaConf.to_yaml(OmegaConf.create(to_values(job.config))))
        _print_ranks(job)
        _print_sizes(job)
        print(f"reward   {fn}, here given the reference answers")
        for prompt, outcome in zip(samples, outcomes):
            score = (
                f"{outcome.value:g}"
                if outcome.kind == "score"
                else f"{outcome.kind}: {outcome.reason}"
            )
            print(
                f"sample   {prompt.prompt_ids.numel()} tokens  {prompt.text[:60]!r}  answer {prompt.meta.get('answer')!r}  reward {score}"
            )
        print("dry run: nothing was started and nothing written")


def _print_ranks(job: Job) -> None:
    print(f"ranks    {job.hosts}")
    print(f"float32  {job.world.products}")
    for rank in range(job.world.size):
        hosted = [name for name, ranks in job.placement.items() if rank in ranks]
        print(f"rank {rank:<4}{', '.join(hosted) or '(nothing)'}")


def _print_sizes(job: Job) -> None:
    model = read_config(job.model_path)
    trainers, generators = len(job.placement["trainer"]), len(job.placement["generator"])
    dtype = getattr(torch, job.config.model.dtype)
    itemsize = dtype.itemsize
    tp, t = job.config.generator.tensor_parallel, job.config.trainer
    source = Source(trainers // (t.replicate * t.tensor_parallel), t.replicate, t.tensor_parallel)
    parameters = parameters_to_send(model, dtype)
    plan = make_plan(model, parameters, source, Destination(tp, generators // tp))
    held = sum(source.box(model, p, 0).numel for p in parameters)
    gib = 1 << 30
    staging = 2 * model.num_parameters * itemsize
    trainer = held * (_FP32 + _MOMENTS + _GRADIENT + 2 * itemsize) / gib
    g, longest = job.config.generator, job.config.task.max_prompt_tokens + job.config.max_new_tokens
    cache = (
        2
        * (g.cache_tokens or g.max_slots * longest)
        * model.num_hidden_layers
        * model.num_key_value_heads
        * model.head_dim
        * itemsize
    )
    print(
        f"model    {model.num_parameters:,} parameters ({job.config.model.dtype} in the generator, float32 in the trainer)"
    )
    print(
        f"memory   {trainer:.2f} GiB a trainer rank and activations; {(staging + cache) / tp / gib:.2f} GiB a generator rank"
    )
    print(
        f"weights  {plan.num_bytes:,} bytes a sync; how they travel: python -m llamarl.ddma plan --model {job.model_path}"
    )
