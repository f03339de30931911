"""Embeddings of texts, and how far apart they are on average.

    embedder = load_embedder(settings, device)
    vectors_NE = embedder.embed(["a text", "another"])
    mean_pairwise_distance(vectors_NE)

An embedder is a user's encoder, or the language model that training starts from; its hidden states
are averaged over a text's tokens. A completion is read without its prompt, so that completions of
different prompts can be compared.

Shapes: N texts, E of an embedding, T packed tokens, L places of the longest text, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.errors import NoWeights
from llamarl.learning.collation import collate
from llamarl.machine.device import in_float64
from llamarl.memory import ITEMSIZES, encoder_numbers
from llamarl.models.attention import PackedAttention
from llamarl.models.config import read_config
from llamarl.models.directory import read_json
from llamarl.models.hf import check_encoder_directory, load_tokenizer
from llamarl.models.loading import frozen_decoder
from llamarl.models.sharding import num_parameters
from llamarl.scoring.classifier import load_encoder, most_tokens_of, padded_right

_UNBOUNDED = 1_000_000  # a tokenizer without a longest text gives a larger number than this
_CUSTOMARY = 512  # tokens, if neither tokenizer nor model says how many are read


@dataclass(frozen=True, slots=True)
class EmbedderSettings:
    """Settings of the model that embeds.

    path: its Hugging Face directory. is_policy: it is a language model that our own decoder reads;
    otherwise transformers' AutoModel reads it. dtype: a name in torch.
    microbatch_tokens: tokens a forward.
    """

    path: str
    is_policy: bool
    dtype: str
    microbatch_tokens: int

    @property
    def num_bytes(self) -> int:
        """The bytes of the model's weights."""
        if self.is_policy:
            numbers = num_parameters(read_config(self.path))
        else:
            numbers = encoder_numbers(self.path)
        return numbers * ITEMSIZES[self.dtype]


class Embedder(Protocol):
    """Turns texts into vectors. The model lies whole on one rank."""

    def embed(self, texts: Sequence[str]) -> Tensor:
        """[N, E] float32, on the CPU, in order. A vector depends on the other texts of the call
        only through rounding.
        """

    def tensors(self) -> list[Tensor]:
        """Return the model's weights."""


def load_embedder(settings: EmbedderSettings, device: torch.device) -> Embedder:
    """Load an embedder. ValueError or OSError names the directory if it cannot be read."""
    if settings.is_policy:
        return PolicyEmbedder(settings, device)
    return EncoderEmbedder(settings, device)


def mean_pairwise_distance(vectors_NE: Tensor) -> float:
    """Return the mean over all pairs of 1 - cos; NaN for fewer than two vectors.

        1 - (|sum_i u_i|^2 - sum_i |u_i|^2) / (N (N - 1)),  u_i = v_i / |v_i|

    This is the mean over i != j of 1 - u_i . u_j. A vector of zeros has cosine 0 with every vector.
    Source: TBA, arXiv 2503.18929, 5.2: "the average pairwise cosine distance".
    """
    count = len(vectors_NE)
    if count < 2:
        return float("nan")
    units_NE = unit(vectors_NE)
    squares = float(units_NE.square().sum())
    of_pairs = float(units_NE.sum(0).square().sum()) - squares
    return 1.0 - of_pairs / (count * (count - 1))


def unit(vectors_NE: Tensor) -> Tensor:
    """[N, E] float64 of length 1; zeros stay zeros."""
    return F.normalize(in_float64(vectors_NE), dim=1)


def _embedded(
    ids: list[list[int]], budget: int, width: int, means: Callable[[list[list[int]]], Tensor]
) -> Tensor:
    """Return the vectors [N, width] of texts, each [n] token ids, a microbatch at a time."""
    vectors_NE = torch.zeros(len(ids), width)
    for places in collate([len(own) for own in ids], budget):
        vectors_NE[places] = means([ids[place] for place in places])
    return vectors_NE


