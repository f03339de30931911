"""Plan a run before it starts.

    # a hardware profile from runs of this machine: synchronous ones, of several batch sizes
    python -m llamarl.planner fit runs/a runs/b sheet=NAME.yaml

    # the split with the shortest step; a config.json is enough, and no GPU is needed
    python -m llamarl.planner search --gpus 16 --gpu-memory 80 sheet=h100 model.path=DIR
                                     groups_per_step=64 group_size=8 max_new_tokens=2048

    # a run on the real ledger with given service times, or the plan that a search found
    python -m llamarl.planner simulate max_lag=1,2,4 overcommit=0,8,auto update_s=5
    python -m llamarl.planner search ... --simulate

docs/scaling.md has all keys. Exit status: 0, or 2 for what cannot be used or does not fit.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from llamarl.memory import GIB
from llamarl.planner.predict import Prediction, Predictor, best_split
from llamarl.planner.profile import made, read_profile, write_profile
from llamarl.planner.search import Found, SearchSettings, best_of
from llamarl.words.findings import ConfigError, Problem, did_you_mean

SHEET = "h100"
_AUTO = ("auto", "null")


# --- Words of the command line ---

# Field of SearchSettings -> the main job's key. The other fields have the key's name.
_KEYS = {
    "path": "model.path",
    "dtype": "model.dtype",
    "compute_dtype": "trainer.compute_dtype",
    "optimizer": "trainer.optimizer",
    "checkpointing": "trainer.activation_checkpointing",
    "trainer_tensor": "trainer.tensor_parallel",
    "generator_tensor": "generator.tensor_parallel",
    "quantize": "generator.quantize",
    "max_prompt_tokens": "task.max_prompt_tokens",
}
KEYS = {_KEYS.get(one.name, one.name): one.name for one in fields(SearchSettings)}


def read_words(words: Sequence[str]) -> SearchSettings:
    """Return the settings of key=value words. ConfigError names all that cannot be used."""
    optional = {one.name for one in fields(SearchSettings) if one.default is None}
    values = {}
    problems = []
    for word in words:
        key, has_value, text = word.partition("=")
        if not has_value or key not in KEYS:
            problems.append(Problem(word, f"unknown key{did_you_mean(key, KEYS)}", (key,)))
        elif text not in _AUTO or KEYS[key] not in optional:
            values[KEYS[key]] = text
    try:
        settings = made(SearchSettings, values, **_KEYS)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return settings


def take(words: Sequence[str], key: str, default: str) -> tuple[str, list[str]]:
    """Return the value of a key among key=value words, and the other words."""
    value = default
    others = []
    for word in words:
        name, has_value, text = word.partition("=")
        if name == key and has_value:
            value = text
        else:
            others.append(word)
    return value, others


# --- What is printed of a search ---

_SHARING = {
    "apart": "by turns, each on GPUs of its own",
    "shared": "by turns on the same GPUs, both in their memory",
    "offload": "by turns on the same GPUs, the one that waits in host memory",
}


def balanced_share(found: Prediction) -> float:
    """Return theta*: the trainer's share of the GPU seconds that both sides need (theorem 7.5)."""
    plan = found.plan
    return best_split(
        (plan.trainer.gpus, found.trainer_s), (plan.generator.gpus, found.generator_s)
    )


def ranks(first: int, number: int) -> str:
    """Return a list of ranks as an override has it."""
    return f"[{','.join(map(str, range(first, first + number)))}]"


