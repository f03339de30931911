"""A tool that the policy learns to use: sums of three numbers, which the embedded model cannot do
in its head, with a calculator that adds up two of them.

    python benchmarks/calculator.py --runs DIR [--only PIECE] [--seconds 200]
    python benchmarks/calculator.py --runs DIR --report

    warm     recipes/sft.py on dialogues of a poor teacher: it says a random number at once in ten
             of eleven, and asks in one; of the two numbers that are left then it forgets the carry
             in one of two
    before   the embedded model as it is, on the held-out sums
    seed0 .. the main job from the warm start, synchronous, a reward of 1 for the sum and nothing
             else; three seeds
    alone    the same as seed0 without the tool: one turn
    killed   seed0 again, killed with SIGKILL in the middle and resumed

What the teacher says, the sums that are trained on and those that are held out are of different
numbers. Each piece goes on where it was cut off: --seconds ends it there. --report writes
calculator.json and calculator.png into results/.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from make_tiny import without_carry
from running import ROOT, machine, read_rows, run_process

sys.path.insert(0, str(ROOT))

from llamarl.observe import is_timing

RESULTS = Path(__file__).parent / "results"
SEEDS = (0, 1, 2)
PIECES = ("warm", "before", *(f"seed{seed}" for seed in SEEDS), "killed", "alone")
STEPS = 120
NUM_HELD_OUT, NUM_WARM = 500, 4000
# Rows of the teacher a sum.
AT_ONCE = 10
ASKED = 1
GONE_ON = 22
KILL_AFTER = 50  # steps, at least
TARGET = 0.9
LEAST_S = 30  # a piece is not begun with less time
WARM = (
    "model=tiny",
    "lr=1e-3",
    "epochs=null",
    "max_steps=350",
    "examples_per_step=256",
    "trainer.warmup_fraction=0.1",
    "trainer.weight_decay=0.01",
    "trainer.compute_dtype=float32",
    "task.chat=false",
    "eval.every=100",
    "checkpoint.every=100",
    "threads=1",
)
TRAINING = (
    "task=environment",
    "task.environment=benchmarks.games:Calculator",
    "reward=function",
    "task.chat=false",
    "task.max_prompt_tokens=16",
    "task.play.max_turn_tokens=4",
    "max_new_tokens=16",
    "generator.stop=['?']",
    "groups_per_step=64",
    "loss=reinforce",
    "lr=3e-4",
    "max_lag=0",
    "eval.every=10",
    "eval.num_prompts=500",
    "checkpoint.every=20",
    "metrics.trace=false",
    "threads=1",
)


def write_rows(folder: Path) -> None:
    """Write the rows of the teacher, of training and of the held-out sums."""
    sums = list(itertools.product(range(10, 34), repeat=3))
    chosen = random.Random(0)
    chosen.shuffle(sums)
    held_out = sums[:NUM_HELD_OUT]
    taught = sums[NUM_HELD_OUT : NUM_HELD_OUT + NUM_WARM]
    trained = sums[NUM_HELD_OUT + NUM_WARM :]
    _write(folder / "held_out.jsonl", [_row(numbers) for numbers in held_out])
    _write(folder / "train.jsonl", [_row(numbers) for numbers in trained])
    rows = []
    for numbers in taught:
        rows += taught_rows(numbers, chosen)
    _write(folder / "warm.jsonl", rows)


def taught_rows(numbers: tuple[int, ...], chosen: random.Random) -> list[dict[str, str]]:
    """Return the teacher's dialogues about a sum, a row each turn. chosen: draws numbers."""
    prompt = _row(numbers)["prompt"]
    rows = []
    for _ in range(AT_ONCE):
        rows.append({"prompt": prompt, "completion": str(chosen.randint(30, 99))})
    for _ in range(ASKED):
        rows.append({"prompt": prompt, "completion": "?"})
    first, second = str(numbers[0] + numbers[1]), str(numbers[2])
    for _ in range(GONE_ON):
        answer = str(sum(numbers))
        if chosen.random() < 0.5:
            answer = without_carry(first, second)
        rows.append({"prompt": f"{prompt}?  {first}+{second}=", "completion": answer})
    return rows


def _row(numbers: tuple[int, ...]) -> dict[str, str]:
    return {"prompt": "+".join(map(str, numbers)) + "=", "answer": str(sum(numbers))}


