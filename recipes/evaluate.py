"""How well a model answers a task's held-out prompts, and those of eval.sets: pass@1 greedily,
pass@k sampled as in training; and by a scorer that it was not trained against, how often it wins.
One process.

    # as the run was configured: the accuracy that it reported
    python recipes/evaluate.py RUN_DIR/checkpoints/latest
    python recipes/evaluate.py RUN_DIR/checkpoints/step_50 --samples 16 temperature=0.8
    python recipes/evaluate.py HF_DIR --num-prompts 100 \\
        task=gsm8k task.path=train.jsonl task.eval_path=test.jsonl
    # win rate of its greedy answers over those of the rows, and their perplexity under a model
    python recipes/evaluate.py RUN_DIR/checkpoints/latest --gold RM_DIR --base SFT_DIR
    # the same over another model's answers, or those of a file such as --out makes
    python recipes/evaluate.py DIR --gold my_module:gold --against OTHER_DIR task=...

Keys of the main job's config (key=value) say which task, reward and sampling; beside a run's
config.yaml they change what they name. Each completion becomes a line of --out. The weights are
taken as they were saved: not quantised, not split. Gold judges greedy answers (docs/rewards.md).
Exit status: 0, or 2 for a directory, a key, data or an --out that cannot be used.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch.distributed as dist
from omegaconf import OmegaConf

from executors.build import (
    base_settings,
    build_scorer,
    engine_alone,
    gold_settings,
    references_of,
    sampling_of,
)
from llamarl.checkpoint.checkpointer import LATEST, MANIFEST, damage, verify
from llamarl.comm.groups import init_world, threads_per_rank
from llamarl.config.command_line import (
    Config,
    ConfigError,
    Problem,
    check,
    compose_config,
    to_config,
)
from llamarl.config.conversion import (
    escaped,
    flat,
    is_marked,
    load_config,
    to_values,
    value_differences,
)
from llamarl.config.files import EVAL_SETS
from llamarl.config.supervised import is_of_a_supervised_job
from llamarl.errors import CheckpointError
from llamarl.inference import Engine
from llamarl.inference.evaluation import eval_completion, submit
from llamarl.inference.offline import completions_of
from llamarl.launch.gold import reference_texts
from llamarl.launch.inputs import check_inputs
from llamarl.launch.job import Job
from llamarl.launch.run_directory import RunDirectory
from llamarl.observe.console import left_out
from llamarl.observe.rates import EVALUATED, LEFT_OUT
from llamarl.scoring.assembly import item_of
from llamarl.scoring.evaluation import Evaluations, number_of, pass_at_k, sample_row
from llamarl.scoring.gold import Gold
from llamarl.scoring.judges import Evaluated, find, spans_of
from llamarl.scoring.perplexity import Likelihood, Perplexity
from llamarl.scoring.scorer import Item, Outcome, Scorer, score_all, site_alone
from llamarl.scoring.transcript import same_tokens
from llamarl.scoring.win_rate import Judged, WinRate, length_controlled_interval, win_rate
from llamarl.tasks.held_out import EvalSet, set_of
from llamarl.tasks.jsonl import read_jsonl
from llamarl.types import EvalCompletion, Prompt
from llamarl.words.columns import OWN

REFERENCES = "references"
THE_TASK = "the task's own"
OF_THE_RUN = "of_the_run"  # the file of a section in a folder of its own
# What is as the engine here is, whatever the run's generator was.
OUR_OWN = (
    "generator.kind",
    "generator.tensor_parallel",
    "generator.quantize",
    "generator.quantize_exclude",
    "generator.gpu_memory_utilization",
)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line; ends the process, saying all that is wrong, where it cannot be used."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="DIR key=value",
        help="a checkpoint or a Hugging Face directory, and overrides",
    )
    parser.add_argument(
        "--num-prompts",
        type=int,
        help="the first so many held-out prompts of each set; as the config has it if not given",
    )
    parser.add_argument(
        "--samples", type=int, help="sampled completions a prompt; eval.num_samples if not given"
    )
    parser.add_argument(
        "--gold",
        metavar="DIR|FN",
        help="what judges: a scorer's directory, or module:function; eval.gold if not given",
    )
    parser.add_argument(
        "--against",
        default=REFERENCES,
        metavar="DIR|FILE",
        help="whose answers are to be beaten: references are those of the task's rows, under "
        "eval.reference_key",
    )
    parser.add_argument(
        "--base",
        metavar="DIR",
        help="the language model that finds the answers so or so likely; eval.base if not given",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("evaluation.jsonl"),
        help="prompts, completions and scores, a line each",
    )
    args = parser.parse_intermixed_args(argv)
    directories = [word for word in args.words if "=" not in word or Path(word).exists()]
    args.overrides = [word for word in args.words if word not in directories]
    directories += [
        word.partition("=")[2] for word in args.overrides if word.startswith("model.path=")
    ]
    counts = (("--num-prompts", args.num_prompts, 1), ("--samples", args.samples, 0))
    wrong = [
        f"{flag}: need at least {least}"
        for flag, given, least in counts
        if given is not None and given < least
    ]
    if len(directories) != 1:
        wrong.append(
            f"need one directory, or model.path=DIR; got {', '.join(directories) or 'none'}"
        )
    if wrong:
        parser.error("; ".join(wrong))
    args.directory = directories[0]
    for key, given in (("gold", args.gold), ("base", args.base)):
        if given is not None:
            # Whatever the run did: here all of this is evaluated.
            args.overrides += [f"eval.{key}='{given}'", "eval.every=1"]
    if args.against != REFERENCES:
        args.overrides.append("eval.reference_key=null")  # the rows need have no answers
    return args


def config_of(model: Path, run: Path | None, overrides: list[str]) -> Config:
    """The run's own config, where there is one, with what the command line changes: of the run are
    the keys that the schema marks ANSWERS. ConfigError.
    """
    given = [word for word in overrides if not word.startswith("model.path=")]
    given.append(f"model.path='{model}'")
    file = None if run is None else run / "config.yaml"
    if file is None or not file.is_file() or is_of_a_supervised_job(file):
        return of_our_engine(compose_config(given))
    named = {word.partition("=")[0].lstrip("+") for word in given}
    old = to_values(load_config(file))
    if old["victim"]["kind"] != "none":
        what = (
            "its completions are attacks, which a victim's answers are scored of; its own "
            "evaluations say how many succeed (eval/success), or give the model directory alone"
        )
        raise ConfigError([Problem(f"victim.kind={old['victim']['kind']}", what)])
    # Of a section that is another kind's now, no key means anything; one that stays is the base.
    of_kinds = {section: old.pop(section) for section in ("task", "reward")}
    kept = {section: values for section, values in of_kinds.items() if section not in named}
    sets = old["eval"].pop("sets")
    config = of_our_engine(compose_over(kept, given))
    values = to_values(config)
    if not any(f"{name}.".startswith(f"{EVAL_SETS}.") for name in named):
        values["eval"]["sets"] = sets
    named |= set(value_differences(to_values(compose_config([])), values))
    for key, was in flat(old).items():
        section, _, name = key.rpartition(".")
        names = {section, key}
        if is_marked(key, "answers") and key not in OUR_OWN and not names & named:
            place = values[section] if section else values
            place[name] = was
    config = to_config(values)
    problems = check(config, 1)
    if problems:
        raise ConfigError(problems)
    return config


def compose_over(sections: dict[str, dict], overrides: list[str]) -> Config:
    """The config of a command line where these sections, of whatever kind, are what there is before
    it. ConfigError.
    """
    with tempfile.TemporaryDirectory() as folder:
        choices = []
        for section, values in sections.items():
            file = Path(folder) / section / f"{OF_THE_RUN}.yaml"
            file.parent.mkdir()
            OmegaConf.save(OmegaConf.create({k: escaped(v) for k, v in values.items()}), file)
            choices.append(f"{section}={OF_THE_RUN}")
        return compose_config([*choices, *overrides], config_dir=folder)


def of_our_engine(config: Config) -> Config:
    """The config, if the engine here can answer so. ConfigError."""
    if config.generator.kind != "native":
        what = "models are evaluated by the native engine; leave it out"
        raise ConfigError([Problem(f"generator.kind={config.generator.kind}", what)])
    return config


class Asked(NamedTuple):
    """Held-out prompts by number, set after set."""

    sets: tuple[EvalSet, ...]
    prompts: dict[int, Prompt]


def asked_of(job: Job, most: int | None) -> Asked:
    """Of each set its first prompts, as many as the config says; or `most`, where it has them."""
    # What is held out depends on eval.num_prompts alone, so that nothing that was trained on is
    # asked.
    sets = job.held_out.sets if most is None else job.held_out.first(most)
    return Asked(sets, job.held_out.asked(sets))


def answer(
    engine: Engine, job: Job, prompts: Mapping[int, Prompt], num_samples: int
) -> list[EvalCompletion]:
    """The completions of all prompts, in order: of each the greedy one, then the sampled ones."""
    sampling = sampling_of(job.config, job)
    for number, prompt in prompts.items():
        submit(engine, number, prompt, sampling, num_samples)
    completions = []
    for finished in completions_of(engine, job.config.generator.chunk_tokens):
        completions += [eval_completion(stream, c) for stream, c in finished]
    return sorted(completions, key=lambda c: (c.prompt_index, number_of(c)))


class Judgement(NamedTuple):
    """What gold and base say of a set, as far as they are asked, and what gold compares with."""

    judged: Judged | None
    likelihood: Likelihood | None
    against: list[Item] | None


def find_against(given: str, job: Job, asked: Asked) -> Callable[[], list[Item]] | None:
    """How to come to the answers that are to be beaten, one to each prompt; None if there are none.
    What is wrong with them is told here: ValueError or OSError.
    """
    prompts = list(asked.prompts.values())
    config = job.config
    if config.gold is None:
        if given != REFERENCES:
            raise ValueError(f"--against {given}: needs what judges; --gold DIR|module:function")
        return None
    if given == REFERENCES:
        texts = reference_texts(*asked, config.eval.reference_key)
        return None if texts is None else partial(references_of, job, prompts, texts)
    if Path(given).is_file():
        texts = read_answers(Path(given), asked)
        return partial(references_of, job, prompts, texts)
    model, _ = find_model(given)
    own = dataclasses.replace(config.model, path=str(model))
    # Nothing judges it but as what is compared with.
    unjudged = dataclasses.replace(config.eval, gold=None, gold_label=None, base=None)
    other = Job(dataclasses.replace(config, model=own, eval=unjudged), job.world, job.directory)
    check_inputs(other)
    return partial(answers_of, other, job, asked)


def read_answers(file: Path, asked: Asked) -> list[str]:
    """The greedy answer of a file to each of these prompts. ValueError naming FILE:LINE of a bad
    line, or the first prompt without an answer.
    """

    def answer_of(row: dict) -> tuple[tuple[str, str], str] | None:
        prompt, completion = row.get("prompt"), row.get("completion")
        if not isinstance(prompt, str) or not isinstance(completion, str):
            raise ValueError('need "prompt" and "completion", as texts')
        return None if row.get("sample") else ((row.get("set", OWN), prompt), completion)

    rows = read_jsonl(file, answer_of)
    answers = dict(row for row in rows if row is not None)
    texts = []
    for number, prompt in asked.prompts.items():
        one = set_of(asked.sets, number)
        if (one.name, prompt.text) not in answers:
            raise ValueError(
                f"--against {file}: has no greedy answer to held-out prompt {number - one.first}"
                f"{one.place}, {prompt.text[:40]!r}; make it from the same rows"
            )
        texts.append(answers[one.name, prompt.text])
    return texts


def answers_of(other: Job, job: Job, asked: Asked) -> list[Item]:
    """The greedy answers of another model, in the tokens of the one that is evaluated."""
    prompts = list(asked.prompts.values())
    most = max(one.count for one in asked.sets)
    every = asked_of(other, most).prompts
    theirs = {number: prompt for number, prompt in every.items() if number in asked.prompts}
    if [prompt.text for prompt in theirs.values()] != [prompt.text for prompt in prompts]:
        raise ValueError(
            f"--against {other.model_path}: not all held-out prompts fit task.max_prompt_tokens in "
            "its tokens; raise it"
        )
    completions = answer(engine_alone(other.config, other), other, theirs, 0)
    items = [item_of(c, p, other.decode, other.decode_raw) for c, p in zip(completions, prompts)]
    if same_tokens(other.tokenizer, job.tokenizer):
        return items
    return references_of(job, prompts, [item.text for item in items])


def judge(
    job: Job,
    sets: Sequence[EvalSet],
    answers: Sequence[Evaluated],
    against: Callable[[], list[Item]] | None,
) -> list[Judgement]:
    """What gold and base say of greedy answers, one to each prompt, in order; set by set."""
    others = None if against is None else against()
    site = site_alone(job.world.device)
    judged: Sequence[Judged | None] = [None] * len(sets)
    if job.config.gold is not None:
        judged = find(Gold(gold_settings(job.config, job, others, sets), site), answers)
    likely: Sequence[Likelihood | None] = [None] * len(sets)
    base = base_settings(job.config, sets)
    if base is not None:
        likely = find(Perplexity(base, site), answers)
    against_by_set = [others and others[begin:end] for begin, end in spans_of(sets)]
    return [Judgement(*said) for said in zip(judged, likely, against_by_set)]


def judgement_lines(config: Config, judgement: Judgement, against: str) -> list[str]:
    """The lines to print about it."""
    judged = judgement.judged
    lines = []
    if judged is not None:
        found = judged.metrics()
        masked = found["eval/gold_masked"]
        left_out = f", {masked} answers without a score left out" if masked else ""
        mean = shown_score(found["eval/gold"])
        lines.append(f"gold     {mean} by {config.eval.gold}{left_out}")
    if judged is not None and judged.against_N is not None:
        lines[-1] += f"; {shown_score(found['eval/gold_references'])} of {against}"
        wins_N = judged.wins_N
        assert wins_N is not None, "gold has said of both who wins"
        ties = int((wins_N == 0.5).sum())
        rate = win_rate(wins_N)
        what = f"over {against}, {ties} ties" if rate else "nothing could be compared"
        lines.append(f"win rate {shown_rate(rate)} {what}")
        controlled = length_controlled_interval(wins_N, judged.longer_N, seed=config.seed)
        ours, theirs = judged.num_tokens_N.mean(), judged.against_tokens_N.mean()
        lengths = f"mean length {ours:.1f} tokens, theirs {theirs:.1f}"
        how = "at equal lengths" if controlled else "no pair's lengths tell it from quality"
        lines.append(f"length   {shown_rate(controlled)} {how}; {lengths}")
    likelihood = judgement.likelihood
    if likelihood is not None:
        lines.append(f"base     perplexity {likelihood.perplexity:.4g} under {config.eval.base}")
    return lines


def shown_score(mean: float | None) -> str:
    """A mean score; "-" where nothing has one."""
    return "-" if mean is None else f"{mean:.4g}"


def shown_rate(rate: WinRate | None) -> str:
    """A share and its interval of 95 %."""
    if rate is None:
        return "-"
    return f"{rate.share:.1%} [{rate.low:.1%}, {rate.high:.1%}]"


def judged_columns(one: EvalSet, judgement: Judgement) -> dict[int, dict[str, object]]:
    """By number of the prompt, what a line of --out says of its greedy answer besides."""
    columns: dict[int, dict[str, object]] = {}
    judged = judgement.judged
    for place in range(one.count):
        own: dict[str, object] = {}
        if judged is not None:
            own["gold"] = number_or_none(judged.gold_N[place])
        if judged is not None and judgement.against is not None:
            own["against"] = judgement.against[place].text
            own["gold_against"] = number_or_none(judged.against_N[place])
        if judgement.likelihood is not None:
            own["base_logprob"] = float(judgement.likelihood.logprobs_N[place])
        columns[one.first + place] = own
    return columns


def number_or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else float(value)


def check_writable(out: Path) -> None:
    """Makes its directory. ValueError if the file could not be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = out.open("a") if out.exists() else tempfile.TemporaryFile(dir=out.parent)
        file.close()
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written: {error}") from error


