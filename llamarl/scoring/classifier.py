"""Classifier: an encoder that sorts texts by label, as a scorer.

    submit --> a batch of texts --> transformers' model --> the logit or probability of a label

An encoder reads a text both ways, so no part of a text can be read once and shared between
completions: whole texts are read, padded, by transformers' AutoModelForSequenceClassification. It
takes only safetensors, and no code from the directory. llamarl itself computes decoders that score
(reward=model).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from llamarl.models.directory import architecture_in, read_json
from llamarl.models.hf import check_encoder_directory, check_finite
from llamarl.models.scorer import label_of
from llamarl.scoring.scorer import Item, Outcomes, Scorer, Site
from llamarl.tasks.special import special_tokens
from llamarl.types import Outcome
from llamarl.words.choices import ClassifierOutput

if TYPE_CHECKING:
    from llamarl.scoring.kinds.encoder import EncoderKindSettings

# Parts of names of model types whose positions begin after the pad token's, like RoBERTa's.
_BEHIND_PAD = ("roberta", "camembert", "mpnet", "longformer", "data2vec-text", "xmod")


class Classifier(Scorer):
    """A Scorer of texts. Texts that came together are scored in a batch. In a reproducible run each
    text is scored alone, so that its score does not depend on timing.
    """

    computes = True

    def __init__(self, settings: EncoderKindSettings, site: Site, *, reproducible: bool):
        self.name = f"encoder {Path(settings.path).name}"
        self._settings = settings
        self._device = site.group.device
        self._batch_size = 1 if reproducible else settings.batch_size
        self._on_result = site.on_result
        self._waiting: deque[tuple[int, str, str]] = deque()  # key, prompt, completion

    @property
    def pending(self) -> int:
        """The number of texts that wait."""
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Whether it has a batch to score."""
        return len(self._waiting) >= self._batch_size

    def start(self) -> None:
        """Load the model. ValueError or OSError if it cannot be; BadWeights for NaN in it."""
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        s = self._settings
        self._tokenizer = AutoTokenizer.from_pretrained(
            s.path, local_files_only=True, trust_remote_code=False
        )
        kind = AutoModelForSequenceClassification
        self._model = load_encoder(kind, s.path, s.dtype, self._device)
        self._label = label_of(labels_of(self._model.config), s.label)

    def submit(self, key: int, item: Item) -> None:
        """Queue one text."""
        self._waiting.append((key, item.prompt.text, item.text))
        self._on_result()

    def poll(self) -> Outcomes:
        """Score a batch."""
        count = min(self._batch_size, len(self._waiting))
        batch = [self._waiting.popleft() for _ in range(count)]
        outcomes: Outcomes = []
        asked = []
        for key, prompt, completion in batch:
            try:
                ids = self._encoded(prompt, completion)
            except ValueError as error:
                outcomes.append((key, Outcome.error(str(error))))
                continue
            size = len(ids["input_ids"])
            if size > self._settings.max_tokens:
                what = f"{size} tokens, and the encoder reads {self._settings.max_tokens}"
                outcomes.append((key, Outcome.error(what)))
                continue
            asked.append((key, ids))
        if asked:
            scores = self._scores([ids for _, ids in asked]).tolist()
            for (key, _), score in zip(asked, scores):
                outcomes.append((key, Outcome.score(score)))
        return outcomes

    def close(self) -> None:
        """Drop what is pending, and the model."""
        self._waiting.clear()
        self._model = None

    def _encoded(self, prompt: str, completion: str) -> dict[str, list[int]]:
        """ValueError for texts that cannot be told from special tokens."""
        texts = (prompt, completion) if self._settings.reads == "pair" else (completion,)
        ids = dict(self._tokenizer(*texts, truncation=False, split_special_tokens=True))
        harmless = self._tokenizer(*["0"] * len(texts))["input_ids"]
        special_tokens(self._tokenizer).check_like(ids["input_ids"], harmless, texts)
        return ids

    @torch.inference_mode()
    def _scores(self, texts: list[dict[str, list[int]]]) -> Tensor:
        """[N] float32."""
        padded = padded_right(texts, self._model.config.pad_token_id or 0)
        inputs = {name: column.to(self._device) for name, column in padded.items()}
        logits_NR = self._model(**inputs).logits.float()
        return of_label(logits_NR, self._label, self._settings.output).cpu()


def load_encoder(kind: Any, path: str, dtype: str, device: torch.device) -> Any:
    """Load a model of one of transformers' Auto classes from safetensors, frozen. ValueError or
    OSError if it cannot be; BadWeights for NaN in it.
    """
    model = kind.from_pretrained(
        path,
        use_safetensors=True,
        dtype=getattr(torch, dtype),
        local_files_only=True,
        trust_remote_code=False,
    )
    for name, parameter in model.named_parameters():
        check_finite(name, parameter, Path(path))
    return model.to(device).eval().requires_grad_(False)


def padded_right(texts: Sequence[dict[str, list[int]]], pad_id: int) -> dict[str, Tensor]:
    """[N, longest] int64 by name, with the mask of text, padded on the right whatever the
    tokenizer's side, because an encoder's positions begin at the first token.
    """
    marked = [{**text, "attention_mask": [1] * len(text["input_ids"])} for text in texts]
    columns = {}
    for name in marked[0]:
        rows = [torch.tensor(text[name], dtype=torch.int64) for text in marked]
        fill = pad_id if name == "input_ids" else 0
        columns[name] = pad_sequence(rows, batch_first=True, padding_value=fill)
    return columns


def of_label(logits_NR: Tensor, label: int, output: ClassifierOutput) -> Tensor:
    """[N]: the output for one of R labels."""
    if output == "logit":
        return logits_NR[:, label]
    if logits_NR.shape[1] == 1:
        logs_NR = torch.nn.functional.logsigmoid(logits_NR)
    else:
        logs_NR = logits_NR.log_softmax(-1)
    logs_N = logs_NR[:, label]
    return logs_N if output == "log_probability" else logs_N.exp()


def check_encoder(path: str | Path, label: str | None, max_tokens: int) -> None:
    """Check by an encoder's files, without loading weights, that it has a head of labels,
    safetensors, a tokenizer and the label, and that it reads texts of this length. ValueError or
    FileNotFoundError.
    """
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as KNOWN,
    )

    path = Path(path)
    raw = read_json(path / "config.json")
    architecture = architecture_in(raw)
    is_known = raw.get("model_type") in KNOWN
    if not (is_known and architecture.endswith("ForSequenceClassification")):
        raise ValueError(
            f"{architecture} is no classifier that transformers has; need a "
            "...ForSequenceClassification directory"
        )
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if getattr(config, "is_decoder", False) or hasattr(config, "num_key_value_heads"):
        raise ValueError(f"{architecture} reads from left to right; use reward=model")
    label_of(labels_of(config), label)
    most = most_tokens_of(config)
    if most is not None and max_tokens > most:
        raise ValueError(
            f"it reads {most} tokens, fewer than max_tokens={max_tokens}; lower max_tokens"
        )
    AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    check_encoder_directory(path)


def most_tokens_of(config) -> int | None:
    """Return how many tokens an encoder of this transformers config reads at most; None if the
    config does not say.
    """
    places = getattr(config, "max_position_embeddings", None)
    if places is None or not any(name in config.model_type for name in _BEHIND_PAD):
        return places
    return places - (config.pad_token_id or 0) - 1


def labels_of(config) -> tuple[str, ...]:
    """Return the labels of a transformers config, in order."""
    return tuple(config.id2label[number] for number in sorted(config.id2label))
