"""Times the true parts of a run on this machine, in about a minute, and makes a data sheet of it.

    sheet = probe(path="DIR", dtype="bfloat16", reward_fn="", budget_s=60.0, threads=1)

trainer     PolicyUpdate on one and on two microbatches of each size: their difference is a
            microbatch, and what is left of the first is an update's fixed part; groups of very
            short completions too, so that a completion's own seconds are known
generator   Engine: its first step reads prompts, the next ones decode; a batch of very short
            completions from their tickets to the bytes that leave, for a completion's own seconds
scorer      RewardPool, on the function that is given, and what its rank does beside it
weights     the copy that a sender makes, with its digest; the canary on either side
cores       an update while other processes keep all other cores busy, and one that two ranks make
            together (on a CPU)

A config.json is enough: weights are drawn. Each time is the shortest of some, because whatever else
runs on the machine makes it longer. What one thread of a CPU computes is timed by that thread's own
seconds. Sizes double until their share of the budget is spent.
"""

from __future__ import annotations

import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from llamarl.comm.wire import encode
from llamarl.inference.engine import Engine
from llamarl.inference.room import whole_blocks
from llamarl.inference.sampler import SamplingParams
from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.optim import build_optimizer
from llamarl.learning.update import PolicyUpdate, UpdateSettings
from llamarl.machine.allocator import keep_freed_memory
from llamarl.machine.precision import use_float32_products
from llamarl.models.build import Decoder, build_decoder, random_weights
from llamarl.models.config import ModelConfig, read_config, tiny_directory
from llamarl.models.masters import Masters
from llamarl.models.parity import Sequence
from llamarl.models.sharding import num_parameters
from llamarl.planner.curves import Cost, Curve
from llamarl.planner.predict import PREFILL_TOKENS
from llamarl.planner.probe_machine import (
    GROUP,
    SHORT,
    assumptions_of,
    figures_of,
    time_copies,
    time_hosting,
    time_scores,
)
from llamarl.planner.probe_ranks import time_together_s
from llamarl.planner.sheet import Measured, Sheet, read_sheet
from llamarl.planner.watch import REPEATS, Watch
from llamarl.types import Group

REWARD = "llamarl.tasks.rewards:exact_match"
CHUNK = 16  # tokens of a row between two looks at the clock
LENGTHS = (64, 512)  # tokens of a sequence
SHORT_PROMPT = 8  # tokens, so that decode steps of as many rows differ in their context
MOST_ROWS = 512
MOST_TOKENS = 1 << 15
_SHARES = {"update": 0.45, "decode": 0.35, "prefill": 0.1}  # of the budget
_AHEAD = 4  # tokens that a row may sample while others' prompts are read, each time
_GROUPS = 16  # of an update beside others
_OFTEN = 20  # times at most that such an update is made: its difference from another counts
_CANARY = 16  # tokens, as of a later version
_START_S = 60.0  # a process that keeps a core busy has so long to begin
# It multiplies matrices of a layer's size, says when it has begun, and ends with who started it.
_BUSY = """
import os
import numpy
parent = os.getppid()
a = numpy.ones((256, 256), dtype=numpy.float32)
a @ a
print("begun", flush=True)
while os.getppid() == parent:
    a @ a
"""


