"""What is said of a model's answers to held-out prompts, to people and in a file: for
recipes/evaluate.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from llamarl.config.schema import Config
from llamarl.evaluation.metrics import Evaluations, pass_at_k, sample_row
from llamarl.evaluation.perplexity import Likelihood
from llamarl.evaluation.win_rate import Judged, WinRate, length_controlled_interval, win_rate
from llamarl.observe.console import left_out
from llamarl.observe.rates import EVALUATED, LEFT_OUT, Row
from llamarl.scoring.scorer import Item
from llamarl.tasks.held_out import EvalSet, set_of
from llamarl.types import EvalCompletion, Outcome, Prompt
from llamarl.words.choices import OWN

THE_TASK = "the task's own"


class Judgement(NamedTuple):
    """What gold and base say of a set, as far as they are asked, and what gold compares with."""

    judged: Judged | None
    likelihood: Likelihood | None
    against: list[Item] | None


def judgement_lines(config: Config, judgement: Judgement, against: str) -> list[str]:
    """Return the lines to print about a judgement."""
    judged = judgement.judged
    lines = []
    if judged is not None:
        found = judged.metrics()
        masked = found["eval/gold_masked"]
        not_scored = f", {masked} answers without a score left out" if masked else ""
        mean = shown_score(found["eval/gold"])
        lines.append(f"gold     {mean} by {config.eval.gold}{not_scored}")
    if judged is not None and judged.against_N is not None:
        lines[-1] += f"; {shown_score(found['eval/gold_references'])} of {against}"
        wins_N = judged.wins_N
        assert wins_N is not None, "gold has said of both who wins"
        ties = int((wins_N == 0.5).sum())
        rate = win_rate(wins_N)
        what = f"over {against}, {ties} ties" if rate else "nothing could be compared"
        lines.append(f"win rate {shown_rate(rate)} {what}")
        controlled = length_controlled_interval(wins_N, judged.longer_N, seed=config.seed)
        assert judged.against_tokens_N is not None, "what is compared with has lengths"
        ours, theirs = judged.num_tokens_N.mean(), judged.against_tokens_N.mean()
        lengths = f"mean length {ours:.1f} tokens, theirs {theirs:.1f}"
        how = "at equal lengths" if controlled else "no pair's lengths tell it from quality"
        lines.append(f"length   {shown_rate(controlled)} {how}; {lengths}")
    likelihood = judgement.likelihood
    if likelihood is not None:
        lines.append(f"base     perplexity {likelihood.perplexity:.4g} under {config.eval.base}")
    return lines


def shown_score(mean: float | None) -> str:
    """Return a mean score as text; "-" if nothing has a score."""
    return "-" if mean is None else f"{mean:.4g}"


def shown_rate(rate: WinRate | None) -> str:
    """Return a share with its 95 % interval as text; "-" without one."""
    if rate is None:
        return "-"
    return f"{rate.share:.1%} [{rate.low:.1%}, {rate.high:.1%}]"


def judged_columns(one: EvalSet, judgement: Judgement) -> dict[int, dict[str, object]]:
    """Return more columns for the file's lines about greedy completions, by prompt number."""
    columns: dict[int, dict[str, object]] = {}
    judged = judgement.judged
    for place in range(one.count):
        own: dict[str, object] = {}
        if judged is not None:
            own["gold"] = number_or_none(judged.gold_N[place])
        if judged is not None and judgement.against is not None:
            assert judged.against_N is not None, "gold has scored what is compared with"
            own["against"] = judgement.against[place].text
            own["gold_against"] = number_or_none(judged.against_N[place])
        if judgement.likelihood is not None:
            own["base_logprob"] = float(judgement.likelihood.logprobs_N[place])
        columns[one.first + place] = own
    return columns


def number_or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else float(value)


def report(
    config: Config,
    completions: list[EvalCompletion],
    outcomes: list[Outcome],
    of: EvalSet,
    k: int,
) -> list[str]:
    """Return the lines to print about a set's prompts, which have k samples each. completions and
    outcomes may hold other sets' too.
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
    ((_, found),) = book.finished()
    metrics: Row = {**found}
    length = found["eval/length_mean"]
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


def print_lines(of: EvalSet, sets: Sequence[EvalSet], lines: Sequence[str]) -> None:
    """Print lines about one of these sets, after its name where there is more than the task's."""
    if of.name or len(sets) > 1:
        print(f"held out {of.name or THE_TASK}")
    print("\n".join(lines))


def write(
    out: Path,
    sets: Sequence[EvalSet],
    prompts: Mapping[int, Prompt],
    completions: list[EvalCompletion],
    scored: list[tuple[str, Outcome]],
    judged: dict[int, dict[str, object]],
) -> None:
    """Write a line of JSON for each completion, with its text and its outcome, and of each greedy
    one by prompt what was judged.
    """
    with out.open("w") as file:
        for c, (text, outcome) in zip(completions, scored):
            of = set_of(sets, c.prompt_index)
            row = sample_row(c, of, prompts[c.prompt_index], text, outcome)
            if c.greedy:
                row |= judged.get(c.prompt_index, {})
            file.write(json.dumps(row) + "\n")
