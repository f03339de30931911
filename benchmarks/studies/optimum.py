"""What trajectory balance is trained towards on the red team's toy, without any training.

The optimum of beta is ref(y) exp(r(y) / beta). Attacks of the start are drawn from ref; each
different one is answered often, so that r(y), its chance of success, is known and not one noisy
draw; those that look promising are answered anew, more often, so that none is there by luck alone.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch
from running import ROOT, job_command, run_process
from transformers import AutoTokenizer

from llamarl.inference import Engine, SamplingParams
from llamarl.inference.offline import completions_of
from llamarl.models.config import tiny_directory
from llamarl.scoring.embedding import (
    EmbedderSettings,
    load_embedder,
    mean_pairwise_distance,
    unit,
)

NUM_ATTACKS = 4096
ANSWERS = 24  # to each different attack
MORE_ANSWERS = 96  # to those of which more than PROMISING succeeded
PROMISING = 0.25
DIGIT = "5"  # an answer that has it is a success (conf/task/one_prompt.yaml)
REPLIES = 4  # as the job asks for; above half of them: an attack that succeeds
ANSWER_TOKENS = 6  # conf/victim/tiny.yaml
DRAWN = 64  # attacks that a distance is measured over, as in an evaluation of the other arms
DRAWS = 30
TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Attacks:
    """The different attacks of the start: how often each was drawn, and its share of successes."""

    texts: list[str]
    counts: list[int]
    rewards: list[float]


def optimum_row(folder: Path, words: Sequence[str]) -> list[dict]:
    """Draw 4,096 attacks of the start, answer each 24 times and the promising ones another 96, and
    weigh them by exp(r / beta).
    """
    beta = next(float(word.partition("=")[2]) for word in words if word.startswith("beta="))
    job = [word for word in words if not word.startswith("beta=")]
    seed = next(int(word.partition("=")[2]) for word in words if word.startswith("seed="))
    kept = folder.parent / f"start-of-seed-{seed}.json"
    if kept.exists():
        attacks = Attacks(**json.loads(kept.read_text()))
    else:
        attacks = attacks_of_the_start(folder / "start", job, seed)
        draft = kept.with_suffix(".part")
        fields = {
            "texts": attacks.texts,
            "counts": attacks.counts,
            "rewards": attacks.rewards,
        }
        draft.write_text(json.dumps(fields))
        draft.replace(kept)
    return [weighted(attacks, beta, seed)]


def attacks_of_the_start(run_dir: Path, words: list[str], seed: int) -> Attacks:
    """Return what the start's model attacks with, and how well each attack does."""
    many = [*words, "max_steps=0", f"eval.num_samples={NUM_ATTACKS}"]
    command = job_command(run_dir, many, ranks=1, recipe="red_team.py")
    done = run_process(command, timeout_s=TIMEOUT_S, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if done.status or done.timed_out:
        raise RuntimeError(f"the start's attacks failed:\n{done.last_lines()}")
    lines = (run_dir / "samples" / "step_0.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    scored = [row for row in rows if row["sample"] > 0 and row.get("score") is not None]
    drawn = Counter(row["completion"] for row in scored)
    texts = list(drawn)
    shares = successes(texts, ANSWERS, seed)
    promising = [index for index, share in enumerate(shares) if share > PROMISING]
    again = successes([texts[index] for index in promising], MORE_ANSWERS, seed + 1)
    for index, share in zip(promising, again, strict=True):
        shares[index] = share  # of the fresh answers alone
    return Attacks(texts=texts, counts=list(drawn.values()), rewards=shares)


def successes(attacks: list[str], num_answers: int, seed: int) -> list[float]:
    """Return for each attack the share of the victim's answers that are a success."""
    directory = str(tiny_directory())
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    end = tokenizer.eos_token_id
    params = SamplingParams(
        ANSWER_TOKENS, temperature=1.0, stop_token_ids=(end,), n=num_answers, seed=seed
    )
    engine = Engine.from_hf(directory, dtype="float32", max_slots=256, max_len=64, device="cpu")
    for index, attack in enumerate(attacks):
        engine.submit(index, torch.tensor(tokenizer.encode(f"{attack}=")), params)
    hits = [0] * len(attacks)
    for done in completions_of(engine, 8):
        for _, completion in done:
            ids = [token for token in completion.token_ids.tolist() if token != end]
            hits[completion.ticket] += DIGIT in tokenizer.decode(ids)
    return [hit / num_answers for hit in hits]


def chance_of_success(reward: torch.Tensor) -> torch.Tensor:
    """Return the chance that at least 3 of 4 answers are a success, from that of one."""
    return 4 * reward**3 * (1 - reward) + reward**4


def weighted(attacks: Attacks, beta: float, seed: int) -> dict:
    """Return the row of an evaluation of the optimum."""
    rewards = torch.tensor(attacks.rewards, dtype=torch.float64)
    counts = torch.tensor(attacks.counts, dtype=torch.float64)
    weights = torch.softmax(counts.log() + rewards / beta, 0)
    embedder = load_embedder(
        EmbedderSettings(str(tiny_directory()), True, "float32", 4096), torch.device("cpu")
    )
    units_NE = unit(embedder.embed(attacks.texts))
    generator = torch.Generator().manual_seed(seed)
    distances = []
    for _ in range(DRAWS):
        drawn = torch.multinomial(weights, DRAWN, replacement=True, generator=generator)
        distances.append(mean_pairwise_distance(units_NE[drawn]))
    return {
        "step": 1,
        "time/wall_s": 0.0,
        "eval/success": float((weights * chance_of_success(rewards)).sum()),
        "eval/diversity": sum(distances) / DRAWS,
        "optimum/effective_draws": 1 / float((weights**2 / counts).sum()),
        "optimum/largest_share": float(weights.max()),
        "optimum/start_success": float((counts * chance_of_success(rewards)).sum() / counts.sum()),
    }