def _write(file: Path, rows: list[dict[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def command_of(piece: str, folder: Path) -> list[str]:
    """Return the command line of a piece, which goes on where it was."""
    python = [sys.executable]
    if piece == "warm":
        recipe = str(ROOT / "recipes" / "sft.py")
        rows = f"task.path={folder / 'warm.jsonl'}"
        return [*python, recipe, rows, f"out={folder / 'warm'}", *WARM, "resume=auto"]
    seed = int(piece[4:]) if piece.startswith("seed") else 0
    more = [
        f"task.path={folder / 'train.jsonl'}",
        f"task.eval_path={folder / 'held_out.jsonl'}",
        f"task.play.max_turns={1 if piece == 'alone' else 2}",
        f"max_steps={1 if piece == 'before' else STEPS}",
        f"seed={seed}",
        f"run_dir={folder / piece}",
        "resume=auto",
    ]
    if piece != "before":
        more.append(f"model.path={folder / 'warm'}")
    return [*python, str(ROOT / "recipes" / "llama_async.py"), *TRAINING, *more]


def is_done(piece: str, folder: Path) -> bool:
    """Whether a piece came to its end."""
    if piece == "warm":
        return (folder / "warm" / "model.safetensors").exists()
    if not (folder / piece / "metrics.jsonl").exists():
        return False
    last = 1 if piece == "before" else STEPS
    has_last = any(row["step"] == last for row in read_rows(folder / piece))
    return has_last and weights_of(folder / piece) is not None


def make(piece: str, folder: Path, seconds: float) -> None:
    """Make a piece, or go on with it, for so many seconds. RuntimeError if it fails."""
    command = command_of(piece, folder)
    marker = folder / "killed.at"
    if piece == "killed" and not marker.exists():
        begin = time.monotonic()
        marker.write_text(str(kill(command, folder / piece, seconds)))
        seconds -= time.monotonic() - begin
    done = run_process(command, timeout_s=seconds)
    if done.status and not done.timed_out:
        raise RuntimeError(f"{piece} failed, status {done.status}:\n{done.last_lines()}")


def kill(command: list[str], run_dir: Path, seconds: float) -> int:
    """Start a run, and kill it once it is KILL_AFTER steps far and past a checkpoint, or after so
    many seconds. Return the newest step that it told.
    """
    ends = time.monotonic() + seconds
    with open(os.devnull, "w") as nowhere:
        process = subprocess.Popen(
            command, stdout=nowhere, stderr=nowhere, cwd=ROOT, start_new_session=True
        )
    try:
        while process.poll() is None and time.monotonic() < ends:
            time.sleep(0.5)
            has_begun = (run_dir / "checkpoints" / "latest").exists()
            if has_begun and _newest(run_dir) >= KILL_AFTER + 7:
                break
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"it ended by itself, status {process.returncode}")
    return _newest(run_dir)


def _newest(run_dir: Path) -> int:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[-2])["step"] if len(lines) > 1 else 0  # the last may be half a line


def weights_of(run_dir: Path) -> str | None:
    """Return a digest of the weights after the last step; None if there are none."""
    files = sorted((run_dir / "checkpoints").glob(f"step_{STEPS}/hf/*.safetensors"))
    if run_dir.name == "before":
        return ""
    if not files:
        return None
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def untimed(rows: list[dict]) -> list[dict]:
    """Return rows without clocks."""
    found = []
    for row in rows:
        found.append({name: value for name, value in row.items() if not is_timing(name)})
    return found


def report(folder: Path) -> dict:
    """Return what was measured, and print it."""
    found: dict = {"steps": STEPS, "runs": {}, "machine": machine()}
    for piece in PIECES[1:]:
        if not is_done(piece, folder):
            print(f"{piece}: not made")
            continue
        rows = read_rows(folder / piece)
        curve = []
        asked = []
        for row in rows:
            if row.get("eval/accuracy") is not None:
                curve.append([row["step"], row["eval/accuracy"]])
            if row.get("dialogues/turns"):
                number = row["dialogues/turns"] - row.get("dialogues/completed", 0.0)
                asked.append([row["step"], number / 512])
        found["runs"][piece] = {"accuracy": curve, "turns_beyond_the_first": asked}
        reached = next((step for step, accuracy in curve if accuracy > TARGET), None)
        print(f"{piece:7} {curve[0][1]:6.1%} -> {curve[-1][1]:6.1%}, over 90 % at {reached}")
    if {"seed0", "killed"} <= set(found["runs"]):
        whole, resumed = (untimed(read_rows(folder / piece)) for piece in ("seed0", "killed"))
        digests = [weights_of(folder / piece) for piece in ("seed0", "killed")]
        found["killed"] = {
            "after_step": int((folder / "killed.at").read_text()),
            "equal_rows": whole == resumed,
            "equal_weights": digests[0] == digests[1],
            "num_rows": len(whole),
        }
        print(f"killed: {found['killed']}")
    return found


def plot(found: dict, file: Path) -> None:
    """Draw held-out accuracy and the share of dialogues that ask, against steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for piece, run in found["runs"].items():
        if piece in ("before", "killed"):
            continue
        style = {"color": "0.5", "linestyle": "--"} if piece == "alone" else {}
        label = "without the tool" if piece == "alone" else piece.replace("seed", "seed ")
        left.plot(*zip(*run["accuracy"]), label=label, **style)
        if run["turns_beyond_the_first"] and piece != "alone":
            right.plot(*zip(*run["turns_beyond_the_first"]), label=label)
    left.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
    left.axhline(TARGET, color="0.8", linewidth=0.8)
    left.legend(frameon=False)
    right.set(xlabel="step", ylabel="calls a dialogue", ylim=(0, None))
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--only", choices=PIECES)
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    folder = args.runs.absolute()
    if args.report:
        found = report(folder)
        (RESULTS / "calculator.json").write_text(json.dumps(found, indent=1) + "\n")
        plot(found, RESULTS / "calculator.png")
        return
    if not (folder / "held_out.jsonl").exists():
        write_rows(folder)
    begin = time.monotonic()
    for piece in (args.only,) if args.only else PIECES:
        left_s = args.seconds - (time.monotonic() - begin)
        if left_s < LEAST_S:
            break
        if not is_done(piece, folder):
            make(piece, folder, left_s)


if __name__ == "__main__":
    main()
