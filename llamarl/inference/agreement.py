"""Whether a decoder of transformers' modules is computed right: packed, alone and with a cache, it
must give what transformers' own attention gives.

transformers' models reach their attention in ways of their own, and a new one may do what contexts
do not know of: a state from token to token, a mask of its own, two attentions in a layer. So each
model is tried on its own weights when it is loaded, on three short sequences.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from llamarl.inference.cache import Decode, Prefill, SlotCache
from llamarl.models.attention import PackedAttention
from llamarl.models.decoder import Decoder
from llamarl.models.fsdp import reshard

LENGTHS = (13, 20, 7)  # of the sequences, in tokens
# Largest root mean square of the differences, in that of the logits around their mean.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
TOLERANCE_LOW = 0.1  # of narrower dtypes, whose roundings in random models come to half of it


@torch.no_grad()
def check_agreement(
    decoder: Decoder, path: str | Path, device: torch.device, dtype: torch.dtype
) -> None:
    """Raise ValueError naming the directory, the number and the layers if a decoder of
    transformers' modules gives other logits than transformers' own attention. dtype: that it
    computes in. Collective over the ranks that share the decoder.
    """
    if decoder.config.implementation != "transformers":
        return
    from llamarl.models.transformers_model import attention_of_transformers

    tolerance = TOLERANCES.get(dtype, TOLERANCE_LOW)
    layer = type(decoder.layers[0]).__name__
    with attention_of_transformers(decoder):
        wanted = torch.cat(_each_alone(decoder, device))
    tried = {
        "each sequence alone": torch.cat(_each_alone(decoder, device)),
        "packed sequences": _packed(decoder, device),
    }
    ways = [(way, logits, wanted) for way, logits in tried.items()]
    last = torch.tensor(LENGTHS, device=device).cumsum(0) - 1
    ways.append(("the last token behind a cache", _cached(decoder, device, dtype), wanted[last]))
    reshard(decoder)
    spread = float((wanted - wanted.mean(-1, keepdim=True)).square().mean().sqrt())
    for way, logits, right in ways:
        apart = float((logits - right).square().mean().sqrt()) / max(spread, 1e-30)
        if not apart <= tolerance:
            raise ValueError(
                f"{path}: {decoder.config.architecture} is not computed right: the logits of {way} "
                f"are {apart:.2g} of their spread away from those of transformers' own attention, "
                f"and {tolerance:g} is allowed. Its layers ({layer}) do more than contexts know of"
            )


def _sequences(decoder: Decoder, device: torch.device) -> list[Tensor]:
    """Return random tokens of each length, the same on every rank."""
    draw = torch.Generator().manual_seed(0)
    vocab = decoder.config.vocab_size
    return [torch.randint(vocab, (n,), generator=draw).to(device) for n in LENGTHS]


def _packing(lengths: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions [T] of sequences of these lengths, and where each begins, [N+1]."""
    positions = torch.cat([torch.arange(int(n)) for n in lengths])
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return positions.to(device), begins.to(device)


def _each_alone(decoder: Decoder, device: torch.device) -> list[Tensor]:
    """Return the logits [n, V] of each sequence."""
    made = []
    for ids in _sequences(decoder, device):
        positions, begins = _packing(torch.tensor([len(ids)]), device)
        made.append(decoder(ids, positions, PackedAttention(begins)).float())
    return made


def _packed(decoder: Decoder, device: torch.device) -> Tensor:
    """Return the logits [T, V] of the sequences in one pass."""
    positions, begins = _packing(torch.tensor(LENGTHS), device)
    ids = torch.cat(_sequences(decoder, device))
    return decoder(ids, positions, PackedAttention(begins)).float()


def _cached(decoder: Decoder, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the logits [N, V] of the last tokens, those before which are in a cache."""
    count = len(LENGTHS)
    before = torch.tensor(LENGTHS) - 1
    positions, begins = _packing(before, device)
    slots = torch.arange(count).repeat_interleave(before).to(device)
    sequences = _sequences(decoder, device)
    cache = SlotCache(decoder, count, max(LENGTHS), count * max(LENGTHS), dtype)
    cache.reserve(count, max(LENGTHS))
    ids = torch.cat([ids[:-1] for ids in sequences])
    decoder(ids, positions, Prefill(cache, begins, slots, positions))
    last = torch.stack([ids[-1] for ids in sequences])
    return decoder(last, before.to(device), Decode(cache, before.to(device), max(LENGTHS))).float()
