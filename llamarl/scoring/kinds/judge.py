"""kind: judge. A model behind an OpenAI-compatible endpoint, asked once before a run starts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from llamarl.scoring.kinds.kind import Given, Kind, KindSettings, RunFacts
from llamarl.words.choices import JudgeAsk
from llamarl.words.fields import (
    AnyText,
    Count,
    Natural,
    NonNegative,
    Number,
    Positive,
    Text,
    settings_dataclass,
)
from llamarl.words.findings import Findings, Problem
from llamarl.words.texts import url_problem

if TYPE_CHECKING:
    from llamarl.scoring.ahead import StreamSettings
    from llamarl.scoring.scorer import Item, Scorer, Site
    from llamarl.types import Outcome


@settings_dataclass
class JudgeKindSettings(KindSettings):
    kind: Literal["judge"]
    url: Text
    """Requests go to URL/chat/completions and nowhere else."""
    model: Text
    """The model's name there."""
    api_key_env: AnyText | None
    """NAME of the environment variable that holds the key; null: no key is sent."""
    ask: JudgeAsk
    """score: a number for each completion; group: pairs of a prompt's completions, in both
    orders; reference: each completion against the prompt's own answer, in both orders.
    """
    template: AnyText | None
    """A text file with {prompt} and {completion}, or {a} and {b} for pairs; null: that of
    llamarl/scoring/judge.py.
    """
    lowest: Number
    """Worst score of ask=score. The reward is 0 there."""
    highest: Number
    """Best score of ask=score. The reward is 1 there."""
    max_parallel: Count
    """Requests at a time."""
    timeout_s: Positive
    """Seconds of a question's requests together, without the pauses between them."""
    max_retries: Natural
    """Retries after no connection, or HTTP 408, 425, 429, 500, 502 to 504."""
    max_tokens: Count | None
    """Tokens of a reply, with what the model thinks; null: the server's own limit."""
    temperature: NonNegative | None
    """Temperature of a reply; null: the server's own."""

    @property
    def compares(self) -> bool:
        """Whether it compares the completions of a prompt with each other."""
        return self.ask == "group"

    def find(self, given: Given, run: RunFacts, found: Findings) -> None:
        """Add comparisons that it cannot make, bounds without a score between them, and what is
        wrong with url and api_key_env.
        """
        ask = given.key("ask")
        if self.lowest >= self.highest:
            what = "no score lies between these; lowest, the worst score, must be below highest"
            found.add(what, given.key("lowest"), given.key("highest"))
        if self.compares and run.group_size < 2:
            found.add(
                "the judge compares a prompt's completions with each other; group_size=2 or more",
                ask,
                "group_size",
            )
        if self.compares and run.asks_greedily_alone:
            what = (
                "an evaluation has one greedy completion of each prompt, and the judge needs "
                "another one to compare it with"
            )
            remedy = f"eval.num_samples=1, eval.every=0, or {ask}=reference"
            found.add(f"{what}; {remedy}", ask, "eval.num_samples")
        if self.ask == "reference":
            for answer_key in run.unanswered:
                found.add(
                    "the judge compares with the row's answer, and the rows have none; "
                    f"{answer_key}=answer",
                    ask,
                    answer_key,
                )
        found.add_unless_file(self.template, given.key("template"))
        self._find_secrets(given, found)

    def _find_secrets(self, given: Given, found: Findings) -> None:
        """Add a url or a name of a variable that cannot be used. Neither is shown: it may be
        secret.
        """
        what = url_problem(self.url)
        if what is not None:
            key = given.key("url")
            found.problems.append(Problem(key, what, (key,)))
        if self.api_key_env is not None and not self.api_key_env.isidentifier():
            key = given.key("api_key_env")
            what = (
                "need the name of an environment variable; export the API key in one, and give "
                "its name here"
            )
            found.problems.append(Problem(key, what, (key,)))


class JudgeKind(Kind[JudgeKindSettings]):
    """A judge."""

    def try_out(self, samples: Sequence[Item]) -> None:
        """Ask whether it is there. It scores no samples, because its replies may cost money."""
        self.score([])

    def score(self, samples: Sequence[Item]) -> list[Outcome]:
        """Return the outcomes of samples. ValueError if it cannot be asked."""
        import torch

        from llamarl.scoring.scorer import site_alone, try_scorer

        return try_scorer(
            self.make(site_alone(torch.device("cpu"))),
            samples,
            given=f"{self.given.key('url')}={self.settings.url}",
            remedy=f"correct the judge's settings, or {self.given.remedy}",
        )

    @property
    def identity(self) -> str:
        """The name of its model, and what it is asked."""
        s = self.settings
        template = "none"
        if s.template is not None:
            content = Path(s.template).read_bytes()
            template = hashlib.sha256(content).hexdigest()[:16]
        length = f"at most {s.max_tokens} tokens at {s.temperature}"
        numbers = f"{s.lowest:g} to {s.highest:g}, {length}"
        return f"judge {s.model}, asked for {s.ask}, template {template}, {numbers}"

    def make(self, site: Site, stream: StreamSettings | None = None) -> Scorer:
        """Return the scorer. ValueError or OSError for a template that cannot be read."""
        from llamarl.scoring.judge import Judge
        from llamarl.scoring.routing import InTurn

        return InTurn(Judge(self.settings, self.given.section, site.on_result))


SETTINGS = JudgeKindSettings
KIND = JudgeKind
