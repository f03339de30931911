"""`+dry_run=true`: what a run would be, without running it.

It checks the data and the reward on three samples.
"""

from __future__ import annotations

import torch
from omegaconf import OmegaConf

from llamarl.config.conversion import to_values
from llamarl.config.placement import judge_models
from llamarl.config.rewards import ModelSourceSettings
from llamarl.config.sections.evaluation import START
from llamarl.config.victim import placed_victim
from llamarl.ddma.plan import make_plan
from llamarl.launch.gold import check_gold_function
from llamarl.launch.job import Job
from llamarl.launch.memory import GIB, memory_lines, prices, rank_map, sent_by, warn_of_memory
from llamarl.launch.scorers import stream_cache_tokens
from llamarl.launch.sources import samples_of, try_sources
from llamarl.models.config import read_config
from llamarl.models.sharding import num_parameters
from llamarl.scoring.scorer import Outcome
from llamarl.types import Prompt


def dry_run(job: Job) -> None:
    """Print config, rank map, memory and bytes a sync, and score three samples.

    On rank 0 alone, as a run checks its reward; errors are the run's own.
    """
    if job.world.rank > 0:
        return
    c = job.config
    samples = samples_of(job)
    prompts = [sample.prompt for sample in samples]
    scored = try_sources(job, samples)
    check_gold_function(job)
    print(OmegaConf.to_yaml(OmegaConf.create(to_values(c))))
    print(f"ranks    {job.hosts}")
    print(f"float32  {job.world.products}")
    found = prices(job)
    for line in rank_map(job, found):
        print(line)
    _print_sets(job)
    model = read_config(job.model_path)
    print(
        f"model    {num_parameters(model):,} parameters ({c.model.dtype} in the generator, "
        "float32 in the trainer)"
    )
    for line in memory_lines(job, found):
        print(line)
    warn_of_memory(job, found)
    plan = make_plan(model, *sent_by(job))
    print(
        f"weights  {plan.num_bytes:,} bytes a sync; how they travel: "
        f"python -m llamarl.ddma plan --model {job.model_path}"
    )
    if job.victim_path is not None:
        v = placed_victim(c.victim)
        size = num_parameters(read_config(job.victim_path))
        print(
            f"victim   {job.victim_path}, {size:,} parameters in {v.dtype}; "
            f"{v.answers} answers an attack"
        )
    for key, part in c.reward_parts.items():
        if part.kind == "model":
            size = num_parameters(read_config(part.path))
            print(f"reward   {part.path}, a model of {size:,} parameters in {part.dtype}")
            if c.reward.stream:
                _print_cache(job, part)
        elif part.kind == "novelty":
            embedder = job.model_path if part.embedder == START else part.embedder
            name = f"novelty by {embedder}" if job.without_weights else job.name_of(part)
            print(f"reward   {name}")
        elif part.kind == "encoder":
            print(f"reward   {part.path}, an encoder in {part.dtype}, whole on each reward rank")
        else:
            _print_samples(job.name_of(part), prompts, scored[key])
    if c.gold is not None and c.gold.kind == "function":
        print(f"gold     {c.eval.gold}")
    for key, path in judge_models(c).items():
        size = num_parameters(read_config(path))
        name = key.removeprefix("eval.")
        what = f"{path}, a model of {size:,} parameters in {c.model.dtype}"
        print(f"{name}     {what}, over the reward's ranks")
    for missing in dict.fromkeys(job.without_weights):
        print(f"weights  not there yet: {missing}; a run needs them")
    print("dry run: nothing was started and nothing written")


def _print_sets(job: Job) -> None:
    """What evaluations ask, the task's own and eval.sets."""
    sets = job.config.eval.sets
    if not sets:
        return
    if not job.eval_sets:
        print(f"held out {', '.join(sets)}: not asked, with eval.every=0")
    for one in job.eval_sets:
        kind = sets[one.name].kind if one.name else job.config.task.kind
        name = one.name or "the task's own"
        first = job.eval_prompts[one.first]
        print(f"held out {name}: {one.count} prompts of {kind}, the first {first.text[:60]!r}")


def _print_cache(job: Job, scorer: ModelSourceSettings) -> None:
    """What a model takes that reads completions while these are sampled."""
    model = read_config(scorer.path)
    tokens = stream_cache_tokens(job.config, job.placement, "reward")
    elements = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim
    num_bytes = tokens * elements * getattr(torch, scorer.dtype).itemsize
    split = job.config.reward.tensor_parallel
    size = f"{num_bytes / split / GIB:.2f} GiB a reward rank"
    print(f"stream   {size}, for a cache of {tokens:,} tokens")


def _print_samples(name: str, prompts: list[Prompt], outcomes: list[Outcome]) -> None:
    """What a function or a judge says of the reference answers."""
    print(f"reward   {name}, here given the reference answers")
    for prompt, outcome in zip(prompts, outcomes):
        score = f"{outcome.kind}: {outcome.reason}"
        if outcome.kind == "score":
            score = f"{outcome.value:g}"
        print(
            f"sample   {prompt.prompt_ids.numel()} tokens  {prompt.text[:60]!r}  "
            f"answer {prompt.meta.get('answer')!r}  reward {score}"
        )