def write(
    out: Path,
    asked: Asked,
    completions: list[EvalCompletion],
    scored: list[tuple[str, Outcome]],
    judged: dict[int, dict[str, object]],
) -> None:
    """Write a line of JSON for each completion, with its text and its outcome, and of each greedy
    one by prompt what was judged.
    """
    with out.open("w") as file:
        for c, (text, outcome) in zip(completions, scored):
            of = set_of(asked.sets, c.prompt_index)
            row = sample_row(c, of, asked.prompts[c.prompt_index], text, outcome)
            if c.greedy:
                row |= judged.get(c.prompt_index, {})
            file.write(json.dumps(row) + "\n")


def report(
    config: Config,
    completions: list[EvalCompletion],
    outcomes: list[Outcome],
    of: EvalSet,
    k: int,
) -> list[str]:
    """The lines to print about the prompts of a set with k samples each; completions and their
    outcomes are of all sets.
    """
    num_prompts = of.count
    # Under the columns of the task's own, whichever set it is.
    book = Evaluations([dataclasses.replace(of, name=OWN)], k)
    scores: dict[int, list[float]] = {}  # of each prompt's samples
    own = [(c, one) for c, one in zip(completions, outcomes) if c.prompt_index in of.numbers]
    for c, outcome in own:
        book.add(c, outcome)
        if not c.greedy and outcome.kind == "score":
            scores.setdefault(c.prompt_index, []).append(outcome.value)
    ((_, metrics),) = book.finished()
    length = metrics["eval/length_mean"]
    passes = "eval/accuracy" in metrics  # all scores are 0 or 1
    reward = metrics.get(EVALUATED)
    if reward is None:
        greedy = f"-- ({left_out(metrics)})"
    else:
        greedy = f"pass@1 {reward:.2%}" if passes else f"reward {reward:.4g}"
    lines = [
        f"greedy   {greedy} of {num_prompts} held-out prompts, {length:.1f} tokens mean length"
    ]
    if reward is not None and LEFT_OUT in metrics:
        lines.append(f"         {left_out(metrics)}")
    if k and scores:
        draws = sorted({k, *(1 << i for i in range(k.bit_length()))})
        passed = []
        for n in draws:
            best = sum(pass_at_k(s, min(n, len(s))) for s in scores.values()) / len(scores)
            passed.append(f"pass@{n} {best:.2%}" if passes else f"best of {n} {best:.4g}")
        lengths = [c.token_ids.numel() for c, _ in own if not c.greedy]
        mean = sum(lengths) / len(lengths)
        how = f"{k} a prompt at temperature {config.temperature:g}"
        lines.append(f"sampled  {'  '.join(passed)}   {how}, {mean:.1f} tokens mean length")
    if metrics["eval/errors"]:
        lines.append(
            f"errors   {metrics['eval/errors']} completions could not be scored and are left out"
        )
    return lines


