"""kind: model. A decoder that scores, over the ranks of the reward."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from llamarl.memory import GIB, Price
from llamarl.models.config import ModelConfig, read_config
from llamarl.models.directory import model_digest
from llamarl.scoring.kinds.kind import Given, Kind, KindSettings, Places, RunFacts
from llamarl.words.fields import AnyText, Count, Number, Text, settings_dataclass
from llamarl.words.findings import Findings

if TYPE_CHECKING:
    from llamarl.models.given import ModelParts
    from llamarl.scoring.ahead import StreamSettings
    from llamarl.scoring.scorer import Scorer, Site
    from llamarl.scoring.sharded import Transcript

log = logging.getLogger("llamarl")


@settings_dataclass
class ModelKindSettings(KindSettings):
    kind: Literal["model"]
    path: Text
    """Directory of a ...ForSequenceClassification decoder, with its tokenizer. With other
    tokens than the policy's it reads the text anew.
    """
    label: AnyText | None
    """Label that scores; null: the only one."""
    dtype: Literal["float32", "bfloat16"]
    """Type of its weights. The head computes in float32."""
    microbatch_tokens: Count
    """Packed tokens of a forward pass of a rank."""
    scale: Number
    """The reward is (score - shift) * scale."""
    shift: Number
    """Such as the mean score of reference answers."""

    is_sharded: ClassVar[bool] = True
    acts_as_one: ClassVar[bool] = True
    has_labels: ClassVar[bool] = True

    @property
    def sharded_model(self) -> str:
        """The directory of the model."""
        return self.path

    @property
    def rescaling(self) -> tuple[float, float]:
        """(scale, shift): the reward is (raw score - shift) * scale."""
        return self.scale, self.shift

    def find(self, given: Given, run: RunFacts, found: Findings) -> None:
        """Add a scale of 0, and a directory without a model."""
        if self.scale == 0:
            found.add("every score would be the same; need any other number", given.key("scale"))
        found.add_unless_model(self.path, given.key("path"))


class ModelKind(Kind[ModelKindSettings]):
    """A model of a ...ForSequenceClassification directory."""

    def check(self) -> None:
        """Check its directory, label, weights, tokenizer and context. ValueError or OSError."""
        from llamarl.models.given import read_model
        from llamarl.models.scorer import label_of

        s = self.settings
        given = f"{self.given.key('path')}={s.path}"
        config = read_model(s.path)
        if not config.labels:
            raise ValueError(
                f"{given}: {config.architecture} is a language model, without a "
                "head that scores; need a ...ForSequenceClassification directory"
            )
        try:
            label_of(config.labels, s.label)
        except ValueError as error:
            label = f"{self.given.key('label')}={s.label or 'null'}"
            raise ValueError(f"{label}: {s.path} {error}") from error
        self.job.check_weights(s.path, config)
        self._check_length(config, given)
        if self.given.reads_ahead and self._transcript is not None:
            raise ValueError(
                f"reward.stream=true {given}: its vocabulary is not the policy's, so its tokens "
                "are known only when a completion has ended; reward.stream=false, or a scorer "
                "with the policy's tokenizer"
            )

    def _check_length(self, config: ModelConfig, given: str) -> None:
        """Check that it reads the longest sequence. If its tokens differ from the policy's, check
        that its chat template takes one.
        """
        transcript = self._transcript
        if transcript is None:
            self.scored.check_context(config, given)
            return
        if self.job.is_told:
            is_policy = self.scored.tokenizer is self.job.tokenizer
            log.warning(
                "%s has another vocabulary than the %s: it reads completions anew, as %s",
                given,
                "policy" if is_policy else "victim",
                "its chat template" if transcript.chat else "plain text",
            )
        with self.job.chat_template_of(Path(self.settings.path)):
            transcript.ids(self.job.task.train_prompt(0).asked, "", has_ended=True)

    @cached_property
    def _transcript(self) -> Transcript | None:
        """How it reads completions in other tokens than its own; None if tokens are the same."""
        from llamarl.models.given import read_tokenizer
        from llamarl.scoring.sharded import Transcript, same_tokens

        scored = self.scored
        theirs = read_tokenizer(Path(self.settings.path), chat=scored.chat)
        if same_tokens(scored.tokenizer, theirs):
            return None
        return Transcript(theirs, chat=scored.chat, system_prompt=scored.system_prompt)

    @property
    def identity(self) -> str:
        """The digest of its files, its label, and how its scores are rescaled."""
        s = self.settings
        label = s.label or ""
        digest = model_digest(s.path)
        return f"(model {digest} {label} - {s.shift:g}) * {s.scale:g}"

    @property
    def model(self) -> ModelParts:
        """The parts that tell it from other models."""
        from llamarl.models.given import parts_of

        return parts_of(self.settings.path)

    def describe(self) -> str:
        """Return its directory and its size."""
        from llamarl.models.sharding import num_parameters

        size = num_parameters(read_config(self.settings.path))
        return f"{self.settings.path}, a model of {size:,} parameters in {self.settings.dtype}"

    def notes(self, places: Places) -> list[str]:
        """Return the line about its cache, if it reads completions while these are sampled."""
        if not self.given.reads_ahead:
            return []
        model = read_config(self.settings.path)
        num_tokens, num_bytes = places.stream_cache(model, self.settings.dtype)
        size = f"{num_bytes / GIB:.2f} GiB"
        return [f"stream   {size} a reward rank, for a cache of {num_tokens:,} tokens"]

    def memory(self, places: Places) -> Iterator[Price]:
        """Yield the bytes of its weights and its cache, and of a forward."""
        s = self.settings
        ahead = self.given.reads_ahead
        yield places.asked_by_reward(self.price_name, s.path, s.dtype, ahead=ahead)

    def make(self, site: Site, stream: StreamSettings | None = None) -> Scorer:
        """Return the scorer. stream: how it reads completions while these are sampled."""
        from llamarl.scoring.model import ModelScorer

        return ModelScorer(self.given.name, self.settings, site, stream, self._transcript)


SETTINGS = ModelKindSettings
KIND = ModelKind
