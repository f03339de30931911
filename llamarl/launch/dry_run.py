"""`+dry_run=true`: shows what a run would be, without running it.

It checks the data and the reward on three samples.
"""

from __future__ import annotations

from omegaconf import OmegaConf

from llamarl.config.by_model import told
from llamarl.config.conversion import to_values
from llamarl.config.sections.victim import placed_victim
from llamarl.ddma.plan import make_plan
from llamarl.launch.environments import try_environments
from llamarl.launch.job import Job, told_epochs
from llamarl.launch.memory import memory_lines, prices, rank_map, sent_by, warn_of_memory
from llamarl.launch.scorers import gold_kind, reward_kinds
from llamarl.launch.sources import check_rows, samples_of, try_gold
from llamarl.models.config import read_config
from llamarl.models.sharding import num_parameters
from llamarl.types import Outcome, Prompt


def dry_run(job: Job) -> None:
    """Print config, rank map, memory and bytes a sync, and score three samples.

    Only on rank 0, where a run checks its reward. Errors are those that the run would raise.
    """
    if job.world.rank > 0:
        return
    c = job.config
    samples = samples_of(job.inputs)
    check_rows(job.inputs)
    prompts = [sample.prompt for sample in samples]
    scored = [(kind, kind.score(samples)) for kind in reward_kinds(job.inputs)]
    try_gold(job.inputs)
    environments = try_environments(job.inputs)
    print(OmegaConf.to_yaml(OmegaConf.create(to_values(c))))
    print(f"ranks    {job.placement.hosts}")
    print(f"float32  {job.world.products}")
    found = prices(job)
    for line in rank_map(job, found):
        print(line)
    _print_sets(job)
    model = read_config(job.inputs.model_path)
    print(
        f"model    {num_parameters(model):,} parameters ({c.model.dtype} in the generator, "
        "float32 in the trainer)"
    )
    for line in [*told(c, job.inputs.model_path), *told_epochs(job)]:
        print(line)
    for line in memory_lines(job, found):
        print(line)
    warn_of_memory(job, found)
    plan = make_plan(model, *sent_by(job))
    print(
        f"weights  {plan.num_bytes:,} bytes a sync; for the way they travel: python -m "
        f"llamarl.ddma plan --model {job.inputs.model_path}"
    )
    if job.inputs.victim_path is not None:
        v = placed_victim(c.victim)
        size = num_parameters(read_config(job.inputs.victim_path))
        print(
            f"victim   {job.inputs.victim_path}, {size:,} parameters in {v.dtype}; "
            f"{v.replies} replies an attack"
        )
    for key, path in c.reference.given.items():
        size = num_parameters(read_config(path))
        print(f"teacher  {key}={path}, {size:,} parameters in {c.model.dtype}")
    for kind, outcomes in scored:
        tried = "" if outcomes is None else ", here given the reference answers"
        print(f"reward   {kind.describe()}{tried}")
        for prompt, outcome in zip(prompts, outcomes or []):
            _print_sample(prompt, outcome)
        for line in kind.notes(job.placement):
            print(line)
    for environment in environments:
        print(f"dialogue {environment}")
    gold = gold_kind(job.inputs)
    if gold is not None:
        shared = ", over the reward's ranks" if gold.settings.is_sharded else ""
        print(f"gold     {gold.describe()}{shared}")
    if c.eval.base is not None:
        size = num_parameters(read_config(c.eval.base))
        what = f"{c.eval.base}, a model of {size:,} parameters in {c.model.dtype}"
        print(f"base     {what}, over the reward's ranks")
    for missing in dict.fromkeys(job.inputs.without_weights):
        print(f"weights  not there yet: {missing}; a run needs them")
    print("dry run: nothing was started and nothing written")


def _print_sets(job: Job) -> None:
    """Print the sets of held-out prompts: the task's own and eval.sets."""
    sets = job.config.eval.sets
    if not sets:
        return
    if not job.inputs.eval_sets:
        print(f"held out {', '.join(sets)}: never completed, because eval.every=0")
    for one in job.inputs.eval_sets:
        kind = sets[one.name].prompts.kind if one.name else job.config.task.kind
        name = one.name or "the task's own"
        first = job.inputs.eval_prompts[one.first]
        print(f"held out {name}: {one.count} prompts of {kind}, the first {first.text[:60]!r}")


def _print_sample(prompt: Prompt, outcome: Outcome) -> None:
    """Print the outcome of a row's own answer."""
    score = f"{outcome.kind}: {outcome.reason}"
    if outcome.kind == "score":
        score = f"{outcome.value:g}"
    print(
        f"sample   {prompt.prompt_ids.numel()} tokens  {prompt.text[:60]!r}  "
        f"answer {prompt.meta.get('answer')!r}  reward {score}"
    )
