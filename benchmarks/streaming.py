"""What reading ahead buys: seconds from an answer's end to its score, and seconds a step, with a
policy and a reward model of one size.

    python benchmarks/streaming.py --model DIR [--steps 4] [--chunks 16 32 64 128]
    [--trl-python PYTHON] [--runs DIR] [--json FILE] [--page FILE]

DIR is a language model's directory; a scorer of its trunk with a random head is made for the time
of the run. The main job runs on two ranks of one thread: the generator has one of them, trainer and
scorer the other. All answers have --answer-tokens tokens, and --slots of them are decoded at a
time. Four ways to overlap, the bars of OPPO's figure 6:

    none     synchronous, an answer is read when its group is whole
    intra    synchronous, read while it is sampled (reward.stream)
    inter    max_lag=1, groups beyond a batch by its trend (overcommit=oppo)
    both     inter and intra

and intra over --chunks, the curve of figure 7b. The limit that a tail is compared with is the tail
of `none` in the same run: what reading the whole costs where nothing was read before. --trl-python:
an interpreter that has TRL, whose RLOO trainer makes the same steps with the same two models.
--runs: what runs come to is kept there, and none is made again with the same settings.

`predicted` is arithmetic, no measurement: a step of seven GPUs that sample and train beside one
that scores, from how fast each works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
from running import (
    ROOT,
    as_item,
    as_paragraph,
    keep,
    kept_file,
    machine,
    read_rows,
    run_job,
    run_process,
)
from scoring import scorer_of

WAYS = ("none", "intra", "inter", "both")
AIM = 0.15  # of the tail of a whole reading
TRL_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """GPUs that sample and train beside one that scores, for a model of `parameters`.

    peak: operations a second of a GPU. prefill_share: of that, when prompts are read.
    decode_step_s: of one token of each answer that a GPU samples at a time.
    """

    gpus: int = 7
    parameters: float = 7.6e9
    peak: float = 989e12
    prefill_share: float = 0.4
    decode_step_s: float = 0.02
    answers: int = 112  # a batch, the paper's
    answer_tokens: int = 1000
    prompt_tokens: int = 200
    train_s: float = 6.0

    @property
    def tokens_read_per_s(self) -> float:
        """By the one that scores."""
        return self.prefill_share * self.peak / (2 * self.parameters)


def predicted(cluster: Cluster, chunk_tokens: int) -> dict[str, float]:
    """Seconds of a step whose answers all end at once, without and with reading ahead.

    Reading ahead goes on beside sampling as long as the scorer keeps up; what it has not read when
    the answers end, and the last piece of each, is the tail.
    """
    decode_s = cluster.answer_tokens * cluster.decode_step_s
    tokens = cluster.answers * (cluster.answer_tokens + cluster.prompt_tokens)
    read_s = tokens / cluster.tokens_read_per_s
    behind_s = max(0.0, read_s - decode_s)
    last_s = cluster.answers * min(chunk_tokens, cluster.answer_tokens) / cluster.tokens_read_per_s
    tail_s = min(read_s, behind_s + last_s)
    whole_s = decode_s + read_s + cluster.train_s
    ahead_s = decode_s + tail_s + cluster.train_s
    return {
        "decode_s": decode_s,
        "read_s": read_s,
        "tail_s": tail_s,
        "whole_step_s": whole_s,
        "ahead_step_s": ahead_s,
        "saved": 1 - ahead_s / whole_s,
    }


# --- The runs ---


def common(args: argparse.Namespace, scorer: Path) -> list[str]:
    """What all runs of ours have in common."""
    return [
        "model=hf",
        f"model.path={args.model.absolute()}",
        f"model.dtype={args.dtype}",
        f"trainer.compute_dtype={args.dtype}",
        "reward=model",
        f"reward.path={scorer.absolute()}",
        "task=questions",
        "loss=rloo",
        f"groups_per_step={args.groups}",
        f"group_size={args.group}",
        f"max_new_tokens={args.answer_tokens}",
        f"generator.min_new_tokens={args.answer_tokens - 1}",
        f"generator.max_slots={args.slots}",
        "placement.trainer=[0]",
        "placement.reward=[0]",
        "placement.generator=[1]",
        f"max_steps={args.steps + 1}",
        "eval.every=0",
        "checkpoint.every=0",
        "threads=1",
    ]


def overrides_of(way: str, chunk_tokens: int) -> list[str]:
    """What a way adds."""
    words = ["max_lag=0"]
    if way in ("inter", "both"):
        words = ["max_lag=1", "overcommit=oppo"]
    if way in ("intra", "both"):
        words += ["reward.stream=true", f"reward.piece_tokens={chunk_tokens}"]
    return words


def sizes_of(args: argparse.Namespace) -> dict:
    """What makes a run that run, but for its overlap."""
    return {
        "model": args.model.name,  # and not where it lies
        "groups": args.groups,
        "group": args.group,
        "answer_tokens": args.answer_tokens,
        "slots": args.slots,
        "dtype": args.dtype,
        "steps": args.steps,
    }


def made_or_kept(args: argparse.Namespace, name: str, make: Callable[[], dict]) -> dict:
    """What the run of that name came to: from --runs, where an earlier call on such a machine made
    it.
    """
    if args.runs is None:
        return make()
    on = {key: value for key, value in machine().items() if key != "load"}
    file = kept_file(args.runs, [name, sizes_of(args), on])
    if file.exists():
        return json.loads(file.read_text())
    found = make()
    keep(file, found)
    print(f"{name}: {json.dumps(found)}", file=sys.stderr)
    return found


def made_run(args: argparse.Namespace, scorer: Path, way: str, chunk_tokens: int) -> dict:
    """One run's medians over its steps but the first."""
    with tempfile.TemporaryDirectory() as folder:
        words = common(args, scorer) + overrides_of(way, chunk_tokens)
        rows = run_job(Path(folder) / "run", words)
    rows = [row for row in rows if row["step"] > 1]
    streams = way in ("intra", "both")

    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    return {
        "way": way,
        "chunk_tokens": chunk_tokens if streams else None,
        "step_s": median("time/step_s"),
        "tail_s": median("reward/tail_s"),
        "prefilled_early": median("reward/prefilled_early") if streams else None,
        "scorer_s": median("reward/model/seconds"),
    }


