"""Times the true parts of a run on this machine, in about a minute, and makes a data sheet of it.

    sheet = probe(path="DIR", dtype="bfloat16", reward_fn="", budget_s=60.0)

trainer     PolicyUpdate on one and on two microbatches of each size: their difference is a
            microbatch, and what is left of the first is an update's fixed part
generator   Engine: its first step reads prompts, the next ones decode
scorer      RewardPool, on the function that is given
weights     the copy that a sender makes, with its digest

A config.json is enough: weights are drawn. Each time is the shortest of some, because whatever else
runs on the machine makes it longer. Sizes double until their share of the budget is spent.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from llamarl.ddma.copies import Copier, Method
from llamarl.inference.engine import Engine
from llamarl.inference.sampler import SamplingParams
from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.optim import build_optimizer
from llamarl.learning.update import PolicyUpdate, UpdateSettings
from llamarl.models.build import Decoder, build_decoder, random_weights
from llamarl.models.config import ModelConfig, read_config, tiny_directory
from llamarl.models.masters import Masters
from llamarl.models.sharding import num_parameters
from llamarl.native.allocator import keep_freed_memory
from llamarl.native.copying import copy_kernels
from llamarl.native.precision import use_float32_products
from llamarl.planner.costs import Costs
from llamarl.planner.curves import Cost, Curve
from llamarl.planner.plans import ITEMSIZES, Numerics
from llamarl.planner.sheet import Assumption, Assumptions, Device, Measured, Sheet, read_sheet
from llamarl.scoring.pool import RewardPool
from llamarl.scoring.scorer import score_all, text_item
from llamarl.types import Group

REWARD = "llamarl.tasks.rewards:exact_match"
CHUNK = 16  # tokens of a row between two looks at the clock
REPEATS = 5
_LONG_S = 1.5  # after which a time is not taken again
LENGTHS = (64, 512)  # tokens of a sequence
MOST_ROWS = 512
MOST_TOKENS = 1 << 15
_SHARES = {"update": 0.45, "decode": 0.35, "prefill": 0.1}  # of the budget
_LEAST_S = 1e-7
_GEMM = 1024  # rows and columns of the product that a device's FLOP/s come from
_COPIES = (1 << 20, 1 << 23, 1 << 26)  # bytes

Clock = Callable[[], float]


class Watch:
    """Takes times on a device, within a budget."""

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter):
        self.device = device
        self.clock = clock

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of one call, the device's work included."""
        began = self.clock()
        work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return max(_LEAST_S, self.clock() - began)

    def shortest(self, work: Callable[[], object], repeats: int = REPEATS) -> float:
        """Return the least seconds of several calls, after one that warms up; of fewer where they
        are long.
        """
        is_spent = self.until(_LONG_S)
        self.seconds(work)
        found = [self.seconds(work)]
        while len(found) < repeats and not is_spent():
            found.append(self.seconds(work))
        return min(found)

    def until(self, budget_s: float) -> Callable[[], bool]:
        """Return a function that says whether a budget that begins now is spent."""
        end = self.clock() + budget_s
        return lambda: self.clock() >= end


