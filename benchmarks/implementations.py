"""Our own modules against transformers' for the same model: training, what it holds for backward,
and decoding, in one run.

    python benchmarks/implementations.py [--repeats 5] [--dtype float32] [--small] [--json FILE]

The model is random, with SmolLM2-135M's layers (30, hidden 576) and the tiny model's vocabulary.
Training is a trainer's step on a microbatch of 512 packed tokens, as in train.py. Decoding is 8
rows of 32 prompt tokens that sample 64 each. Contestants take turns within each repeat, on one
thread, in CPU seconds, so that other work on the machine changes little. Printed: seconds of both,
the ratio's median and range, and the bytes that a forward pass of such a microbatch holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch
from decode import prompts
from make_tiny import TINY_CONFIG, write_directory
from running import machine
from train import even_groups, our_step

MADE_BY = ("native", "transformers")
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
SMALL = {"num_hidden_layers": 2}
ROWS, NEW_TOKENS = 8, 64


def random_model(out: Path, shape: dict) -> Path:
    """Write a directory of a random Llama."""
    from random_weights import random_weights

    from llamarl.models.build import build_decoder, read_config
    from llamarl.models.hf import export, named_parameters_hf

    like = out / "like"
    write_directory(like, TINY_CONFIG | shape)
    decoder = random_weights(build_decoder(read_config(like)), seed=0)
    export(named_parameters_hf(decoder), like, out / "model", dtype=torch.float32)
    return out / "model"


def decoding(model: Path, dtype: str, made_by: str, tokens: int) -> Callable[[], None]:
    """Return what decodes the rows once."""
    from llamarl.inference import Engine, SamplingParams
    from llamarl.models.build import build_decoder, read_config
    from llamarl.models.hf import load_weights

    numbers = getattr(torch, dtype)
    decoder = load_weights(build_decoder(read_config(model, made_by), dtype=numbers), model)
    engine = Engine(decoder.eval(), max_slots=ROWS, max_len=128, dtype=numbers)
    asked = prompts(ROWS, decoder.config.vocab_size)

    def run() -> None:
        for ticket, prompt in enumerate(asked):
            engine.submit(ticket, prompt, SamplingParams(tokens))
        while engine.num_live or engine.num_waiting:
            engine.step(32)
        found = engine.pop_finished()
        assert sum(made.token_ids.numel() for _, made in found) == ROWS * tokens

    return run


def held_bytes(model: Path, dtype: str, made_by: str) -> int:
    """Return the bytes of tensors that a forward pass of 512 tokens holds for backward, beside the
    weights.
    """
    from llamarl.models.attention import PackedAttention
    from llamarl.models.build import build_decoder, read_config
    from llamarl.models.hf import load_weights

    config = read_config(model, made_by)
    decoder = load_weights(build_decoder(config, dtype=getattr(torch, dtype)), model).train()
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    held = {}

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    places_L = torch.arange(128)
    ids_T = (places_L % TINY_CONFIG["vocab_size"]).repeat(4)
    attention = PackedAttention(torch.arange(0, 513, 128))
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        decoder(ids_T, places_L.repeat(4), attention, lambda h_TD, weight_VD: h_TD.sum())
    return sum(held[at].untyped_storage().nbytes() for at in held.keys() - weights)


def in_turns(works: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Return CPU seconds of each work, which take turns. Each runs once before."""
    spent: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(repeats):
        for name, work in works.items():
            began = time.process_time()
            work()
            spent[name].append(time.process_time() - began)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=("bfloat16", "float32"))
    parser.add_argument("--small", action="store_true", help="a model that takes seconds")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = {"benchmark": "implementations", "dtype": args.dtype, "machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), SHAPE | (SMALL if args.small else {}))
        vocab = TINY_CONFIG["vocab_size"]
        tokens = 4 if args.small else NEW_TOKENS
        works = {"decoding": {}, "training": {}}
        for made_by in MADE_BY:
            works["decoding"][made_by] = decoding(model, args.dtype, made_by, tokens)
        groups = even_groups(vocab)[:1]
        for made_by in MADE_BY:
            works["training"][made_by] = our_step(model, args.dtype, 512, groups, made_by)
        for what, contestants in works.items():
            spent = in_turns(contestants, args.repeats)
            pairs = zip(spent["native"], spent["transformers"], strict=True)
            ratios = [theirs / ours for ours, theirs in pairs]
            ratio = statistics.median(ratios)
            result[what] = spent | {"ratio": ratio, "ratio_range": [min(ratios), max(ratios)]}
            shown = ", ".join(f"{n} {statistics.median(s):.2f} s" for n, s in spent.items())
            between = f"{min(ratios):.2f} to {max(ratios):.2f}"
            print(f"{what}  {shown}: transformers' takes {ratio:.2f} x ({between})")
        held = {made_by: held_bytes(model, args.dtype, made_by) for made_by in MADE_BY}
        ratio = held["transformers"] / held["native"]
        result["held"] = held | {"ratio": ratio}
        shown = ", ".join(f"{n} {count / 2**20:.1f} MiB" for n, count in held.items())
        print(f"held for backward  {shown}: transformers' hold {ratio:.2f} x")
    print(f"one thread, {args.dtype}, machine {result['machine']}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
