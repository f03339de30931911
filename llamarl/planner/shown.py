"""What a search found, in words: seconds, memory and lag by executor, the synchronous plan beside
it, whether asynchrony pays, and the overrides to paste.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from llamarl.planner.memory import GIB
from llamarl.planner.plans import Plan
from llamarl.planner.predict import Prediction, Predictor
from llamarl.planner.search import Found
from llamarl.planner.search_settings import Settings

_SHARING = {
    "apart": "by turns, each on GPUs of its own",
    "shared": "by turns on the same GPUs, both in their memory",
    "offload": "by turns on the same GPUs, the one that waits in host memory",
}


def balanced_share(found: Prediction) -> float:
    """Return theta*: the trainer's share of the GPU seconds that both sides need (theorem 7.5)."""
    trainer = found.trainer_s * found.plan.trainer.gpus
    generator = found.generator_s * found.plan.generator.gpus
    return trainer / (trainer + generator)


def ranks(first: int, number: int) -> str:
    """Return a list of ranks as an override has it."""
    return f"[{','.join(map(str, range(first, first + number)))}]"


def overrides(found: Prediction, settings: Settings, checkpointing: bool) -> list[str]:
    """Return the words of a command line that make this plan."""
    plan = found.plan
    trainer = plan.trainer
    generator = plan.generator
    words = [f"model=hf model.path={settings.path} model.dtype={settings.dtype}"]
    words += [
        f"groups_per_step={settings.groups}",
        f"group_size={settings.group_size}",
        f"max_new_tokens={settings.max_new_tokens}",
        f"task.max_prompt_tokens={settings.max_prompt_tokens}",
        f"max_lag={plan.max_lag}",
    ]
    if plan.is_synchronous:
        words.append("overcommit=0")
    else:
        words.append(f"overcommit={plan.overcommit}")
    words += _placement(plan)
    words += [
        f"trainer.tensor_parallel={trainer.tensor}",
        f"trainer.replicate={trainer.replicate}",
        f"trainer.microbatch_tokens={trainer.microbatch_tokens}",
        f"trainer.activation_checkpointing={str(checkpointing).lower()}",
        f"trainer.optimizer={settings.optimizer}",
        f"generator.tensor_parallel={generator.tensor}",
        f"generator.max_slots={generator.slots}",
        f"generator.quantize={settings.quantize}",
    ]
    if settings.compute_dtype is not None:
        words.append(f"trainer.compute_dtype={settings.compute_dtype}")
    return " ".join(words).split()


def _placement(plan: Plan) -> list[str]:
    trainer = plan.trainer.gpus
    if plan.sharing == "apart":
        return [
            f"placement.trainer={ranks(0, trainer)}",
            f"placement.generator={ranks(trainer, plan.generator.gpus)}",
        ]
    words = ["placement.colocate=[trainer,generator]", f"placement.trainer={ranks(0, trainer)}"]
    if plan.sharing == "offload":
        words.append("offload=true")
    return words


def lines_of(
    found: Found, predictor: Predictor, settings: Settings, gpus: int, memory: float
) -> Iterator[str]:
    """Yield what is printed of a search."""
    costs = predictor.costs
    sheet = costs.sheet
    work = predictor.work
    measured = sheet.measured
    source = "derived from the device's figures and the model's shapes"
    if measured is not None and measured.is_of(costs.model, costs.numerics.compute_dtype):
        source = f"measured ({measured.model}, {measured.dtype})"
    yield f"sheet     {sheet.name}; seconds {source}"
    yield (
        f"model     {costs.num_numbers:,} parameters; {gpus} GPUs, of each "
        f"{memory / GIB:.1f} GiB to fill"
    )
    yield (
        f"work      {work.groups} x {work.group_size} completions a step, of "
        f"{work.completion_tokens:g} tokens behind {work.prompt_tokens:g} in the mean"
    )
    if found.asynchronous is not None:
        yield ""
        yield from _of_plan("asynchronous", found.asynchronous, gpus)
    if found.synchronous is not None:
        yield ""
        yield from _of_plan("synchronous", found.synchronous, gpus)
    yield ""
    yield from _verdict(found, predictor)
    yield ""
    yield "to paste  " + " ".join(overrides(found.best, settings, costs.numerics.checkpointing))