def made_by_trl(args: argparse.Namespace, scorer: Path) -> dict:
    """TRL's step."""
    with tempfile.TemporaryDirectory() as folder:
        script = ROOT / "benchmarks" / "streaming_trl.py"
        run_dir = Path(folder) / "run"
        sizes = {
            "groups": args.groups,
            "group": args.group,
            "answer_tokens": args.answer_tokens,
            "steps": args.steps + 1,
            "dtype": args.dtype,
            "threads": 2,  # it has both cores
        }
        words = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
        paths = [f"--model={args.model.absolute()}", f"--scorer={scorer.absolute()}"]
        command = [args.trl_python, str(script), f"--run-dir={run_dir}", *paths, *words]
        done = run_process(command, timeout_s=TRL_TIMEOUT_S)
        if done.status:
            raise RuntimeError(f"TRL ended with status {done.status}:\n{done.last_lines()}")
        rows = [row for row in read_rows(run_dir) if row["step"] > 1]
    step_s = statistics.median(row["step_s"] for row in rows)
    return {"step_s": step_s, "trl": rows[0]["trl"], "answer_tokens": rows[0]["answer_tokens"]}


# --- What is said of them ---


def best_chunk(runs: list[dict]) -> int:
    """The chunk size of the fastest synchronous run that read ahead."""
    intra = [run for run in runs if run["way"] == "intra"]
    return min(intra, key=lambda run: run["step_s"])["chunk_tokens"]


def row_of(way: str, chunk: str, step: str, tail: str, early: str) -> str:
    return f"| {way} | {chunk} | {step} | {tail} | {early} |"


def table(found: dict) -> list[str]:
    """The runs, a row each."""
    lines = [
        row_of("overlap", "chunk, tokens", "s a step", "tail of a score, s", "read before its end"),
        "|---|---|---|---|---|",
    ]
    for run in found["runs"]:
        early = run["prefilled_early"]
        line = row_of(
            run["way"],
            "" if run["chunk_tokens"] is None else str(run["chunk_tokens"]),
            f"{run['step_s']:.2f}",
            f"{run['tail_s']:.3f}",
            "" if early is None else f"{early:.0%}",
        )
        lines.append(line)
    if found["trl"] is not None:
        trl = found["trl"]
        lines.append(row_of(f"TRL {trl['trl']}, RLOO", "", f"{trl['step_s']:.2f}", "", ""))
    return lines


