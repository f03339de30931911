"""Samples: what an evaluation's completions say and what they score, for people to read.

    held-out completions --keep--> of a version --score--> with its outcomes
                                   --write--> RUN_DIR/samples/step_N.jsonl

One JSON object a line, as recipes/evaluate.py writes them (llamarl.scoring.evaluation.sample_row);
`answers` are a victim's to the completion, and `success` is whether their mean score, novelty
apart, is above victim.threshold.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from llamarl.scoring.evaluation import number_of, sample_row
from llamarl.scoring.scorer import Item, Outcome
from llamarl.tasks.held_out import EvalSet, set_of
from llamarl.types import EvalCompletion

log = logging.getLogger(__name__)

_Place = tuple[int, int]  # prompt_index, which of its completions


class Samples:
    """Writes evaluations to files of `folder`, one a version; on the rank that has all of them.

    sets: what is asked. success_above: of an attack's score; None: there is no victim.
    """

    def __init__(self, folder: Path, sets: Sequence[EvalSet], success_above: float | None):
        self._folder = folder
        self._sets = sets
        self._success_above = success_above
        # By version: what was kept, and the rows of what of it is scored.
        self._kept: dict[int, dict[_Place, Item]] = {}
        self._rows: dict[int, dict[_Place, dict[str, object]]] = {}
        self._can_write = True

    def keep(self, completion: EvalCompletion, item: Item) -> None:
        """Take a completion of at least a token, as what scores sees it."""
        if self._can_write:
            version, place = _place_of(completion)
            self._kept.setdefault(version, {})[place] = item

    def score(self, completion: EvalCompletion, outcome: Outcome) -> None:
        """Note what became of a completion that was kept."""
        version, place = _place_of(completion)
        kept = self._kept.get(version, {}).get(place)
        if kept is None:
            return  # it is of an evaluation that was written, or none can be written any more
        of = set_of(self._sets, completion.prompt_index)
        row = sample_row(completion, of, kept.prompt, kept.text, outcome)
        if self._success_above is not None:
            row["success"] = outcome.kind == "score" and outcome.achieved > self._success_above
            row["answers"] = [reply.text for reply in kept.replies]
        self._rows.setdefault(version, {})[place] = row

    def write(self, version: int) -> None:
        """Write an evaluation that is whole. Where that fails the run goes on without, warned once:
        nothing is learned from it.
        """
        self._kept.pop(version, None)
        rows = self._rows.pop(version, None)
        if rows is None:
            return
        text = ""
        for place in sorted(rows):
            text += json.dumps(rows[place]) + "\n"
        file = self._folder / f"step_{version}.jsonl"
        draft = file.with_suffix(".part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(text)
            os.replace(draft, file)
        except OSError as error:
            self._can_write = False
            self._kept.clear()
            self._rows.clear()
            log.warning("%s: %s; the run goes on and writes no samples", file, error)


def _place_of(completion: EvalCompletion) -> tuple[int, _Place]:
    return int(completion.policy_versions[0]), (completion.prompt_index, number_of(completion))
