"""Turns records into bytes and back: safetensors for tensors, JSON for the rest.

A message is a list of records of one type. Each tensor field travels as one flat tensor for the
whole list, so the cost is a message's, not a record's; a field of records travels as a message of
its own inside.
"""

from __future__ import annotations

import dataclasses
import json
import math

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from llamarl import types

_TYPES: dict[str, type] = {}


def register(record: type) -> type:
    """Let a frozen dataclass of tensors and JSON values travel (class decorator).

    ValueError if the name is taken.
    """
    if _TYPES.setdefault(record.__name__, record) is not record:
        raise ValueError(f"a record named {record.__name__} is registered already")
    return record


_RECORDS = (
    types.Ending,
    types.Completion,
    types.Stretch,
    types.EvalCompletion,
    types.Replied,
    types.EvalReplied,
    types.Group,
)
for _record in _RECORDS:
    register(_record)


def encode(records: list) -> bytes:
    """Encode a non-empty list of records of one registered type as bytes. TypeError for other
    types.
    """
    kind = type(records[0])
    kinds = {_TYPES.get(kind.__name__), *map(type, records)}
    if kinds != {kind}:
        raise TypeError(
            f"cannot send {kind.__name__}: one registered record type a message "
            "(llamarl.comm.wire.register)"
        )
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, list] = {}
    values: dict[str, list] = {}
    inner: list[str] = []  # the fields of records
    for field in dataclasses.fields(kind):
        column = [getattr(r, field.name) for r in records]
        if isinstance(column[0], Tensor):
            flat = [tensor.detach().reshape(-1) for tensor in column]
            tensors[field.name] = torch.cat(flat)
            shapes[field.name] = [list(t.shape) for t in column]
        elif dataclasses.is_dataclass(column[0]):
            inner.append(field.name)
            tensors[field.name] = torch.frombuffer(bytearray(encode(column)), dtype=torch.uint8)
        else:
            values[field.name] = column
    header = {"type": kind.__name__, "shapes": shapes, "values": values, "records": inner}
    return save(tensors, metadata={"records": json.dumps(header)})


def decode(message: bytes) -> list:
    """Decode the records of a message. ValueError if it is not one."""
    size = int.from_bytes(message[:8], "little")  # of safetensors' own header
    try:
        metadata = json.loads(message[8 : 8 + size])["__metadata__"]
        header = json.loads(metadata["records"])
        kind = _TYPES[header["type"]]
        shapes = header["shapes"]
        columns: dict[str, list] = dict(header["values"])
        inner = header["records"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not a message of known records ({error!r})") from error
    for name, column in columns.items():
        columns[name] = [tuple(v) if isinstance(v, list) else v for v in column]
    for name, flat in load(message).items():
        if name in inner:
            columns[name] = decode(flat.numpy().tobytes())
            continue
        sizes = [math.prod(shape) for shape in shapes[name]]
        columns[name] = list(map(torch.Tensor.view, flat.split(sizes), shapes[name]))
    records = []
    for row in zip(*columns.values()):
        values = dict(zip(columns, row))
        records.append(kind(**values))
    return records


def send_message(payload: bytes, rank: int, group: dist.ProcessGroup | None, tag: int = 0) -> None:
    """Send a payload, and return once the peer has begun to take it. An empty one means that no
    more comes.
    """
    dist.send(torch.tensor([len(payload)]), rank, group=group, tag=tag)
    if payload:
        raw = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.send(raw, rank, group=group, tag=tag)


def recv_message(rank: int, group: dist.ProcessGroup) -> bytes:
    """Receive the next message from `rank`; an empty one once that has closed its side."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, rank, group=group)
    payload = torch.empty(int(size), dtype=torch.uint8)
    if size:
        dist.recv(payload, rank, group=group)
    return payload.numpy().tobytes()