def verdict(found: dict) -> list[str]:
    """Whether the aim was met, and what a step gained."""
    runs = found["runs"]
    none = next(run for run in runs if run["way"] == "none")
    intra = [run for run in runs if run["way"] == "intra"]
    shortest = min(intra, key=lambda run: run["tail_s"])
    fastest = min(intra, key=lambda run: run["step_s"])
    slowest = max(intra, key=lambda run: run["step_s"])
    share = shortest["tail_s"] / none["tail_s"]
    is_met = "met" if share <= AIM else "not met"
    lines = [
        f"The shortest tail, with chunks of {shortest['chunk_tokens']} tokens, is {share:.0%} of "
        f"that without reading ahead: the aim of {AIM:.0%} is {is_met}.",
        f"A synchronous step takes {fastest['step_s'] / none['step_s']:.0%} of the time at the "
        f"fastest chunk size, {fastest['chunk_tokens']} tokens, and "
        f"{slowest['step_s'] / none['step_s']:.0%} at the slowest.",
    ]
    saved_s = none["step_s"] - fastest["step_s"]
    if saved_s > none["scorer_s"]:
        lines.append(
            f"All that the scorer does takes {none['scorer_s']:.1f} s of a step "
            f"({none['scorer_s'] / none['step_s']:.0%}), and {saved_s:.1f} s seem to be saved: "
            f"medians of {found['settings']['steps']} steps are off by some seconds, so the step's "
            "share is no better known than that."
        )
    inter = next(run for run in runs if run["way"] == "inter")
    both = next(run for run in runs if run["way"] == "both")
    change = both["step_s"] / inter["step_s"] - 1
    if both["prefilled_early"] > 0:
        lines.append(f"Beside asynchrony it changes a step by {change:+.0%}.")
    else:
        lines.append(
            "Beside asynchrony nothing was read ahead (0%), for trainer and scorer share a core "
            f"without idle time: the {change:+.0%} of its step is no effect of streaming."
        )
    if found["trl"] is not None:
        times = found["trl"]["step_s"] / fastest["step_s"]
        lines.append(f"TRL's step, on both cores, takes {times:.1f} times as long.")
    return lines


