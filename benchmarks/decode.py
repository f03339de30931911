"""Tokens per second of decoding: our engine, transformers, vLLM, and the bound, in one run on one
machine.

    python benchmarks/decode.py --model DIR --batch 1,8,32,64 --new-tokens 128
    [--against transformers,vllm] [--threads N] [--json FILE]

Every request has PROMPT tokens and samples exactly --new-tokens (no stop token). Each figure is the
median of --repeats runs, taken in turn, so that a busy minute of the machine falls on all. The
bound is one decode step's products alone, on packed weights that are cold (a set a layer), and the
live cache's bytes at the measured read bandwidth; on a GPU it is weights and cache at the measured
copy bandwidth. --uneven also compares log-normal lengths (at most 8 times the median; 256 requests
over 32 slots) with equal ones, and prints what an engine could reach that spends nothing but its
decode steps (timed by rows and context) and the prefill: long rows read more, and the last of them
run alone. --cpu-time counts the process's CPU seconds instead of the clock's: for one thread on a
machine that others use.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch
from running import machine

from llamarl.machine.precision import use_float32_products

PROMPT = 32
CHUNK = 32
COPY_BYTES = 256 << 20


clock = time.perf_counter


def seconds(work: Callable[[], object]) -> float:
    began = clock()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - began


def prompts(batch: int, vocab: int) -> list[list[int]]:
    prompts = []
    for i in range(batch):
        prompts.append([(7 * i + 13 * j) % (vocab - 8) + 4 for j in range(PROMPT)])
    return prompts


# --- The contestants: each gives a function that makes batch x new_tokens tokens ---


def ours(args: argparse.Namespace, batch: int) -> Callable[[], None]:
    from llamarl.inference import Engine, SamplingParams

    engine = Engine(
        our_decoder(args),
        max_slots=batch,
        max_len=PROMPT + args.new_tokens,
        device=args.device,
        cuda_graphs=not args.no_graphs,
    )
    params = SamplingParams(args.new_tokens)

    def run():
        for ticket, prompt in enumerate(prompts(batch, engine.decoder.config.vocab_size)):
            engine.submit(ticket, prompt, params)
        sampled = 0
        while engine.num_live or engine.num_waiting:
            sampled += engine.step(CHUNK)
        assert (
            sampled
            == batch * args.new_tokens
            == sum(c.token_ids.numel() for _, c in engine.pop_finished())
        )

    return run


def our_decoder(args: argparse.Namespace):
    """The decoder of --model on the device, quantised as --quantize says."""
    from llamarl.models.build import build_decoder, read_config
    from llamarl.models.hf import load_weights
    from llamarl.models.quantize import quantize_decoder

    decoder = build_decoder(read_config(args.model), dtype=getattr(torch, args.dtype))
    load_weights(decoder, args.model, device=args.device)
    decoder.requires_grad_(False)
    if args.quantize != "none":
        quantize_decoder(decoder, args.quantize)
    return decoder


def transformers(args: argparse.Namespace, batch: int) -> Callable[[], None]:
    from transformers import AutoModelForCausalLM

    model = (
        AutoModelForCausalLM.from_pretrained(
            args.model, dtype=getattr(torch, args.dtype), trust_remote_code=False
        )
        .to(args.device)
        .eval()
    )
    ids = torch.tensor(prompts(batch, model.config.vocab_size), device=args.device)

    def run():
        lengths = {"min_new_tokens": args.new_tokens, "max_new_tokens": args.new_tokens}
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
            **lengths,
        )
        assert out.shape[1] == PROMPT + args.new_tokens

    return run


def vllm(args: argparse.Namespace, batch: int) -> Callable[[], None]:
    import os

    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import LLM, SamplingParams

    options = {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "distributed_executor_backend": "uni",
    }
    model = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=PROMPT + args.new_tokens,
        max_num_seqs=batch,
        skip_tokenizer_init=True,
        **options,
    )
    params = SamplingParams(
        max_tokens=args.new_tokens, ignore_eos=True, logprobs=0, detokenize=False
    )
    asked = [
        {"prompt_token_ids": p}
        for p in prompts(batch, model.llm_engine.model_config.get_vocab_size())
    ]

    def run():
        made = model.generate(asked, params, use_tqdm=False)
        assert all(len(m.outputs[0].token_ids) == args.new_tokens for m in made)

    return run


# --- The bound ---


def bound(args: argparse.Namespace, batch: int) -> Callable[[], float]:
    """A function that measures the least seconds of one step at the mean length.

    Its products are in float32 where this CPU has no instructions for packed ones in bfloat16.
    """
    from llamarl.models.build import read_config
    from llamarl.models.config import ModelConfig

    config: ModelConfig = read_config(args.model)
    dtype = getattr(torch, args.dtype)
    places = batch * (PROMPT + args.new_tokens / 2)
    cache = (
        places
        * 2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * config.head_dim
        * dtype.itemsize
    )
    if args.device != "cpu":
        weights = sum(p.nbytes for p in our_decoder(args).parameters())
        return lambda: (weights + cache) / (2 * COPY_BYTES) * copy_s(args.device)
    layer = (
        (
            config.hidden_size,
            (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim,
        ),
        (config.num_attention_heads * config.head_dim, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
        (config.hidden_size, config.intermediate_size),
        (config.intermediate_size, config.hidden_size),
    )
    shapes = [*layer * config.num_hidden_layers, (config.hidden_size, config.vocab_size)]
    of_products = dtype
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        of_products = torch.float32
    pack = torch.ops.mkldnn._reorder_linear_weight
    inputs = {k: torch.randn(batch, k, dtype=of_products) for k, _ in shapes}
    packed = [(inputs[k], pack(torch.randn(n, k, dtype=of_products))) for k, n in shapes]

    def products():
        for x, weight in packed:
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

    return lambda: min(seconds(products) for _ in range(8)) + cache / COPY_BYTES * read_s()


def copy_s(device: str) -> float:
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return min(seconds(lambda: target.copy_(source)) for _ in range(5))


def read_s() -> float:
    """Seconds to read COPY_BYTES from memory."""
    source = torch.zeros(COPY_BYTES // 4)
    return min(seconds(source.sum) for _ in range(5))


# --- Uneven lengths ---


SLOTS = 32
REQUESTS = 256
LONG = 256  # tokens of the second context at which a step is timed
ROWS = (1, 2, 4, 8, 16, 24, 32)


def uneven(args: argparse.Namespace) -> dict[str, float]:
    """Tokens/s at log-normal and at equal lengths: the same prompts, slots and number of tokens;
    and what greedy admission could reach.
    """
    from llamarl.inference import Engine, SamplingParams

    median = max(8, args.new_tokens // 2)
    noise = torch.randn(REQUESTS, generator=torch.Generator().manual_seed(0)) * math.log(8) / 2.5
    lengths = (median * noise.exp()).clamp(1, 8 * median).long().tolist()
    total = sum(lengths)
    equal = [total // REQUESTS + (i < total % REQUESTS) for i in range(REQUESTS)]
    max_len = max(LONG + 32, PROMPT + 8 * median)
    engine = Engine.from_hf(
        args.model, dtype=args.dtype, max_slots=SLOTS, max_len=max_len, device=args.device
    )
    asked = prompts(REQUESTS, engine.decoder.config.vocab_size)

    def run(wanted: list[int]) -> float:
        for ticket, (prompt, n) in enumerate(zip(asked, wanted)):
            engine.submit(ticket, prompt, SamplingParams(n))

        def drain():
            while engine.num_live or engine.num_waiting:
                engine.step(CHUNK)

        took = seconds(drain)
        assert sum(c.token_ids.numel() for _, c in engine.pop_finished()) == sum(wanted)
        return took

    def step_s(rows: int, prompt_tokens: int) -> float:
        for ticket in range(rows):
            engine.submit(ticket, (asked[ticket] * LONG)[:prompt_tokens], SamplingParams(32))
        engine.step(1)
        took = seconds(lambda: engine.step(8)) / 8
        engine.abort()
        engine.pop_finished()
        return took

    run([2] * REQUESTS)
    found: dict[str, list[float]] = {
        "uneven": [],
        "equal": [],
        "ideal_uneven": [],
        "ideal_equal": [],
    }
    for _ in range(max(1, args.repeats - 1)):
        found["uneven"].append(run(lengths))
        costs = [[step_s(n, PROMPT), step_s(n, LONG)] for n in ROWS]
        prefill = run([1] * REQUESTS)
        found["equal"].append(run(equal))
        for name, wanted in (("ideal_uneven", lengths), ("ideal_equal", equal)):
            found[name].append(
                prefill + sum(step_cost(costs, rows, places) for rows, places in greedy(wanted))
            )
    rates = {name: total / statistics.median(times) for name, times in found.items()}
    best = rates["ideal_uneven"] / rates["ideal_equal"]
    return rates | {
        "ratio": rates["uneven"] / rates["equal"],
        "ideal_ratio": best,
        "mean_tokens": total / REQUESTS,
    }


def greedy(wanted: list[int]) -> Iterator[tuple[int, int]]:
    """(rows, places attended to in all) of each decode step when a slot that comes free is filled
    at once, in order.
    """
    waiting, live = deque(wanted), []  # tokens made, tokens wanted
    while waiting or live:
        while waiting and len(live) < SLOTS:
            live.append((1, waiting.popleft()))  # its prefill makes the first
        live = [(made, n) for made, n in live if made < n]
        if live and (len(live) == SLOTS or not waiting):
            yield len(live), sum(PROMPT + made for made, _ in live)
            live = [(made + 1, n) for made, n in live]


def step_cost(costs: list[list[float]], rows: int, places: int) -> float:
    """Seconds of a step: linear between the timed numbers of rows, and in the mean context of a
    row.
    """
    more = next(i for i, n in enumerate(ROWS) if n >= rows)
    less = max(0, more - 1)
    part = (rows - ROWS[less]) / max(1, ROWS[more] - ROWS[less])
    short, long = (costs[less][k] + part * (costs[more][k] - costs[less][k]) for k in (0, 1))
    # Timed over 8 steps behind two tokens, so at 6 places more than the prompt in the mean.
    return short + (long - short) * (places / rows - PROMPT - 6) / (LONG - PROMPT)


CONTESTANTS = {"transformers": transformers, "vllm": vllm, "engine": ours}
RIVALS = ("transformers", "vllm")


def measure(args: argparse.Namespace, batch: int, names: list[str]) -> dict[str, list[float]]:
    """Tokens/s of each name at this batch, one a repeat; `bound` is tokens/s too."""
    runs = {name: CONTESTANTS[name](args, batch) for name in names}
    least = bound(args, batch)
    for run in runs.values():
        run()
    rates: dict[str, list[float]] = {name: [] for name in (*runs, "bound")}
    for _ in range(args.repeats):
        for name, run in runs.items():
            rates[name].append(batch * args.new_tokens / seconds(run))
        rates["bound"].append(batch / least())
    return rates


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--batch", default="1,8,32,64")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--against", default=",".join(RIVALS), help="any of the default's")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--no-graphs", action="store_true", help="on a GPU: kernel by kernel")
    parser.add_argument("--quantize", default="none", choices=("none", "int8", "fp8"), help="ours")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.against = [name for name in args.against.split(",") if name]
    unknown = [name for name in args.against if name not in RIVALS]
    if unknown:
        parser.error(f"--against {','.join(unknown)}: need some of {', '.join(RIVALS)}")
    if args.cpu_time and args.threads != 1:
        parser.error("--cpu-time needs --threads 1: threads that wait burn CPU seconds too")
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def main() -> None:
    global clock
    args = arguments()
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(args.threads)
    print(f"float32 {use_float32_products(reproducible=True)}")
    rivals = args.against
    if "vllm" in rivals and importlib.util.find_spec("vllm") is None:
        rivals.remove("vllm")
        print("vllm   absent: not importable here")
    table, ranges = {}, {}
    for batch in (int(b) for b in args.batch.split(",") if b):
        rates = measure(args, batch, [*rivals, "engine"])
        row = table[batch] = {name: statistics.median(values) for name, values in rates.items()}
        ranges[batch] = {name: [min(values), max(values)] for name, values in rates.items()}
        ratios = [f"{row['engine'] / row[name]:.2f} x {name}" for name in rivals]
        ratios.append(f"{row['engine'] / row['bound']:.0%}")
        shown = "   ".join(f"{name} {rate:8.0f}" for name, rate in row.items())
        print(f"batch {batch:4}   tok/s {shown}   engine = {', '.join(ratios)} of the bound")
    result = {
        "benchmark": "decode",
        "model": Path(args.model).name,
        "dtype": args.dtype,
        "device": args.device,
        "graphs": not args.no_graphs,
        "quantize": args.quantize,
        "threads": args.threads,
        "cpu_time": args.cpu_time,
        "prompt_tokens": PROMPT,
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
        "tokens_per_s": table,
        "ranges": ranges,
        "machine": machine(),
    }
    if args.uneven:
        result["uneven"] = uneven(args)
        print(
            "uneven lengths: {uneven:.0f} tok/s, equal {equal:.0f}: {ratio:.0%}; "
            "at these costs of a step the best that greedy admission reaches: "
            "{ideal_uneven:.0f}, equal {ideal_equal:.0f}: {ideal_ratio:.0%}".format(
                **result["uneven"]
            )
        )
    print(f"{args.threads} threads, {args.device}, {args.dtype}, machine {result['machine']}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
