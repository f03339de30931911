"""Records as bytes and back: safetensors for tensors, JSON for the rest. No pickle.

A message is a list of records of one type. Each tensor field travels as one flat tensor for the
whole list, so the cost is a message's, not a record's.
"""

from __future__ import annotations

import dataclasses
import json

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from llamarl import types

_TYPES: dict[str, type] = {}


def register(record: type) -> type:
    """Class decorator: let a frozen dataclass of tensors and JSON values travel. ValueError if the
    name is taken.
    """
    if not dataclasses.is_dataclass(record):
        raise ValueError(f"{record.__name__} is no dataclass; records on the wire are")
    if _TYPES.setdefault(record.__name__, record) is not record:
        raise ValueError(f"a record named {record.__name__} is registered already")
    return record


for _record in (types.Completion, types.EvalCompletion, types.Group):
    register(_record)


def encode(records: list) -> bytes:
    """Bytes of a non-empty list of records of one registered type. TypeError for others."""
    kind = type(records[0])
    if _TYPES.get(kind.__name__) is not kind or any(type(r) is not kind for r in records):
        raise TypeError(
            f"cannot send {kind.__name__}: one registered record type a message (llamarl.comm.wire.register)"
        )
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, list] = {}
    values: dict[str, list] = {}
    for field in dataclasses.fields(kind):
        column = [getattr(r, field.name) for r in records]
        if isinstance(column[0], Tensor):
            tensors[field.name] = torch.cat([t.detach().reshape(-1) for t in column])
            shapes[field.name] = [list(t.shape) for t in column]
        else:
            values[field.name] = column
    header = {"type": kind.__name__, "count": len(records), "shapes": shapes, "values": values}
    return save(tensors, metadata={"records": json.dumps(header)})


def decode(message: bytes) -> list:
    """The records of a message. ValueError if it is not one."""
    size = int.from_bytes(message[:8], "little")
    try:
        header = json.loads(json.loads(message[8 : 8 + size])["__metadata__"]["records"])
        kind, count, shapes, values = (
            _TYPES[header["type"]],
            header["count"],
            header["shapes"],
            header["values"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a message of known records ({error!r})") from error
    columns: dict[str, list] = {
        name: [_frozen(v) for v in column] for name, column in values.items()
    }
    for name, flat in load(message).items():
        sizes = [torch.Size(s).numel() for s in shapes[name]]
        columns[name] = [part.view(s) for part, s in zip(flat.split(sizes), shapes[name])]
    names = [f.name for f in dataclasses.fields(kind)]
    return [kind(**{name: columns[name][i] for name in names}) for i in range(count)]


def _frozen(value):
    return tuple(value) if isinstance(value, list) else value


_CLOSED = -1


def send_message(
    payload: bytes | bytearray, rank: int, group: dist.ProcessGroup, tag: int = 0
) -> None:
    """Returns once the peer has begun to take the payload."""
    dist.send(torch.tensor([len(payload)]), rank, group=group, tag=tag)
    if payload:
        dist.send(
            torch.frombuffer(bytearray(payload), dtype=torch.uint8), rank, group=group, tag=tag
        )


def recv_message(rank: int, group: dist.ProcessGroup, tag: int = 0) -> bytes | None:
    """The next message from `rank`, or None when it has closed its side."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, rank, group=group, tag=tag)
    if int(size) == _CLOSED:
        return None
    payload = torch.empty(int(size), dtype=torch.uint8)
    if size:
        dist.recv(payload, rank, group=group, tag=tag)
    return payload.numpy().tobytes()


def send_closed(rank: int, group: dist.ProcessGroup, tag: int = 0) -> None:
    dist.send(torch.tensor([_CLOSED]), rank, group=group, tag=tag)
