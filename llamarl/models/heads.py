"""Scalar heads on a decoder's last hidden states.

A head is a module of its own beside the decoder: the decoder's parameters, which travel to
generators and are exported, stay what they are. It is called inside the decoder's forward, through
the head that is handed in there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llamarl.models.protocol import Head


class ValueHead(nn.Module):
    """v = h . w + b: [R, D] -> [R] float32. It starts at 0, on every rank alike: all values are 0
    then.

    w is [D], not [1, D], so that FSDP's shards of it are even.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_RD: Tensor) -> Tensor:
        return hidden_RD.float() @ self.weight + self.bias


def value_head(dim: int, *, mesh: DeviceMesh | None, device: torch.device) -> ValueHead:
    """Return a value head, float32, sharded over `mesh` like the decoder's parameters. Collective
    over it from the first use on.
    """
    head = ValueHead(dim).to(device)
    if mesh is not None and mesh.size() > 1:
        from torch.distributed.fsdp import fully_shard

        fully_shard(head, mesh=mesh, reshard_after_forward=False)
    return head


def with_values(head: Head, values: ValueHead, rows: Tensor) -> Head:
    """Return a head for Decoder.forward that gives what `head` gives (logprobs, entropy), and the
    value of the hidden state of each row.
    """
    of_rows = only_values(values, rows)

    def both(hidden_TD: Tensor, weight_VD: Tensor) -> tuple[object, ...]:
        made = head(hidden_TD, weight_VD)
        assert isinstance(made, tuple), "a head of labels gives logprobs and entropy"
        return (*made, of_rows(hidden_TD, weight_VD))

    return both


def only_values(values: ValueHead, rows: Tensor) -> Head:
    """Return a head for Decoder.forward that gives values alone: no logits are made."""
    return lambda hidden_TD, _: values(hidden_TD.index_select(0, rows))