def overrides(found: Prediction, settings: SearchSettings, checkpointing: bool) -> list[str]:
    """Return the words of a command line that make this plan."""
    plan = found.plan
    trainer = plan.trainer
    generator = plan.generator
    words = [
        "model=hf",
        f"model.path={settings.path}",
        f"model.dtype={settings.dtype}",
        f"groups_per_step={settings.groups_per_step}",
        f"group_size={settings.group_size}",
        f"max_new_tokens={settings.max_new_tokens}",
        f"task.max_prompt_tokens={settings.max_prompt_tokens}",
        f"max_lag={plan.max_lag}",
        f"overcommit={plan.overcommit}",
        f"placement.trainer={ranks(0, trainer.gpus)}",
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
    if plan.sharing == "apart":
        words.append(f"placement.generator={ranks(trainer.gpus, generator.gpus)}")
    else:
        words.append("placement.colocate=[trainer,generator]")
    if plan.sharing == "offload":
        words.append("offload=true")
    return words


def lines_of(
    found: Found, predictor: Predictor, settings: SearchSettings, gpus: int, memory: float
) -> Iterator[str]:
    """Yield what is printed of a search."""
    costs = predictor.costs
    profile = costs.profile
    work = predictor.work
    measured = profile.measured
    source = "derived from the device's figures and the model's shapes"
    if measured is not None and measured.is_of(costs.model, costs.numerics.compute_dtype):
        source = f"measured ({measured.model}, {measured.dtype})"
    yield f"profile   {profile.name}; seconds {source}"
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
        yield (
            "no asynchronous plan fits: it needs max_lag of at least 1, and GPUs and memory enough "
            "for each side"
        )
        return
    if other is None:
        yield "no synchronous plan fits; the asynchronous one does"
        return
    ratio = other.step_s / own.step_s
    if not found.pays:
        yield (
            f"asynchrony does not pay: the synchronous step takes {ratio:.2f} of its time. Overlap "
            "alone gains nothing on a fixed number of GPUs (theorem 7.5)"
        )
        return
    even = replace(predictor.work, sigma=0.0)
    without = Predictor(predictor.costs, even).predict(other.plan).step_s
    stragglers = max(0.0, other.step_s - without)
    yield (
        f"asynchrony pays: {ratio:.2f} times as fast. {stragglers:.3g} s of the synchronous step "
        "are its wait for the longest completions; the rest comes from own degrees and slots"
    )


def record_of(found: Found, settings: SearchSettings, checkpointing: bool) -> dict:
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


# --- Commands ---


def run_search(given: argparse.Namespace) -> None:
    """Print the best plans. ValueError or OSError for what cannot be used."""
    named, words = take(given.words, "sheet", given.sheet)
    settings = read_words(words)
    profile = read_profile(named)
    gib = profile.device.memory_gib if given.gpu_memory is None else given.gpu_memory
    if not 0 < gib < math.inf:
        raise ValueError(f"--gpu-memory {gib:g}: need a number of GiB above 0")
    memory = gib * GIB * profile.assumed("memory_share")
    most = settings.max_lag * settings.groups_per_step
    if settings.overcommit is not None and settings.overcommit > most:
        raise ValueError(
            f"overcommit={settings.overcommit}: with max_lag={settings.max_lag} at most "
            f"{most} groups can be started beyond a batch"
        )
    found, predictor = best_of(settings, profile, gpus=given.gpus, memory=memory)
    if given.json:
        checkpointing = predictor.costs.numerics.checkpointing
        print(json.dumps(record_of(found, settings, checkpointing)))
        return
    for line in lines_of(found, predictor, settings, given.gpus, memory):
        print(line)
    if given.simulate:
        # The ledger's service imports torch, which a search does not need.
        from llamarl.planner.simulate import describe, of_plan, simulate

        plan = found.best.plan
        run = of_plan(plan, predictor.work)
        print(f"\nsimulated\n{describe(simulate(run, predictor.costs.timings(plan)))}")


def run_fit(given: argparse.Namespace) -> None:
    """Make a hardware profile of runs, write it and print it. ValueError or OSError for what cannot
    be used.
    """
    from llamarl.planner.fit import Lengths, fit_runs, shown_profile

    out, words = take(given.words, "sheet", "sheet.yaml")
    base, words = take(words, "base", SHEET)
    runs = [Path(word) for word in words if "=" not in word]
    values = dict(word.split("=", 1) for word in words if "=" in word)
    lengths = made(Lengths, values)
    if not runs:
        raise ValueError("fit needs the directories of runs")
    profile = fit_runs(runs, read_profile(base), lengths)
    write_profile(profile, out)
    for line in shown_profile(profile):
        print(line)
    print(f"written   {out}")


def run_simulate(given: argparse.Namespace) -> None:
    """Print what comes of simulated runs. ValueError or OSError for what cannot be used."""
    from llamarl.planner.simulate import lines_of_words

    for line in lines_of_words(given.words):
        print(line)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m llamarl.planner",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    fit = commands.add_parser("fit", help="make a hardware profile from runs")
    fit.add_argument("words", nargs="*", help="directories of runs, and key=value")
    find = commands.add_parser("search", help="find the best split of GPUs")
    find.add_argument("--gpus", type=int, required=True, help="how many there are")
    find.add_argument("--gpu-memory", type=float, help="GiB of each; by default the profile's")
    find.add_argument("--sheet", default=SHEET, help="a hardware profile's name or file")
    find.add_argument("--json", action="store_true", help="print one object")
    find.add_argument("--simulate", action="store_true", help="simulate the best plan too")
    find.add_argument("words", nargs="*", help=f"key=value: {', '.join(KEYS)}")
    imagine = commands.add_parser("simulate", help="simulate a run on the real ledger")
    imagine.add_argument("words", nargs="*", metavar="KEY=VALUE[,VALUE]", help="docs/scaling.md")
    # key=value may stand between the options too, which argparse would not take.
    words = [word for word in arguments if "=" in word and not word.startswith("-")]
    return parser.parse_args([word for word in arguments if word not in words] + words)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status."""
    given = parse(sys.argv[1:] if arguments is None else arguments)
    runs = {"fit": run_fit, "search": run_search, "simulate": run_simulate}
    try:
        runs[given.command](given)
    except (ValueError, OSError) as error:
        print(f"llamarl.planner: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
