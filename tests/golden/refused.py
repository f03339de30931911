"""Command lines that must be refused, with the keys that their problems name: refused.txt.

What is said of them is in refusals.txt, for a person to read when it changes:

    python -m tests.golden.refused > tests/golden/refusals.txt

A line of refused.txt is COMMAND LINE -> KEYS. "a b | c" are the keys of two problems, and "ok" says
that the line is accepted. A first word such as @sft, or @/4/2 for four ranks, two of them on a
host, asks for another job or for more ranks. The words of SHORT stand for what they are there.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest.mock import patch

from llamarl.config.command_line import RED_TEAM, RL, JobKind, check_command_line
from llamarl.config.evaluation import EVALUATION
from llamarl.config.preferences import PREFERENCES
from llamarl.config.supervised import REWARD_MODEL, SFT
from llamarl.models.config import tiny_directory
from llamarl.words.findings import ConfigError, Problem

REFUSED = Path(__file__).with_name("refused.txt")
REFUSALS = Path(__file__).with_name("refusals.txt")
JOBS: dict[str, JobKind] = {
    "": RL,
    "red_team": RED_TEAM,
    "evaluation": EVALUATION,
    "sft": SFT,
    "preferences": PREFERENCES,
    "reward_model": REWARD_MODEL,
}
SHORT = {
    "JUDGE": "reward=judge reward.url=http://h/v1 reward.model=m",
    "SCORER": "reward=model reward.path=TINY",
    "PLAYED": "task=environment task.environment=m:C",
    "GAE": "loss=ppo trainer.advantages=gae",
    "SPLIT": "buffer=replay buffer.draw=split loss=tb reference=frozen",
    "TURNS": "offload=true max_lag=0 placement.colocate=[trainer,generator]",
    "MIXED": "'task.parts={a: {kind: addition}, b: {kind: questions}}'",
    "LINE": "{kind: linear, final: 5, end_step: 5}",
    "TINY": str(tiny_directory()),
}


def rows() -> Iterator[tuple[str, str]]:
    """Each command line, and the keys of its problems."""
    for row in REFUSED.read_text().splitlines():
        line, arrow, keys = row.partition(" -> ")
        if arrow:
            yield line, keys


@cache
def problems(line: str) -> tuple[Problem, ...]:
    """Return what is wrong with a command line, where vLLM is installed and nothing else is."""
    for short, whole in SHORT.items():
        line = line.replace(short, whole)
    words = shlex.split(line)
    where = [*words.pop(0)[1:].split("/"), "", ""] if words[0].startswith("@") else [""] * 3
    vllm = patch("llamarl.inference.vllm_engine.vllm_problem", lambda: None)
    others = patch("llamarl.config.sections.run.find_spec", lambda name: None)
    builders = patch("llamarl.config.sections.model.find_spec", lambda name: None)
    with vllm, others, builders:
        try:
            check_command_line(
                words,
                kind=JOBS[where[0]],
                world_size=int(where[1] or 1),
                local_world_size=int(where[2]) if where[2] else None,
            )
        except ConfigError as error:
            return tuple(error.problems)
    return ()


def keys_of(line: str) -> str:
    """Return the keys of the problems of a command line, as rows have them."""
    found = problems(line)
    return " | ".join(" ".join(problem.keys) or "-" for problem in found) if found else "ok"


def wording_of(line: str) -> str:
    """Return a command line and what is said of it, as refusals.txt has them; "" for none."""
    said = [f"  {problem.where}   {problem.what}\n" for problem in problems(line)]
    return "".join([f"$ {line}\n", *said]).replace(SHORT["TINY"], "TINY") if said else ""


@cache
def read_wordings() -> dict[str, str]:
    """Return what refusals.txt has of each command line."""
    entries = REFUSALS.read_text().split("\n$ ")
    found = {}
    for entry in entries:
        entry = "$ " + entry.removeprefix("$ ").rstrip("\n") + "\n"
        found[entry.partition("\n")[0].removeprefix("$ ")] = entry
    return found


if __name__ == "__main__":
    print("".join(wording_of(line) for line, _ in rows()), end="")