def probe(*, path: str, dtype: str, reward_fn: str, budget_s: float) -> Sheet:
    """Return a sheet of this machine. path: a model's directory or config.json, "": the embedded
    model. dtype: "": bfloat16 on a GPU, float32 elsewhere. reward_fn: "": exact_match.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("bfloat16" if device.type == "cuda" else "float32")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"model.dtype={dtype}: a trainer computes in float32 or bfloat16")
    if device.type == "cpu":
        keep_freed_memory()  # as every job does when it starts
    use_float32_products(reproducible=True)
    config = read_config(path or tiny_directory())
    watch = Watch(device)
    microbatch, update_s = time_updates(config, dtype, watch, _SHARES["update"] * budget_s)
    decode = time_decoding(config, dtype, watch, _SHARES["decode"] * budget_s)
    prefill = time_prefill(config, dtype, watch, _SHARES["prefill"] * budget_s)
    measured = Measured(
        model=Path(path or tiny_directory()).name,
        parameters=num_parameters(config),
        dtype=dtype,
        microbatch=microbatch,
        update_s=update_s,
        decode=decode,
        prefill=prefill,
        copy=time_copies(watch),
        score=time_scores(reward_fn or REWARD, watch),
    )
    figures = figures_of(dtype, watch)
    base = read_sheet("h100")
    return Sheet(
        name=f"this {device.type}, {torch.get_num_threads()} threads"
        if device.type == "cpu"
        else torch.cuda.get_device_name(device),
        device=figures,
        assumptions=assumptions_of(base.assumptions, measured, config, figures),
        measured=measured,
        notes=("link, network and host bandwidths were not measured",),
    )


# --- The trainer ---


def group_of(ticket: int, prompt: int, lengths: list[int], vocabulary: int) -> Group:
    """Return a group of random tokens whose rewards differ. prompt: its tokens."""
    draw = torch.Generator().manual_seed(ticket)
    total = sum(lengths)
    token_ids = torch.randint(0, vocabulary, (prompt + total,), generator=draw)
    return Group(
        ticket=ticket,
        prompt_ids=token_ids[:prompt],
        lengths=torch.tensor(lengths),
        token_ids=token_ids[prompt:],
        generator_logprobs=torch.full((total,), -math.log(vocabulary)),
        policy_versions=torch.zeros(total, dtype=torch.long),
        ref_logprobs=torch.empty(0),
        rewards=(torch.arange(len(lengths)) % 2).float(),
        finish_reasons=("stop",) * len(lengths),
        outcomes=("score",) * len(lengths),
    )


def decoder_of(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Return a decoder of drawn weights on a device."""
    with torch.no_grad():
        decoder = random_weights(build_decoder(config, dtype=dtype), seed=0)
    return decoder.to(device)


def trained_decoder(config: ModelConfig, dtype: str, device: torch.device) -> Decoder:
    """Return a decoder of drawn float32 masters that computes in a dtype."""
    decoder = build_decoder(config, dtype=torch.float32)
    if dtype != "float32":
        decoder.masters = Masters(decoder, decoder.layers, getattr(torch, dtype))
    with torch.no_grad():
        random_weights(decoder, seed=0)
    return decoder.to(device).train()


