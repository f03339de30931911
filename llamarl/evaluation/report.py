"""Shows answers to held-out prompts and what is found about them: a line of JSON for each answer,
in the files of a run (RUN_DIR/samples/step_N.jsonl) and of recipes/evaluate.py, and the lines that
recipes/evaluate.py prints.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from llamarl.config.schema import Config
from llamarl.evaluation.ask import Answers, ScoredAnswer
from llamarl.evaluation.gold import Judged
from llamarl.evaluation.judges import EvalJudge, Finding, JudgeWork
from llamarl.evaluation.metrics import measure, pass_at_k, sampled_scores
from llamarl.evaluation.perplexity import Likelihood
from llamarl.evaluation.win_rate import WinRate, length_controlled_interval, win_rate
from llamarl.observe.console import left_out
from llamarl.observe.rates import EVALUATED, LEFT_OUT, Row
from llamarl.tasks.parts import EvalSet

THE_TASK = "the task's own"

log = logging.getLogger(__name__)


def sample_row(one: EvalSet, answer: ScoredAnswer) -> dict[str, object]:
    """Return an answer of a set as an object of JSON, for people and for `recipes/evaluate.py
    --against`.

    score: null without one; then outcome is not "score", and reason says why. number: the held-out
    prompt's, in its set. sample: 0 is the greedy answer. set: left out for the task's own.
    """
    number, sample = answer.place
    row: dict[str, object] = {
        "prompt": answer.item.prompt.text,
        "completion": answer.item.text,
        "score": answer.score,
        "outcome": answer.outcome.kind,
        "number": number - one.first,
        "sample": sample,
        "num_tokens": answer.completion.token_ids.numel(),
        "finish_reason": answer.completion.finish_reason,
    }
    if one.name:
        row["set"] = one.name
    if answer.outcome.reason:
        row["reason"] = answer.outcome.reason
    return row


class Samples(EvalJudge[Finding]):
    """Writes evaluations to files in `folder`, one for each version. It finds nothing.

    success_above: an attack on a victim succeeds with a score above it; the rows then also have
    `success`, and the victim's `answers`. None: there is no victim.
    """

    def __init__(self, folder: Path, success_above: float | None):
        self._folder = folder
        self._success_above = success_above
        self._can_write = True

    def judge(self, version: int, answers: Answers) -> JudgeWork[Finding]:
        """Write the file. If that fails, warn once and let the run go on, because nothing is
        learned from it.
        """
        yield
        if self._can_write:
            self._write(version, answers)
        return {}

    def _write(self, version: int, answers: Answers) -> None:
        text = ""
        for one, own in answers.items():
            for answer in own:
                row = sample_row(one, answer)
                if self._success_above is not None:
                    row["success"] = answer.succeeds(self._success_above)
                    row["answers"] = [reply.text for reply in answer.item.replies]
                text += json.dumps(row) + "\n"
        file = self._folder / f"step_{version}.jsonl"
        draft = file.with_suffix(".part")  # replaces the file at once: a reader sees whole lines
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(text)
            os.replace(draft, file)
        except OSError as error:
            self._can_write = False
            log.warning("%s: %s; the run goes on and writes no samples", file, error)


def write(
    out: Path,
    answers: Answers,
    judged: Mapping[EvalSet, Judged],
    likelihoods: Mapping[EvalSet, Likelihood],
) -> None:
    """Write a line of JSON for each answer; that of a greedy one also has what was judged."""
    with out.open("w") as file:
        for one, own in answers.items():
            for answer in own:
                row = sample_row(one, answer)
                if answer.completion.greedy:
                    place = answer.completion.prompt_index - one.first
                    row |= _judged_columns(place, judged.get(one), likelihoods.get(one))
                file.write(json.dumps(row) + "\n")


def _judged_columns(
    place: int, judged: Judged | None, likelihood: Likelihood | None
) -> dict[str, object]:
    columns: dict[str, object] = {}
    if judged is not None:
        columns["gold"] = _number_or_none(judged.gold_N[place])
        if judged.references is not None and judged.against_N is not None:
            columns["against"] = judged.references[place].text
            columns["gold_against"] = _number_or_none(judged.against_N[place])
    if likelihood is not None:
        columns["base_logprob"] = float(likelihood.logprobs_N[place])
    return columns


def _number_or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else float(value)


def score_lines(answers: Sequence[ScoredAnswer], temperature: float) -> list[str]:
    """Return the lines to print about the scores of a set's answers, which were sampled at this
    temperature.
    """
    is_accuracy = not any(answer.is_graded for answer in answers)
    metrics: Row = {**measure(answers, is_accuracy=is_accuracy)}
    greedy = [answer for answer in answers if answer.completion.greedy]
    reward = metrics.get(EVALUATED)
    passes = "eval/accuracy" in metrics
    if reward is None:
        shown = f"-- ({left_out(metrics)})"
    else:
        shown = f"pass@1 {reward:.2%}" if passes else f"reward {reward:.4g}"
    mean = metrics["eval/length_mean"]
    lines = [f"greedy   {shown} of {len(greedy)} held-out prompts, {mean:.1f} tokens mean length"]
    if reward is not None and LEFT_OUT in metrics:
        lines.append(f"         {left_out(metrics)}")
    of_prompts = sampled_scores(answers)
    if of_prompts:
        sampled = [answer.completion for answer in answers if not answer.completion.greedy]
        lengths = [completion.token_ids.numel() for completion in sampled]
        k = len(lengths) // len(greedy)  # samples a prompt
        passed = []
        for n in sorted({k, *(1 << i for i in range(k.bit_length()))}):
            # A prompt has fewer than k scores if some of its samples were errors.
            best = sum(pass_at_k(scores, min(n, len(scores))) for scores in of_prompts)
            best /= len(of_prompts)
            passed.append(f"pass@{n} {best:.2%}" if passes else f"best of {n} {best:.4g}")
        mean = sum(lengths) / len(lengths)
        how = f"{k} a prompt at temperature {temperature:g}"
        lines.append(f"sampled  {'  '.join(passed)}   {how}, {mean:.1f} tokens mean length")
    if metrics["eval/errors"]:
        lines.append(
            f"errors   {metrics['eval/errors']} completions could not be scored and are left out"
        )
    return lines


def judgement_lines(
    config: Config, judged: Judged | None, likelihood: Likelihood | None, against: str
) -> list[str]:
    """Return the lines to print about what gold and base find, as far as they were asked. against:
    the name of what gold compares with.
    """
    lines = []
    if judged is not None:
        found = judged.metrics()
        masked = found["eval/gold_masked"]
        not_scored = f", {masked} answers without a score left out" if masked else ""
        line = f"gold     {_shown_score(found['eval/gold'])} by {config.eval.gold}{not_scored}"
        if judged.references is None:
            lines.append(line)
        else:
            lines.append(f"{line}; {_shown_score(found['eval/gold_references'])} of {against}")
            lines += _win_rate_lines(judged, against, config.seed)
    if likelihood is not None:
        lines.append(f"base     perplexity {likelihood.perplexity:.4g} under {config.eval.base}")
    return lines


def _win_rate_lines(judged: Judged, against: str, seed: int) -> list[str]:
    rate = win_rate(judged.wins_N)
    num_ties = int((judged.wins_N == 0.5).sum())
    compared = f"over {against}, {num_ties} ties" if rate else "nothing could be compared"
    controlled = length_controlled_interval(judged.wins_N, judged.longer_N, seed=seed)
    how = "at equal lengths" if controlled else "no pair's lengths tell it from quality"
    ours, theirs = judged.num_tokens_N.mean(), judged.against_tokens_N.mean()
    lengths = f"mean length {ours:.1f} tokens, theirs {theirs:.1f}"
    return [
        f"win rate {shown_rate(rate)} {compared}",
        f"length   {shown_rate(controlled)} {how}; {lengths}",
    ]


def _shown_score(mean: float | None) -> str:
    """Return a mean score as text; "-" if nothing has a score."""
    return "-" if mean is None else f"{mean:.4g}"


def shown_rate(rate: WinRate | None) -> str:
    """Return a share with its 95 % interval as text; "-" without one."""
    if rate is None:
        return "-"
    return f"{rate.share:.1%} [{rate.low:.1%}, {rate.high:.1%}]"


def print_lines(one: EvalSet, sets: Sequence[EvalSet], lines: Sequence[str]) -> None:
    """Print lines about one of these sets, after its name where there is more than the task's."""
    if one.name or len(sets) > 1:
        print(f"held out {one.name or THE_TASK}")
    print("\n".join(lines))
