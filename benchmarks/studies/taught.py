"""An attacker that is taught: the start's model attacks many times, and learns, by supervised
training, the attacks that succeed.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch
from running import ROOT, run_job, run_process

from llamarl.models.config import tiny_directory
from llamarl.scoring.embedding import (
    EmbedderSettings,
    load_embedder,
    mean_pairwise_distance,
    unit,
)

NUM_ATTACKS = 4096
TIMEOUT_S = 1800.0
EMBEDDED_TOKENS = 4096
SUPERVISED = (
    "task.max_tokens=64",
    "task.num_eval=1",
    "examples_per_step=16",
    "epochs=10",
    "lr=3e-4",
    "eval.every=0",
    "metrics.trace=false",
)


def taught_rows(folder: Path, words: Sequence[str]) -> list[dict]:
    """Have the start's model attack 4,096 times, train it by ten passes over its successful
    attacks, and measure what it attacks with then.
    """
    look = [*words, "max_steps=0"]
    start = folder / "start"
    run_job(start, [*look, f"eval.num_samples={NUM_ATTACKS}"], ranks=1, recipe="red_team.py")
    learned = [row for row in sampled_attacks(start) if row["success"]]
    if not learned:
        raise RuntimeError(f"{folder}: none of {NUM_ATTACKS} attacks of the start succeeds")
    data = folder / "attacks.jsonl"
    pairs = [{"prompt": row["prompt"], "completion": row["completion"]} for row in learned]
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    model = folder / "sft"
    shutil.rmtree(model, ignore_errors=True)  # of a piece that was cut off
    given = [
        f"model.path={tiny_directory()}",
        "model.dtype=float32",
        f"task.path={data}",
        f"out={model}",
        *SUPERVISED,
    ]
    command = [sys.executable, str(ROOT / "recipes" / "sft.py"), *given]
    done = run_process(command, timeout_s=TIMEOUT_S)
    if done.status or done.timed_out:
        raise RuntimeError(f"SFT failed, status {done.status}:\n{done.last_lines()}")
    attacker = ["model=hf", f"model.path={model}", "model.dtype=float32"]
    rows = run_job(folder / "after", [*look, *attacker], ranks=1, recipe="red_team.py")
    # In the space that the other methods' attacks are measured in.
    embedder = load_embedder(
        EmbedderSettings(str(tiny_directory()), True, "float32", EMBEDDED_TOKENS),
        torch.device("cpu"),
    )
    texts = [row["completion"] for row in sampled_attacks(folder / "after")]
    distance = mean_pairwise_distance(unit(embedder.embed(texts)))
    row = {
        "step": 1,
        "time/wall_s": rows[-1]["time/wall_s"],
        "eval/success": rows[0]["eval/success"],
        "eval/diversity": distance,
    }
    return [row]


def sampled_attacks(run_dir: Path) -> list[dict]:
    """Return the sampled attacks of a run's first evaluation."""
    lines = (run_dir / "samples" / "step_0.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["sample"] > 0]