def _of_plan(name: str, found: Prediction, gpus: int) -> Iterator[str]:
    plan = found.plan
    trainer = plan.trainer
    generator = plan.generator
    yield f"{name}: {found.step_s:.3g} s a step"
    if plan.is_synchronous:
        yield f"  {_SHARING[plan.sharing]}"
    else:
        share = trainer.gpus / (trainer.gpus + generator.gpus)
        yield (
            f"  split     theta {share:.2f}; where both sides took equally long: theta* "
            f"{balanced_share(found):.2f}"
        )
    yield (
        f"  trainer   {found.trainer_s:.3g} s, {_gib(found.trainer_bytes.total)} a GPU: "
        f"{trainer.gpus} GPUs = {trainer.replicate} replicas x {trainer.shards} shards x "
        f"{trainer.tensor} a layer; microbatches of {trainer.microbatch_tokens} tokens"
    )
    yield (
        f"  generator {found.generator_s:.3g} s, {_gib(found.generator_bytes.total)} a GPU: "
        f"{generator.gpus} GPUs = {generator.replicas} replicas x {generator.tensor} a layer; "
        f"{generator.slots} slots, {found.at_once:.3g} at once"
    )
    yield f"  scorer    {found.score_s:.3g} s"
    yield (
        f"  weights   {found.transfer_s:.3g} s on their way; stalls: {found.publish_s:.2g} s of "
        f"the trainer, {found.swap_s:.2g} s of the generator"
    )
    if found.offload_s:
        yield f"  offload   {found.offload_s:.3g} s to host memory and back"
    if plan.sharing == "shared":
        yield f"  memory    {_gib(found.bytes_of_gpu)} a GPU, both sides together"
    if not plan.is_synchronous:
        yield (
            f"  mean lag  {found.mean_lag:.2f} steps, at most {plan.max_lag}; "
            f"overcommit {plan.overcommit} groups"
        )
    idle = gpus - plan.gpus
    if idle:
        yield f"  left over {idle} GPUs, which make no whole rank of either side"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.3g} GiB"


def _verdict(found: Found, predictor: Predictor) -> Iterator[str]:
    """Say whether asynchrony pays, and where the gain or the lack of it comes from."""
    own = found.asynchronous
    other = found.synchronous
    if own is None:
        yield "asynchrony is not possible here: it needs max_lag of at least 1 and two GPUs"
        return
    if other is None:
        yield "no synchronous plan fits; the asynchronous one does"
        return
    ratio = other.step_s / own.step_s
    if not found.pays:
        yield (
            f"asynchrony does not pay: the synchronous step takes {ratio:.2f} of its time. Overlap "
            "alone gains nothing on a fixed number of GPUs (theorem 7.5), and degrees and slots of "
            "one's own gain too little here"
        )
        return
    even = replace(predictor.work, sigma=0.0)
    without = Predictor.of(predictor.costs, even).predict(other.plan).step_s
    stragglers = max(0.0, other.step_s - without)
    yield (
        f"asynchrony pays: {ratio:.2f} times as fast. {stragglers:.3g} s of the synchronous step "
        "are its wait for the longest completions; the rest of the gain is that of degrees and "
        "slots of one's own"
    )


def record_of(found: Found, settings: Settings, checkpointing: bool) -> dict:
    """Return a search's result as JSON values."""
    record: dict = {"pays": found.pays}
    for name in ("asynchronous", "synchronous"):
        one = getattr(found, name)
        if one is None:
            record[name] = None
            continue
        theta = None if one.plan.is_synchronous else balanced_share(one)
        words = overrides(one, settings, checkpointing)
        record[name] = asdict(one) | {"balanced_share": theta, "overrides": words}
    return record