def draw(found: dict, file: Path) -> None:
    """Seconds a step by overlap (figure 6), and the tail of a score by chunk size (figure 7b)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (bars, curve) = plt.subplots(1, 2, figsize=(8.4, 3.4), layout="constrained")
    best = best_chunk(found["runs"])
    heights = {}
    for run in found["runs"]:
        if run["way"] != "intra" or run["chunk_tokens"] == best:
            heights[run["way"]] = run["step_s"]
    if found["trl"] is not None:
        heights["TRL"] = found["trl"]["step_s"]
    drawn = bars.bar(list(heights), list(heights.values()), color="tab:blue")
    bars.bar_label(drawn, fmt="%.0f", fontsize=8)
    bars.set_ylabel("seconds a step")
    bars.set_title(f"overlap (chunks of {best} tokens)", fontsize=9)

    intra = [run for run in found["runs"] if run["way"] == "intra"]
    sizes = [run["chunk_tokens"] for run in intra]
    whole = next(run for run in found["runs"] if run["way"] == "none")
    curve.plot(sizes, [run["tail_s"] for run in intra], "o-", label="read ahead")
    curve.axhline(whole["tail_s"], color="black", ls="--", lw=1, label="whole")
    curve.axhline(AIM * whole["tail_s"], color="gray", ls=":", lw=1, label=f"{AIM:.0%} of it")
    curve.set_xscale("log", base=2)
    curve.set_xticks(sizes, [str(size) for size in sizes])
    curve.set_ylim(bottom=0)
    curve.set_xlabel("tokens of a chunk")
    curve.set_ylabel("tail of a score, s")
    curve.legend(fontsize=8, frameon=False)
    for ax in (bars, curve):
        ax.grid(alpha=0.3, axis="y")
        ax.set_axisbelow(True)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def page_of(found: dict, picture: str) -> str:
    """The page of docs and results, in Markdown."""
    about = found["machine"]
    sizes = found["settings"]
    cluster = Cluster()
    setup = (
        f"{sizes['model']} as policy and as trunk of the scorer, {sizes['dtype']}, "
        f"{sizes['groups']} x {sizes['group']} answers of {sizes['answer_tokens']} tokens a step, "
        f"{sizes['slots']} at a time, medians of {sizes['steps']} steps after the first; two ranks "
        f"of one thread: the generator has one, trainer and scorer the other. {about['cpu']}, "
        f"{about['cores']} cores, torch {about['torch']}. Made by `benchmarks/streaming.py`."
    )
    little = (
        "A scorer that is much smaller than the policy: its whole reading is a small share of a "
        "step, and that share is all that can be saved.",
        "Ranks that are busy while answers are sampled, as with two cores and `max_lag` above 0: "
        "what is read ahead takes the time from training, or waits for it.",
        "Short answers: most of a reading is the prompt, and the tail is one piece anyway.",
    )
    assumed = (
        f"A model and a scorer of {cluster.parameters / 1e9:.1f}e9 parameters, "
        f"{cluster.answers} answers of {cluster.answer_tokens} tokens after prompts of "
        f"{cluster.prompt_tokens}, {cluster.decode_step_s * 1e3:.0f} ms a token of all answers, "
        f"prefill at {cluster.prefill_share:.0%} of {cluster.peak / 1e12:.0f}e12 operations a "
        f"second, training {cluster.train_s:.0f} s; all answers end at once."
    )
    lines = [
        "# Reading ahead: a score's tail is measured, a step's share is not",
        "",
        as_paragraph(setup),
        "",
        *table(found),
        "",
        *map(as_item, verdict(found)),
        "",
        f"![seconds a step, and tails]({picture})",
        "",
        "## Where it pays little",
        "",
        *map(as_item, little),
        "",
        "## Seven GPUs and one that scores: arithmetic, not measured",
        "",
        as_paragraph(assumed),
        "",
        "| chunk, tokens | tail, s | step, s | saved |",
        "|---|---|---|---|",
    ]
    for chunk in (100, 250, 500, 1000):
        step = predicted(cluster, chunk)
        lines.append(
            f"| {chunk} | {step['tail_s']:.2f} of {step['read_s']:.2f} | "
            f"{step['ahead_step_s']:.1f} of {step['whole_step_s']:.1f} | {step['saved']:.0%} |"
        )
    return "\n".join(lines) + "\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--groups", type=int, default=2, help="prompts a step")
    parser.add_argument("--group", type=int, default=8, help="answers a prompt")
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--slots", type=int, default=16, help="answers decoded at a time")
    parser.add_argument("--chunks", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=4, help="that count; one more comes first")
    parser.add_argument("--trl-python", help="an interpreter with TRL")
    parser.add_argument("--runs", type=Path, help="keeps what the runs came to; none: nothing is")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="Markdown; its picture lies beside it")
    return parser.parse_args()


def main() -> None:
    args = parse()
    trl = None
    with tempfile.TemporaryDirectory() as folder:
        scorer = scorer_of(args.model, Path(folder) / "scorer")

        def run_of(way: str, chunk_tokens: int = 0) -> dict:
            name = f"{way}_{chunk_tokens}" if chunk_tokens else way
            return made_or_kept(args, name, lambda: made_run(args, scorer, way, chunk_tokens))

        runs = [run_of("none")]
        for chunk_tokens in args.chunks:
            runs.append(run_of("intra", chunk_tokens))
        runs.append(run_of("inter"))
        runs.append(run_of("both", best_chunk(runs)))
        if args.trl_python is not None:
            trl = made_or_kept(args, "trl", lambda: made_by_trl(args, scorer))
    found = {
        "benchmark": "streaming",
        "machine": machine(),
        "settings": sizes_of(args) | {"chunks": args.chunks},
        "runs": runs,
        "trl": trl,
    }
    print("\n".join(table(found)))
    print("\n".join(map(as_item, verdict(found))))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    if args.page:
        picture = args.page.with_suffix(".png")
        draw(found, picture)
        args.page.write_text(page_of(found, picture.name))


if __name__ == "__main__":
    main()
