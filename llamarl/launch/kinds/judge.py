"""kind: judge. A model behind an OpenAI-compatible endpoint, asked once before a run starts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from llamarl.config.kinds.judge import JudgeKindSettings
from llamarl.launch.kinds.kind import Kind
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.endpoint import EndpointSettings
from llamarl.scoring.judge import Judge
from llamarl.scoring.routing import InTurn
from llamarl.scoring.scorer import Item, Scorer, Site, site_alone, try_scorer
from llamarl.types import Outcome


class JudgeKind(Kind[JudgeKindSettings]):
    """A judge."""

    def try_out(self, samples: Sequence[Item]) -> None:
        """Ask whether it is there. It scores no samples, because its replies may cost money."""
        self.score([])

    def score(self, samples: Sequence[Item]) -> list[Outcome]:
        """Return the outcomes of samples. ValueError if it cannot be asked."""
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
            template = hashlib.sha256(Path(s.template).read_bytes()).hexdigest()[:16]
        length = f"at most {s.max_tokens} tokens at {s.temperature}"
        numbers = f"{s.lowest:g} to {s.highest:g}, {length}"
        return f"judge {s.model}, asked for {s.ask}, template {template}, {numbers}"

    def make(self, site: Site, stream: StreamSettings | None = None) -> Scorer:
        """Return the scorer. ValueError or OSError for a template that cannot be read."""
        s = self.settings
        endpoint = EndpointSettings(
            url=s.url,
            model=s.model,
            api_key_env=s.api_key_env,
            max_parallel=s.max_parallel,
            timeout_s=s.timeout_s,
            max_retries=s.max_retries,
            max_tokens=s.max_tokens,
            temperature=s.temperature,
            section=self.given.section,
        )
        judge = Judge(
            endpoint,
            ask=s.ask,
            template=_read_template(s.template),
            lowest=s.lowest,
            highest=s.highest,
            on_result=site.on_result,
        )
        return InTurn(judge)


def _read_template(file: str | None) -> str | None:
    """Return the text of a judge's template; None without a file. ValueError if the file is no
    text.
    """
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the judge's template {file}: not UTF-8: {error.reason}") from error


KIND = JudgeKind
