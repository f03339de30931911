"""A small decoder, whole and sharded by FSDP2."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from llamarl.models.build import build_decoder
from tests.build.model_config import model_config
from tests.tolerances import rounding

FLOAT32 = rounding(
    terms=15, depth=2 * 2 * 2
)  # of the largest: width, and the layers there and back


def decoder_of(tied: bool):
    # 23 rows of embeddings and 15 of the feed-forward's: no even split over two ranks
    config = model_config(hidden_size=12, intermediate_size=15, tie_word_embeddings=tied)
    decoder = build_decoder(config, device="cpu")
    random = torch.Generator().manual_seed(0)
    for parameter in decoder.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random) * 0.4
    return decoder


def sharded_decoder(kind: str):
    decoder = decoder_of(kind == "tied")
    for layer in decoder.layers:
        fully_shard(layer)
    # The root would keep its weights whole until backward; giving them back makes the head's saved
    # weight come again.
    fully_shard(decoder, reshard_after_forward=True)
    return decoder


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