def score_by_set(
    scorer: Scorer, sets: Sequence[EvalSet], completions: list[EvalCompletion], items: list[Item]
) -> list[Outcome]:
    """The outcomes of items, in order; what compares completions keeps to those of a set."""
    outcomes: list[Outcome] = []
    for one in sets:
        own = [item for c, item in zip(completions, items) if c.prompt_index in one.numbers]
        outcomes += score_all(scorer, own)
    return outcomes


def print_lines(of: EvalSet, sets: Sequence[EvalSet], lines: Sequence[str]) -> None:
    """Print lines about one of these sets, after its name where there is more than the task's."""
    if of.name or len(sets) > 1:
        print(f"held out {of.name or THE_TASK}")
    print("\n".join(lines))


def find_model(given: str | Path) -> tuple[Path, Path | None]:
    """(the Hugging Face directory to evaluate, the run_dir that it comes from or None).

    given: such a directory; RUN_DIR/checkpoints/step_N; RUN_DIR/checkpoints/latest; or RUN_DIR, for
    its latest. FileNotFoundError or CheckpointError, saying what to give instead.
    """
    path = Path(given)
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints" / LATEST
    if path.name == LATEST:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; a run has it once it has a checkpoint")
        path = path.with_name(path.read_text().strip())
    if path.name == "hf" and (path.parent / MANIFEST).is_file():
        path = path.parent
    if (path / MANIFEST).is_file():
        problems = verify(path)
        if problems:
            raise CheckpointError(damage(path, problems))
        return path / "hf", path.absolute().parents[1]
    if not (path / "config.json").is_file():
        raise FileNotFoundError(
            f"{path}: neither a Hugging Face directory (it has no config.json) nor a checkpoint "
            f"(no {MANIFEST}); give one of these, such as RUN_DIR/checkpoints/step_N or "
            "RUN_DIR/checkpoints/latest"
        )
    return path, None