class PolicyEmbedder:
    """The mean over a text's tokens of a language model's last hidden states, behind its last norm.

    A text without tokens is read as the end token alone.
    """

    def __init__(self, settings: EmbedderSettings, device: torch.device):
        self._device = device
        self._budget = settings.microbatch_tokens
        self._tokenizer = load_tokenizer(settings.path)
        self._decoder = frozen_decoder(
            settings.path, mesh=None, device=device, dtype=getattr(torch, settings.dtype)
        )

    def embed(self, texts: Sequence[str]) -> Tensor:
        """[N, E] float32, see Embedder."""
        ids = [self._ids_of(text) for text in texts]
        return _embedded(ids, self._budget, self._decoder.config.hidden_size, self._means)

    def tensors(self) -> list[Tensor]:
        """Return the decoder's weights."""
        return list(self._decoder.parameters())

    def _ids_of(self, text: str) -> list[int]:
        asked = {"add_special_tokens": False, "split_special_tokens": True}
        ids = self._tokenizer(text, **asked)["input_ids"]
        context = self._decoder.config.max_position_embeddings
        return ids[:context] or [self._tokenizer.eos_token_id or 0]

    @torch.no_grad()
    def _means(self, ids: list[list[int]]) -> Tensor:
        sizes = [len(own) for own in ids]
        tokens_T = torch.cat([torch.tensor(own) for own in ids])
        positions_T = torch.cat([torch.arange(size) for size in sizes])
        cu_seqlens = F.pad(torch.tensor(sizes).cumsum(0), (1, 0))

        def head(hidden_TD: Tensor, _: Tensor) -> Tensor:
            parts = hidden_TD.float().split(sizes)
            return torch.stack([part.mean(0) for part in parts])

        means_ND = self._decoder(
            tokens_T.to(self._device),
            positions_T.to(self._device),
            PackedAttention(cu_seqlens.to(self._device)),
            head,
        )
        return means_ND.cpu()


class EncoderEmbedder:
    """The mean over a text's tokens of the last hidden states of transformers' AutoModel: what
    sentence encoders such as all-MiniLM-L6-v2 are trained to be read by.

    A longer text than the model reads is cut at its end. Weights are read from safetensors alone.
    """

    def __init__(self, settings: EmbedderSettings, device: torch.device):
        from transformers import AutoModel

        self._device = device
        self._budget = settings.microbatch_tokens
        self._tokenizer = load_tokenizer(settings.path)
        self._model = load_encoder(AutoModel, settings.path, settings.dtype, device)
        self._longest = self._tokenizer.model_max_length
        if self._longest > _UNBOUNDED:
            self._longest = most_tokens_of(self._model.config) or _CUSTOMARY

    def embed(self, texts: Sequence[str]) -> Tensor:
        """[N, E] float32, see Embedder."""
        ids = []
        for text in texts:
            asked = {"truncation": True, "max_length": self._longest, "split_special_tokens": True}
            own = self._tokenizer(text, **asked)["input_ids"]
            ids.append(own or [self._tokenizer.pad_token_id or 0])
        return _embedded(ids, self._budget, self._model.config.hidden_size, self._means)

    def tensors(self) -> list[Tensor]:
        """Return the encoder's weights."""
        return list(self._model.parameters())

    @torch.no_grad()
    def _means(self, ids: list[list[int]]) -> Tensor:
        texts = [{"input_ids": own} for own in ids]
        padded = padded_right(texts, self._tokenizer.pad_token_id or 0)
        found = self._model(**{name: column.to(self._device) for name, column in padded.items()})
        hidden_NLE = found.last_hidden_state.float().cpu()
        weights_NL1 = padded["attention_mask"][:, :, None].float()
        return (hidden_NLE * weights_NL1).sum(1) / weights_NL1.sum(1)


def check_sentence_encoder(path: str) -> None:
    """Check that transformers knows an encoder's directory, and that its weights are safetensors.
    ValueError or OSError naming it.
    """
    from transformers import AutoConfig

    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{path}: no config.json and no model.safetensors; need the directory of an encoder"
        )
    read_json(directory / "config.json")
    try:
        AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: transformers cannot read its config.json: {reason}") from error
    try:
        check_encoder_directory(directory)
    except NoWeights as error:
        raise NoWeights(
            f"{path}: no model.safetensors, the only file that an embedder's weights are read "
            "from; convert the weights to it"
        ) from error
