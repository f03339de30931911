"""How well a model answers a task's held-out prompts: pass@1 greedily, pass@k sampled as in
training. One process.

    # as the run was configured: the accuracy that it reported
    python recipes/evaluate.py RUN_DIR/checkpoints/latest
    python recipes/evaluate.py RUN_DIR/checkpoints/step_50 --samples 16 temperature=0.8
    python recipes/evaluate.py HF_DIR --num-prompts 100 \\
        task=gsm8k task.path=train.jsonl task.eval_path=test.jsonl

Keys of the main job's config (key=value) say which task, reward and sampling; beside a run's
config.yaml they change what they name. Each completion becomes a line of --out. The weights are
taken as they were saved: not quantised, not split. Exit status: 0, or 2 for a directory, a key,
data or an --out that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch.distributed as dist

from executors.build import build_scoring, engine_alone, sampling_of
from executors.reward import item_of
from executors.scoring import score_all
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
from llamarl.config.conversion import flat, is_marked, load_config, to_values, value_differences
from llamarl.errors import CheckpointError
from llamarl.inference import Engine
from llamarl.inference.evaluation import eval_completion, submit
from llamarl.inference.offline import completions_of
from llamarl.launch.inputs import check_inputs
from llamarl.launch.job import Job
from llamarl.launch.run_directory import RunDirectory
from llamarl.tasks.evaluation import Evaluations, pass_at_k, score_of
from llamarl.tasks.source import Outcome
from llamarl.types import EvalCompletion, Prompt

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
        help="the first so many held-out prompts; as the config has it if not given",
    )
    parser.add_argument(
        "--samples", type=int, help="sampled completions a prompt; eval.num_samples if not given"
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
    return args


def config_of(model: Path, run: Path | None, overrides: list[str]) -> Config:
    """The run's own config, where there is one, with what the command line changes: of the run are
    the keys that the schema marks ANSWERS. ConfigError.
    """
    given = [word for word in overrides if not word.startswith("model.path=")]
    config = compose_config([*given, f"model.path='{model}'"])
    if config.generator.kind != "native":
        what = "models are evaluated by the native engine; leave it out"
        raise ConfigError([Problem(f"generator.kind={config.generator.kind}", what)])
    if run is None or not (run / "config.yaml").is_file():
        return config
    named = {word.partition("=")[0].lstrip("+") for word in given}
    values = to_values(config)
    named |= set(value_differences(to_values(compose_config([])), values))
    old = to_values(load_config(run / "config.yaml"))
    named_sections = {key.partition(".")[0] for key in named}
    for section in {"task", "reward"} - named_sections:
        values[section] = old.pop(section)  # of its kind, whatever ours is
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


def answer(
    engine: Engine, job: Job, prompts: list[Prompt], num_samples: int
) -> list[EvalCompletion]:
    """The completions of all prompts, in order: of each the greedy one, then the sampled ones."""
    sampling = sampling_of(job.config, job)
    for j, prompt in enumerate(prompts):
        submit(engine, j, prompt, sampling, num_samples)
    completions = []
    for finished in completions_of(engine, job.config.generator.chunk_tokens):
        completions += [eval_completion(stream, c) for stream, c in finished]
    return sorted(completions, key=lambda c: (c.prompt_index, number_of(c)))


def number_of(completion: EvalCompletion) -> int:
    """Which of its prompt's completions it is: 0 is the greedy one, 1 .. k are those sampled."""
    return 0 if completion.greedy else completion.sample_index + 1


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
    prompts: list[Prompt],
    completions: list[EvalCompletion],
    scored: list[tuple[str, Outcome]],
) -> None:
    """Write a line of JSON for each completion, with its text and its outcome."""
    with out.open("w") as file:
        for c, (text, outcome) in zip(completions, scored):
            line = {
                "prompt": prompts[c.prompt_index].text,
                "completion": text,
                "score": score_of(outcome),
                "outcome": outcome.kind,
                "number": c.prompt_index,
                "sample": number_of(c),
                "num_tokens": c.token_ids.numel(),
                "finish_reason": c.finish_reason,
            }
            file.write(json.dumps(line) + "\n")


def report(
    config: Config,
    completions: list[EvalCompletion],
    outcomes: list[Outcome],
    num_prompts: int,
    k: int,
) -> list[str]:
    """The lines to print about num_prompts prompts with k samples each."""
    book = Evaluations(num_prompts, k)
    scores: dict[int, list[float]] = {}  # of each prompt's samples
    for c, outcome in zip(completions, outcomes):
        book.add(c, outcome)
        if not c.greedy:
            scores.setdefault(c.prompt_index, []).append(score_of(outcome))
    ((_, metrics),) = book.finished()
    length = metrics["eval/length_mean"]
    passes = "eval/accuracy" in metrics  # all scores are 0 or 1
    reward = metrics["eval/reward"]
    greedy = f"pass@1 {reward:.2%}" if passes else f"reward {reward:.4g}"
    lines = [
        f"greedy   {greedy} of {num_prompts} held-out prompts, {length:.1f} tokens mean length"
    ]
    if k:
        draws = sorted({k, *(1 << i for i in range(k.bit_length()))})
        passed = []
        for n in draws:
            best = sum(pass_at_k(s, n) for s in scores.values()) / num_prompts
            passed.append(f"pass@{n} {best:.2%}" if passes else f"best of {n} {best:.4g}")
        lengths = [c.token_ids.numel() for c in completions if not c.greedy]
        mean = sum(lengths) / len(lengths)
        how = f"{k} a prompt at temperature {config.temperature:g}"
        lines.append(f"sampled  {'  '.join(passed)}   {how}, {mean:.1f} tokens mean length")
    if metrics["eval/errors"]:
        lines.append(
            f"errors   {metrics['eval/errors']} completions could not be scored and count as wrong"
        )
    return lines


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
    # What is held out depends on eval.num_prompts alone, so that nothing that was trained on is
    # asked.
    count = min(args.num_prompts or config.eval.num_prompts, job.task.num_eval)
    if not count:
        raise ValueError("no held-out prompts: set eval.num_prompts, or task.eval_path=FILE")
    check_writable(args.out)
    prompts = [job.task.eval_prompt(j) for j in range(count)]
    k = config.eval.num_samples if args.samples is None else args.samples
    engine = engine_alone(config, job)
    with closing(build_scoring(config, job)) as scoring:
        scoring.start()  # what is wrong with a source is told before any work
        completions = answer(engine, job, prompts, k)
        items = [item_of(c, prompts[c.prompt_index], job.decode) for c in completions]
        outcomes = score_all(scoring, items)
    texts = [item.text for item in items]
    print(f"model    {model}, {config.task.kind}")
    print("\n".join(report(config, completions, outcomes, count, k)))
    write(args.out, prompts, completions, list(zip(texts, outcomes)))
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
