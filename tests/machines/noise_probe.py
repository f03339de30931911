"""Makes each kind of product twice, and says how far the two lie apart.

As a program it prints one line of JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.inference.cache import SlotCache
from llamarl.inference.decode import NativeDecode
from llamarl.models import fused
from llamarl.models.build import build_decoder, read_config
from llamarl.models.config import tiny_directory

ROWS = 24
TERMS = 256
COLUMNS = 40
BATCH = 3


def factors() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, TERMS, generator=draw), torch.randn(TERMS, COLUMNS, generator=draw)


def products() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Ways to write the product of two matrices [N, K] [K, M]."""

    def out(a: Tensor, b: Tensor) -> Tensor:
        return torch.mm(a, b, out=a.new_empty(len(a), b.shape[1]))

    def in_place(a: Tensor, b: Tensor) -> Tensor:
        return a.new_zeros(len(a), b.shape[1]).addmm_(a, b)

    def batched(a: Tensor, b: Tensor) -> Tensor:
        many = (BATCH, -1, -1)
        return torch.bmm(a.expand(many), b.expand(many))[-1]

    def batched_sum(a: Tensor, b: Tensor) -> Tensor:
        many = (BATCH, -1, -1)
        zeros = a.new_zeros(BATCH, len(a), b.shape[1])
        return torch.baddbmm(zeros, a.expand(many), b.expand(many))[0]

    def by_vectors(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([a @ column for column in b.unbind(1)], dim=1)

    def by_dots(a: Tensor, b: Tensor) -> Tensor:
        numbers = []
        for row in a:
            numbers += [row @ column for column in b.unbind(1)]
        return torch.stack(numbers).view(len(a), -1)

    return {
        "mm": torch.mm,
        "mm out": out,
        "addmm in place": in_place,
        "bmm": batched,
        "baddbmm": batched_sum,
        "mv": by_vectors,
        "dot": by_dots,
        "linear": lambda a, b: F.linear(a, b.T),
        "linear with bias": lambda a, b: F.linear(a, b.T, a.new_zeros(b.shape[1])),
        "einsum": lambda a, b: torch.einsum("nk,km->nm", a, b),
    }


def gradient(a: Tensor, b: Tensor) -> Tensor:
    """a b as the gradient of x b^T with respect to x."""
    x = torch.zeros(len(a), b.shape[1], dtype=a.dtype, requires_grad=True)
    F.linear(x, b).backward(a)
    return x.grad


def measured(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> dict[str, float]:
    """The largest distance of two results of one computation, and of either from the true one, in
    units of eps times the sizes of the terms, added up.
    """
    sizes = a.double().abs() @ b.double().abs() * torch.finfo(a.dtype).eps
    one, other = product(a, b).double(), product(a, b).double()
    truth = a.double() @ b.double()
    errors = torch.stack([(x - truth).abs() / sizes for x in (one, other)])
    between = ((one - other).abs() / sizes).max()
    return {"between": float(between), "from_truth": float(errors.max())}


def distances(make: Callable[[], dict[str, Tensor]]) -> dict[str, float]:
    """How far apart what is made twice lies, in eps of the largest."""
    first, second = make(), make()
    apart = {}
    for name, one in first.items():
        eps = torch.finfo(one.dtype).eps * one.abs().max()
        apart[name] = float((one - second[name]).abs().max() / eps)
    return apart


def attention() -> dict[str, Tensor]:
    """Attention and its gradient, whichever kernel makes it."""
    draw = torch.Generator().manual_seed(4)
    q = torch.randn(1, 2, 20, 16, generator=draw, requires_grad=True)
    out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    (of_q,) = torch.autograd.grad(out.square().sum(), q)
    return {"attention": out.detach(), "attention's gradient": of_q}


def kernels() -> dict[str, Tensor]:
    """What llamarl's own kernels make of one input: a norm forward and backward, the logits of
    decoding, and the keys and values that it keeps.
    """
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, TERMS, generator=draw, requires_grad=True)
    decoder = build_decoder(read_config(tiny_directory()), device="cpu")
    for parameter in decoder.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw) * 0.1
    _, normed = fused.add_rms_norm(x, None, torch.ones(TERMS), 1e-6)
    (of_x,) = torch.autograd.grad(normed.pow(3).sum(), x)
    found = {"norm": normed.detach(), "norm's gradient": of_x}
    if NativeDecode.fits(decoder, torch.device("cpu"), torch.float32):
        native = NativeDecode(decoder, torch.float32)
        native.refresh()
        cache = SlotCache(decoder, max_slots=1, max_len=8, budget=64)
        cache.reserve(1, 5)
        prompt = torch.arange(5)
        with torch.no_grad():
            logits = native(prompt, prompt, cache, torch.zeros_like(prompt))
        found |= {"decoding": logits, "its keys and values": cache.layers[0]}
    return found


def noise() -> list[float]:
    """Of one product: other numbers in every process."""
    a, b = factors()
    return (a @ b).double().sub(a.double() @ b.double()).flatten()[:8].tolist()


def noise_of_fork() -> list[float]:
    """The same in a process that is forked from this one."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, json.dumps(noise()).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as said:
        answer = json.loads(said.read())
    os.waitpid(child, 0)
    return answer


def probe() -> dict[str, object]:
    forked = noise_of_fork()  # first, while there are no threads
    a, b = factors()
    apart = {name: measured(product, a, b) for name, product in products().items()}
    apart["gradient"] = measured(gradient, a, b)
    apart["bfloat16"] = measured(torch.mm, a.bfloat16(), b.bfloat16())
    return {
        "products": apart,
        "attention": distances(attention),
        "kernels": distances(kernels),
        "noise": [noise(), forked],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(probe()), flush=True)