def run(args: argparse.Namespace) -> None:
    """ValueError or OSError for what cannot be used."""
    model, made_by = find_model(args.directory)
    config = config_of(model, made_by, args.overrides)
    threads = threads_per_rank(config.threads, synchronous=config.max_lag == 0)
    world = init_world(threads=threads, timeout_s=config.timeout_s, reproducible=True)
    job = Job(config, world, RunDirectory(Path("."), None))
    check_inputs(job)
    asked = asked_of(job, args.num_prompts)
    if not asked.sets:
        raise ValueError("no held-out prompts: set eval.num_prompts, or task.eval_path=FILE")
    check_writable(args.out)
    against = find_against(args.against, job, asked)
    k = config.eval.num_samples if args.samples is None else args.samples
    engine = engine_alone(config, job)
    with closing(build_scorer(config, job)) as scorer:
        scorer.start()  # what is wrong with it is told before any work
        completions = answer(engine, job, asked.prompts, k)
        items = [
            item_of(c, asked.prompts[c.prompt_index], job.decode, job.decode_raw)
            for c in completions
        ]
        outcomes = score_by_set(scorer, asked.sets, completions, items)
    print(f"model    {model}, {config.task.kind}")
    for one in asked.sets:
        print_lines(one, asked.sets, report(config, completions, outcomes, one, k))
    judged: dict[int, dict[str, object]] = {}
    if config.gold is not None or config.eval.base is not None:
        del engine  # the scorers' memory
        answers = [Evaluated(*answer) for answer in zip(completions, items, outcomes)]
        for one, judgement in zip(asked.sets, judge(job, asked.sets, answers, against)):
            print_lines(one, asked.sets, judgement_lines(config, judgement, args.against))
            judged |= judged_columns(one, judgement)
    scored = list(zip([item.text for item in items], outcomes))
    write(args.out, asked, completions, scored, judged)
    print(f"written  {args.out}")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        run(args)
    except (ValueError, OSError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
