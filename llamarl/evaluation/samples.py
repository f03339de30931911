"""Samples: writes an evaluation's completions and their scores to files, for people to read.

    held-out completions with their outcomes --> RUN_DIR/samples/step_N.jsonl

One JSON object a line, as recipes/evaluate.py writes them (llamarl.evaluation.metrics.sample_row);
`answers` are a victim's replies to the completion, and `success` is whether their mean score,
without novelty, is above victim.threshold.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from llamarl.evaluation.judges import EvalJudge, Evaluated, Metrics
from llamarl.evaluation.metrics import sample_row
from llamarl.tasks.held_out import EvalSet, set_of

log = logging.getLogger(__name__)


class Samples(EvalJudge):
    """Writes evaluations to files in `folder`, one for each version. It adds no metrics.

    sets: the sets of held-out prompts. success_above: an attack succeeds with a score above it;
    None: there is no victim.
    """

    def __init__(self, folder: Path, sets: Sequence[EvalSet], success_above: float | None):
        self._folder = folder
        self._sets = sets
        self._success_above = success_above
        self._begun: list[tuple[int, Sequence[Evaluated]]] = []
        self._can_write = True

    def begin(self, version: int, answers: Sequence[Evaluated]) -> None:
        """Take an evaluation, which `poll` writes."""
        self._begun.append((version, answers))

    def poll(self) -> list[tuple[int, Metrics]]:
        """Write what was begun. If that fails, warn once and let the run go on, because nothing is
        learned from it.
        """
        begun = self._begun
        self._begun = []
        for version, answers in begun:
            if self._can_write:
                self._write(version, answers)
        return [(version, {}) for version, _ in begun]

    def close(self) -> None:
        """Drop what is not written."""
        self._begun.clear()

    def _write(self, version: int, answers: Sequence[Evaluated]) -> None:
        text = ""
        for answer in answers:
            text += json.dumps(self._row(answer)) + "\n"
        file = self._folder / f"step_{version}.jsonl"
        draft = file.with_suffix(".part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(text)
            os.replace(draft, file)
        except OSError as error:
            self._can_write = False
            log.warning("%s: %s; the run goes on and writes no samples", file, error)

    def _row(self, answer: Evaluated) -> dict[str, object]:
        of = set_of(self._sets, answer.completion.prompt_index)
        item = answer.item
        outcome = answer.outcome
        row = sample_row(answer.completion, of, item.prompt, item.text, outcome)
        if self._success_above is not None:
            row["success"] = outcome.kind == "score" and outcome.achieved > self._success_above
            row["answers"] = [reply.text for reply in item.replies]
        return row
