"""kind: model. A decoder that scores, over the ranks of the reward."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from llamarl.config.kinds.model import ModelKindSettings
from llamarl.launch.kinds.kind import Kind
from llamarl.launch.model_directory import ModelParts, parts_of, read_model, read_tokenizer
from llamarl.launch.placement import Placement
from llamarl.memory import GIB, Price, cache_bytes
from llamarl.models.config import ModelConfig, read_config
from llamarl.models.directory import model_digest
from llamarl.models.scorer import label_of
from llamarl.models.sharding import num_parameters
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.model import ModelScorer
from llamarl.scoring.scorer import Scorer, Site
from llamarl.scoring.sharded import ScorerSettings, Transcript, same_tokens

log = logging.getLogger("llamarl")


class ModelKind(Kind[ModelKindSettings]):
    """A model of a ...ForSequenceClassification directory."""

    def check(self) -> None:
        """Check its directory, label, weights, tokenizer and context. ValueError or OSError."""
        s = self.settings
        given = f"{self.given.key('path')}={s.path}"
        config = read_model(s.path)
        if not config.labels:
            raise ValueError(
                f"{given}: {config.architecture} is a language model, without a "
                "head that scores; need a ...ForSequenceClassification directory"
            )
        try:
            label_of(config, s.label)
        except ValueError as error:
            label = f"{self.given.key('label')}={s.label or 'null'}"
            raise ValueError(f"{label}: {s.path} {error}") from error
        self.inputs.check_weights(s.path, config)
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
        if self.inputs.is_told:
            is_policy = self.scored.tokenizer is self.inputs.tokenizer
            log.warning(
                "%s has another vocabulary than the %s: it reads completions anew, as %s",
                given,
                "policy" if is_policy else "victim",
                "its chat template" if transcript.chat else "plain text",
            )
        with self.inputs.chat_template_of(Path(self.settings.path)):
            transcript.ids(self.inputs.task.train_prompt(0).asked, "", has_ended=True)

    @cached_property
    def _transcript(self) -> Transcript | None:
        """How it reads completions in other tokens than its own; None if tokens are the same."""
        scored = self.scored
        theirs = read_tokenizer(Path(self.settings.path), chat=scored.chat)
        if same_tokens(scored.tokenizer, theirs):
            return None
        return Transcript(theirs, chat=scored.chat, system_prompt=scored.system_prompt)

    @property
    def identity(self) -> str:
        """The digest of its files, its label, and how its scores are rescaled."""
        s = self.settings
        return f"(model {model_digest(s.path)} {s.label or ''} - {s.shift:g}) * {s.scale:g}"

    @property
    def model(self) -> ModelParts:
        """The parts that tell it from other models."""
        return parts_of(self.settings.path)

    def describe(self) -> str:
        """Return its directory and its size."""
        size = num_parameters(read_config(self.settings.path))
        return f"{self.settings.path}, a model of {size:,} parameters in {self.settings.dtype}"

    def notes(self, placement: Placement) -> list[str]:
        """Return the line about its cache, if it reads completions while these are sampled."""
        tokens = self._cache_tokens(placement)
        if not tokens:
            return []
        split = self.inputs.config.reward.tensor_parallel
        size = cache_bytes(read_config(self.settings.path), tokens, self.settings.dtype, split)
        return [f"stream   {size / GIB:.2f} GiB a reward rank, for a cache of {tokens:,} tokens"]

    def _cache_tokens(self, placement: Placement) -> int:
        """Return the tokens that its cache holds; 0 if it reads no completion ahead."""
        return placement.stream_cache_tokens("reward") if self.given.reads_ahead else 0

    def memory(self, placement: Placement) -> Iterator[Price]:
        """Yield the bytes of its weights and its cache, and of a forward."""
        s = self.settings
        tokens = self._cache_tokens(placement)
        yield placement.asked_by_reward(self.price_name, s.path, s.dtype, tokens)

    def make(self, site: Site, stream: StreamSettings | None = None) -> Scorer:
        """Return the scorer. stream: how it reads completions while these are sampled."""
        s = self.settings
        settings = ScorerSettings(
            path=s.path,
            dtype=s.dtype,
            label=label_of(read_config(s.path), s.label),
            microbatch_tokens=s.microbatch_tokens,
            scale=s.scale,
            shift=s.shift,
            transcript=self._transcript,
        )
        return ModelScorer(self.given.name, settings, site, stream)


KIND = ModelKind