def time_updates(
    config: ModelConfig, dtype: str, watch: Watch, budget_s: float
) -> tuple[Cost, float]:
    """Return a microbatch's seconds by tokens and pairs, and an update's other seconds."""
    decoder = trained_decoder(config, dtype, watch.device)
    optimizer = build_optimizer(
        decoder.parameters(), lr=1e-6, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )
    is_spent = watch.until(budget_s)
    tokens = []
    pairs = []
    seconds = []
    others = []
    size = 128
    longest = config.max_position_embeddings
    while size <= MOST_TOKENS:
        for length in LENGTHS:
            if length > min(size, longest):
                continue
            prompt = length // 4
            number = max(1, round((size - prompt) / (length - prompt)))
            groups = [
                group_of(i, prompt, [length - prompt] * number, config.vocab_size) for i in (0, 1)
            ]
            packed = prompt + number * (length - prompt)
            update = _update(decoder, optimizer, budget=packed, watch=watch)
            one = watch.shortest(lambda: update(groups[:1]))
            two = watch.shortest(lambda: update(groups))
            microbatch_s = max(two - one, 0.1 * one)
            tokens.append(packed)
            pairs.append(packed * length / 2)
            seconds.append(microbatch_s)
            others.append(max(0.0, one - microbatch_s))
        if is_spent() and len(tokens) > 1:
            break
        size *= 2
    return Cost.fitted(tokens, pairs, seconds), float(sorted(others)[len(others) // 2])


def _update(
    decoder: Decoder, optimizer: torch.optim.Optimizer, *, budget: int, watch: Watch
) -> Callable[[list[Group]], object]:
    settings = UpdateSettings(
        lr=1e-6,
        schedule="constant",
        warmup_steps=0,
        max_steps=10,
        microbatch_tokens=budget,
        max_grad_norm=1.0,
        temperature=1.0,
        advantages="group_mean",
        skip_zero_advantage=False,
        parity_tolerance=None,
        whole_groups=True,
    )
    update = PolicyUpdate(
        decoder,
        optimizer,
        regularised(policy_gradient),
        settings,
        group=None,
        device=watch.device,
    )
    return lambda groups: update.run(groups, 1, lambda: False)


# --- The generator ---


def time_decoding(config: ModelConfig, dtype: str, watch: Watch, budget_s: float) -> Cost:
    """Return a decode step's seconds by rows and tokens of context."""
    decoder = decoder_of(config, getattr(torch, dtype), watch.device).eval()
    is_spent = watch.until(budget_s)
    rows_of = []
    contexts = []
    seconds = []
    rows = 1
    new_tokens = 1 + (1 + REPEATS) * CHUNK
    most = config.max_position_embeddings - new_tokens
    while rows <= MOST_ROWS:
        for length in LENGTHS:
            if length > most:
                continue
            engine = Engine(
                decoder,
                max_slots=rows,
                max_len=length + new_tokens,
                prefill_chunk=length,
                device=watch.device,
            )
            _submit(engine, rows, length, new_tokens)
            while engine.num_waiting:
                engine.step(1)
            took = watch.shortest(lambda: engine.step(CHUNK)) / CHUNK
            engine.abort()
            engine.pop_finished()
            rows_of.append(rows)
            contexts.append(rows * (length + new_tokens / 2))
            seconds.append(took)
        if is_spent() and len(rows_of) > 1:
            break
        rows *= 4
    return Cost.fitted(rows_of, contexts, seconds)


def time_prefill(config: ModelConfig, dtype: str, watch: Watch, budget_s: float) -> Curve:
    """Return the seconds of reading a prompt and sampling its first token, by its tokens."""
    decoder = decoder_of(config, getattr(torch, dtype), watch.device).eval()
    is_spent = watch.until(budget_s)
    tokens = []
    seconds = []
    length = 32
    while length < min(MOST_TOKENS, config.max_position_embeddings):
        engine = Engine(
            decoder, max_slots=1, max_len=length + 1, prefill_chunk=length, device=watch.device
        )

        def read() -> None:
            _submit(engine, 1, length, 1)
            while engine.num_live or engine.num_waiting:
                engine.step(1)
            engine.pop_finished()

        tokens.append(length)
        seconds.append(watch.shortest(read))
        if is_spent() and len(tokens) > 1:
            break
        length *= 2
    return Curve.fitted(tokens, seconds)


def _submit(engine: Engine, rows: int, length: int, new_tokens: int) -> None:
    draw = torch.Generator().manual_seed(rows)
    vocabulary = engine.decoder.config.vocab_size
    params = SamplingParams(max_new_tokens=new_tokens)
    for ticket in range(rows):
        prompt = torch.randint(0, vocabulary, (length,), generator=draw)
        engine.submit(ticket, prompt, params)


# --- Scores, copies and the device ---


def time_scores(fn: str, watch: Watch) -> Curve:
    """Return the seconds of scores that are made together, by their number. ValueError for a
    function that cannot be used.
    """
    numbers = (1, 8, 64)
    seconds = []
    with RewardPool(fn) as pool:
        pool.start()
        for number in numbers:
            items = [text_item("1+1=", "2", {"answer": "2"}) for _ in range(number)]
            seconds.append(watch.shortest(lambda: score_all(pool, items)))
    return Curve.fitted(numbers, seconds)


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
