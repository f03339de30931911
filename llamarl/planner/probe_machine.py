"""Times of a probe that no model has part in: scores, copies, and the device's own figures."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from llamarl.comm.wire import decode as decode_message
from llamarl.comm.wire import encode
from llamarl.ddma.copies import Copier, Method
from llamarl.machine.copying import copy_kernels
from llamarl.models.config import ModelConfig
from llamarl.planner.costs import Costs
from llamarl.planner.curves import Curve
from llamarl.planner.plans import ITEMSIZES, Numerics
from llamarl.planner.sheet import Assumption, Assumptions, Device, Measured, Sheet, read_sheet
from llamarl.planner.watch import Watch
from llamarl.scoring.assembly import GroupAssembler
from llamarl.scoring.pool import RewardPool
from llamarl.scoring.scorer import score_all, text_item
from llamarl.types import Completion

SHORT = (6, 3)  # tokens of a very short one: its prompt, its completion
GROUP = 8  # such completions of a prompt
_SCORES = (1, 8, 64, 512)  # completions that are scored together
_GEMM = 1024  # rows and columns of the product that a device's FLOP/s come from
_COPIES = (1 << 20, 1 << 23, 1 << 26)  # bytes


def time_scores(fn: str, watch: Watch) -> Curve:
    """Return the seconds of scores that are made together, by their number. ValueError for a
    function that cannot be used.
    """
    seconds = []
    with RewardPool(fn) as pool:
        pool.start()
        for number in _SCORES:
            items = [text_item("1+1=", "2", {"answer": "2"}) for _ in range(number)]
            seconds.append(watch.shortest(lambda: score_all(pool, items)))
    return Curve.fitted(_SCORES, seconds)


def time_hosting(fn: str, watch: Watch) -> float:
    """Return a completion's seconds on the rank that hosts the reward, by a watch that counts this
    process's computing alone: from the bytes that come to those that leave, besides its text.
    """
    _, length = SHORT
    number = _SCORES[-1]
    completions = []
    for i in range(number):
        completions.append(
            Completion(
                ticket=i // GROUP,
                sample_index=i % GROUP,
                prompt_ids=torch.zeros(SHORT[0], dtype=torch.long),
                token_ids=torch.zeros(length, dtype=torch.long),
                generator_logprobs=torch.zeros(length),
                policy_versions=torch.zeros(length, dtype=torch.long),
                finish_reason="stop",
            )
        )
    message = encode(completions)
    with RewardPool(fn) as pool:
        pool.start()

        def host() -> None:
            came = decode_message(message)
            items = [text_item("1+1=", "2", {"answer": "2"}) for _ in came]
            outcomes = score_all(pool, items)
            assembler = GroupAssembler(
                "probe", group_size=GROUP, eval_sets=(), num_eval_samples=0, max_error_rate=1.0
            )
            for completion, outcome in zip(came, outcomes):
                assembler.settle(completion, outcome)
            encode(list(assembler.whole))

        return watch.shortest(host) / number


def time_copies(watch: Watch) -> Curve:
    """Return the seconds of a copy with its digest, by bytes."""
    method: Method = "device"
    if watch.device.type == "cpu":
        method = "xxh3" if copy_kernels() is None else "lanes"
    copier = Copier(method)
    seconds = []
    for size in _COPIES:
        source = torch.zeros(size // 4, device=watch.device)
        target = torch.empty_like(source)
        seconds.append(watch.shortest(lambda: copier.copy(target, source)))
    return Curve.fitted(_COPIES, seconds)


def figures_of(dtype: str, watch: Watch) -> Device:
    """Return this device's figures; those between devices are the h100 sheet's on a GPU, and those
    of its memory on a CPU.
    """
    device = watch.device
    kind = getattr(torch, dtype)
    a = torch.randn(_GEMM, _GEMM, device=device, dtype=kind)
    out = torch.empty_like(a)
    product_s = watch.shortest(lambda: torch.mm(a, a, out=out))
    flops = {dtype: 2.0 * _GEMM**3 / product_s}
    source = torch.zeros(_COPIES[-1] // 4, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.nbytes / watch.shortest(lambda: target.copy_(source))
    if device.type == "cuda":
        others = read_sheet("h100").device
        memory = torch.cuda.get_device_properties(device).total_memory
        return replace(
            others,
            memory_gib=memory / (1 << 30),
            flops=flops,
            memory_bytes_per_s=moved,
            gpus_per_node=torch.cuda.device_count(),
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = os.cpu_count() or 1
    return Device(
        kind="cpu",
        memory_gib=memory / (1 << 30) / cores,
        flops=flops,
        memory_bytes_per_s=moved,
        link_bytes_per_s=moved / 2,
        network_bytes_per_s=moved / 2,
        host_bytes_per_s=moved / 2,
        gpus_per_node=cores,
    )


def assumptions_of(
    base: Assumptions, measured: Measured, config: ModelConfig, device: Device
) -> Assumptions:
    """Return assumptions for models of other sizes on this device: what the probe implies, and the
    base's for the rest.
    """
    dtype = measured.dtype
    sheet = Sheet(name="", device=device, assumptions=base)
    costs = Costs(sheet, config, Numerics(dtype=dtype, compute_dtype=dtype))
    curve = measured.microbatch.curve
    flops = 6.0 * costs.multiplied * curve.xs[-1]
    reached = flops / measured.microbatch.at(curve.xs[-1], 0) / device.flops_of(dtype)
    prefill = measured.prefill
    read = 2.0 * costs.multiplied * prefill.xs[-1] / prefill.ys[-1] / device.flops_of(dtype)
    reading_s = costs.multiplied * ITEMSIZES[dtype] / device.memory_bytes_per_s
    reading_s /= base.of("memory_efficiency")
    first_s = measured.decode.at(measured.decode.curve.xs[0], 0)
    layer_s = max(0.0, first_s - reading_s) / config.num_hidden_layers
    why = f"of a probe of {measured.model} in {dtype}"
    return replace(
        base,
        train_efficiency=Assumption(_share(reached), f"{why}, at the largest microbatch"),
        prefill_efficiency=Assumption(_share(read), f"{why}, at the longest prompt"),
        decode_efficiency=Assumption(_share(read), f"{why}, as a prompt's"),
        decode_layer_s=Assumption(layer_s, f"{why}: a step of one row, less reading its weights"),
    )


def _share(value: float) -> float:
    return min(1.0, max(0.01, value))