def probe(*, path: str, dtype: str, reward_fn: str, budget_s: float, threads: int = 0) -> Sheet:
    """Return a sheet of this machine. path: a model's directory or config.json, "": the embedded
    model. dtype: "": bfloat16 on a GPU, float32 elsewhere. reward_fn: "": exact_match. threads: of
    a rank; 0: as many as torch has taken.
    """
    if threads:
        torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("bfloat16" if device.type == "cuda" else "float32")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"model.dtype={dtype}: a trainer computes in float32 or bfloat16")
    if device.type == "cpu":
        keep_freed_memory()  # as every job does when it starts
    use_float32_products(reproducible=True)
    config = read_config(path or tiny_directory())
    is_alone = device.type == "cpu" and torch.get_num_threads() == 1
    # One thread's own seconds leave out those in which other programs have its core.
    watch = Watch(device, clock=time.process_time if is_alone else time.perf_counter)
    with_workers = Watch(device)
    microbatch, update_s = time_updates(config, dtype, watch, _SHARES["update"] * budget_s)
    decode = time_decoding(config, dtype, watch, _SHARES["decode"] * budget_s)
    prefill = time_prefill(config, dtype, watch, _SHARES["prefill"] * budget_s)
    sampled_s = time_sampling(config, dtype, watch, decode, prefill)
    publish_s, swap_s = time_canaries(config, dtype, watch)
    crowding, together_s = 0.0, 0.0
    if device.type == "cpu":
        crowding, together_s = time_beside(path, config, dtype, watch)
    measured = Measured(
        model=Path(path or tiny_directory()).name,
        parameters=num_parameters(config),
        dtype=dtype,
        microbatch=microbatch,
        update_s=update_s,
        decode=decode,
        prefill=prefill,
        copy=time_copies(with_workers),
        score=time_scores(reward_fn or REWARD, with_workers),
        sampled_s=sampled_s,
        hosted_s=time_hosting(reward_fn or REWARD, Watch(device, clock=time.process_time)),
        publish_s=publish_s,
        swap_s=swap_s,
        crowding=crowding,
        together_s=together_s,
    )
    figures = figures_of(dtype, with_workers)
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
    optimizer = optimizer_of(decoder)
    is_spent = watch.until(budget_s)
    tokens = []
    pairs = []
    completions = []
    seconds = []
    others = []
    size = 128
    while size <= MOST_TOKENS:
        for groups, is_short in _microbatches(config, size):
            packed = sum(group.prompt_ids.numel() + sum(group.lengths.tolist()) for group in groups)
            number = sum(group.lengths.numel() for group in groups)
            again = [replace(group, ticket=group.ticket + len(groups)) for group in groups]
            update = _update(decoder, optimizer, budget=packed, watch=watch)
            one = watch.shortest(lambda: update(groups))
            two = watch.shortest(lambda: update(groups + again))
            microbatch_s = max(two - one, 0.1 * one)
            tokens.append(packed)
            pairs.append(packed * packed / number / 2)
            completions.append(number)
            seconds.append(microbatch_s)
            if not is_short:
                others.append(max(0.0, one - microbatch_s))
        if is_spent() and len(tokens) > 1:
            break
        size *= 2
    cost = Cost.fitted(tokens, pairs, seconds, completions)
    return cost, float(sorted(others)[len(others) // 2])


def _microbatches(config: ModelConfig, size: int) -> Iterator[tuple[list[Group], bool]]:
    """Yield what a microbatch of about so many tokens may hold: a group of sequences of each of
    LENGTHS, and groups of very short ones. With each: whether it is the latter.
    """
    for length in LENGTHS:
        if length <= min(size, config.max_position_embeddings):
            prompt = length // 4
            number = max(1, round((size - prompt) / (length - prompt)))
            yield [group_of(0, prompt, [length - prompt] * number, config.vocab_size)], False
    prompt, length = SHORT
    number = max(1, round(size / (prompt + GROUP * length)))
    yield [group_of(i, prompt, [length] * GROUP, config.vocab_size) for i in range(number)], True


def _update(
    decoder: Decoder, optimizer: torch.optim.Optimizer, *, budget: int, watch: Watch
) -> Callable[[list[Group]], object]:
    update = policy_update(decoder, optimizer, budget=budget, device=watch.device)
    return lambda groups: update.run(groups, 1, lambda: False)


def optimizer_of(decoder: Decoder) -> torch.optim.Optimizer:
    """Return the optimizer of a decoder's parameters."""
    return build_optimizer(
        decoder.parameters(), lr=1e-6, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )


def short_groups(number: int, vocabulary: int) -> tuple[list[Group], int]:
    """Return so many groups of very short completions, and their packed tokens."""
    prompt, length = SHORT
    groups = [group_of(i, prompt, [length] * GROUP, vocabulary) for i in range(number)]
    return groups, number * (prompt + GROUP * length)


def policy_update(
    decoder: Decoder,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    budget: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> PolicyUpdate:
    """Return an update of a decoder in microbatches of `budget` tokens. group: of the ranks that
    make it together; None: one alone does.
    """
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
        parity=None,
        whole_groups=True,
    )
    return PolicyUpdate(
        decoder,
        optimizer or optimizer_of(decoder),
        regularised(policy_gradient),
        settings,
        group=group,
        device=device,
    )


# --- The generator ---


def time_decoding(config: ModelConfig, dtype: str, watch: Watch, budget_s: float) -> Cost:
    """Return a decode step's seconds by rows and tokens of context."""
    decoder = decoder_of(config, getattr(torch, dtype), watch.device).eval()
    is_spent = watch.until(budget_s)
    rows_of = []
    contexts = []
    seconds = []
    rows = 1
    while rows <= MOST_ROWS:
        for length in (SHORT_PROMPT, *LENGTHS):
            # While prompts are read, the rows of the first ones sample, and none may end before all
            # was timed.
            together = max(length, PREFILL_TOKENS)
            reads = math.ceil(rows * length / together)
            new_tokens = _AHEAD * (1 + reads) + (1 + REPEATS) * CHUNK
            if length + new_tokens > config.max_position_embeddings:
                continue
            engine = Engine(
                decoder,
                max_slots=rows,
                max_len=length + new_tokens,
                # Rows take whole blocks: with less, one of them waits until the others have ended.
                cache_tokens=rows * whole_blocks(length + new_tokens),
                prefill_chunk=together,
                device=watch.device,
            )
            _submit(engine, rows, length, new_tokens)
            while engine.num_waiting:
                engine.step(1)
            took = watch.shortest(lambda: engine.step(CHUNK)) / CHUNK
            is_whole = engine.num_live == rows
            engine.abort()
            engine.pop_finished()
            if not is_whole:
                continue
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


def time_sampling(
    config: ModelConfig, dtype: str, watch: Watch, decode: Cost, prefill: Curve
) -> float:
    """Return a completion's seconds on its generator besides decode steps and prompts: from its
    ticket to the bytes that leave, of a batch of very short ones.
    """
    decoder = decoder_of(config, getattr(torch, dtype), watch.device).eval()
    prompt, length = SHORT
    groups = MOST_ROWS // GROUP
    rows = groups * GROUP
    params = SamplingParams(n=GROUP, max_new_tokens=length, min_new_tokens=length)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, config.vocab_size, (groups, prompt), generator=draw)
    engine = Engine(
        decoder,
        max_slots=rows,
        max_len=prompt + length,
        prefill_chunk=PREFILL_TOKENS,
        device=watch.device,
    )

    def sample() -> None:
        for ticket, prompt_ids in enumerate(prompts):
            engine.submit(ticket, prompt_ids, params)
        ended = []
        while engine.num_live or engine.num_waiting:
            engine.step(CHUNK)
            ended += [completion for _, completion in engine.pop_finished()]
        encode(ended)

    took = watch.shortest(sample)
    took -= length * decode.at(rows, rows * (prompt + length / 2))
    took -= prefill.at(groups * prompt)
    return max(0.0, took) / rows


def time_canaries(config: ModelConfig, dtype: str, watch: Watch) -> tuple[float, float]:
    """Return seconds of a version's canary where it is made and where it is compared; the latter
    with what an engine lays out anew for its weights, at its next step.
    """
    token_ids = torch.arange(_CANARY) % config.vocab_size
    sequence = Sequence(token_ids.tolist(), given=_CANARY // 2)
    trained = trained_decoder(config, dtype, watch.device)
    update = policy_update(trained, budget=MOST_TOKENS, device=watch.device)
    with torch.no_grad():
        made_s = watch.shortest(lambda: update.canary([sequence]))
    decoder = decoder_of(config, getattr(torch, dtype), watch.device).eval()
    engine = Engine(
        decoder, max_slots=1, max_len=_CANARY, prefill_chunk=_CANARY, device=watch.device
    )
    given = sequence.given
    compared_s = watch.shortest(lambda: engine.score(token_ids[:given], token_ids[given:], 1.0))

    def sample() -> None:
        _submit(engine, 1, 1, 1)
        while engine.num_live or engine.num_waiting:
            engine.step(1)
        engine.pop_finished()

    def swap() -> None:
        engine.weights_changed(1)
        sample()

    laid_out_s = max(0.0, watch.shortest(swap) - watch.shortest(sample))
    return made_s, compared_s + laid_out_s


def time_beside(path: str, config: ModelConfig, dtype: str, watch: Watch) -> tuple[float, float]:
    """Return the share by which an update takes longer while other processes keep all other cores
    busy; and the seconds more that it takes each of two ranks which make it together. Both are 0 on
    one core. RuntimeError where such a process does not begin.
    """
    decoder = trained_decoder(config, dtype, watch.device)
    groups, size = short_groups(_GROUPS, config.vocab_size)
    update = _update(decoder, optimizer_of(decoder), budget=size, watch=watch)
    alone_s = watch.shortest(lambda: update(groups), _OFTEN)
    others = []
    try:
        for _ in range(_other_cores()):
            others.append(_busy_process())
        crowded_s = watch.shortest(lambda: update(groups), _OFTEN) if others else alone_s
    finally:
        for process in others:
            process.kill()
            process.wait()
            assert process.stdout is not None, "it was asked for"
            process.stdout.close()
    crowding = max(0.0, crowded_s / alone_s - 1)
    if not others:
        return crowding, 0.0
    both_s = time_together_s(path, dtype, groups=_GROUPS) / (1 + crowding)
    return crowding, max(0.0, both_s - alone_s)


def has_other_cores() -> bool:
    """Whether there are more cores than torch computes with here."""
    return _other_cores() > 0


def _other_cores() -> int:
    return len(os.sched_getaffinity(0)) - torch.get_num_threads()


def _busy_process() -> subprocess.Popen[str]:
    """Return a process that computes on a core, once it has begun."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _BUSY], stdout=subprocess.PIPE, text=True, env=variables
    )
    assert process.stdout is not None, "it was asked for"
    ready, _, _ = select.select([process.stdout], [], [], _START_S)
    if not ready:
        process.kill()
        process.wait()
        raise RuntimeError(f"a process that keeps a core busy has not begun in {_START_S:.0f} s")
    return process
