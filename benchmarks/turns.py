"""What turns cost: tokens/s of dialogues, over completions of one turn with as many tokens.

    python benchmarks/turns.py [--model NAME] [--rows 128] [--each 32] [--pairs 5] [--json FILE]
    python benchmarks/turns.py --idle [--rows 32] [--each 128] [--workers 32] [--json FILE]

Completions of four turns of --each sampled tokens, with four tokens of an environment between them
that the model reads and does not sample, against completions of one turn with as many tokens in
all, behind the same prompt: groups of 8, four times as many completions as there are slots, so that
turns end at all times. Measured are the engine of dialogues with its workers, the same with no keys
and values kept, and the native engine alone, one after the other in each of --pairs rounds; printed
are medians, and the median of each round's ratio.

--idle: the share of the time in which the engine has nothing to sample although it may start
tickets, with tools that sleep for 200 ms in --workers processes.

--model: "tiny", of the embedded model's sizes, "middle", of 24 million weights, or "smollm2", with
the layers of SmolLM2-135M; all random. One thread. The end of a turn is a stop string, which the
native engine looks for too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import games
from make_tiny import TINY_CONFIG, write_directory
from running import ROOT, machine

sys.path.insert(0, str(ROOT))

import llamarl  # noqa: F401  before torch: it says how torch's threads wait

# isort: split
import torch
from random_weights import random_weights

from llamarl.environments.calls import FORMATS
from llamarl.environments.dialogues import Dialogues, Environment
from llamarl.environments.engine import DialogueEngine
from llamarl.environments.pool import EnvironmentPool
from llamarl.inference.engine import Engine
from llamarl.inference.sampler import SamplingParams
from llamarl.models.build import build_decoder
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.tasks.environment import turn_tokens
from llamarl.types import Prompt

GROUP = 8
CHUNK = 8
MAX_LEN = 512
TOKENIZER = load_tokenizer(tiny_directory())
GAME = Prompt(torch.tensor([TOKENIZER.bos_token_id]), "game", {"game": 0})
SIZES: dict[str, dict[str, int]] = {
    "tiny": {},
    "middle": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
}
PROMPT_IDS = TOKENIZER.encode(games.Talk().init()[0])
SAID_IDS = TOKENIZER.encode(games.SAID, add_special_tokens=False)


def dots(token_ids: list[int]) -> str:
    """Return a text whose length is the number of tokens, so that a stop string of dots ends a turn
    after as many.
    """
    return "." * len(token_ids)


def native(model: str, rows: int, *, kept_tokens: int = 0) -> Engine:
    """Return the engine of a model, by its name."""
    sizes = SIZES[model]
    with tempfile.TemporaryDirectory() as folder:
        directory = tiny_directory()
        if sizes:
            directory = Path(folder)
            write_directory(directory, {**TINY_CONFIG, **sizes})
        decoder = build_decoder(read_config(directory))
    return Engine(
        random_weights(decoder, seed=0),
        max_slots=rows,
        max_len=MAX_LEN,
        decode=dots,
        kept_tokens=kept_tokens,
    )


def talking(
    inner: Engine, game: str, *, workers: int, max_turns: int = games.NUM_TURNS
) -> DialogueEngine:
    """Return the engine of dialogues with a game around another."""
    path = f"benchmarks.games:{game}"

    def make(on_answer: Callable[[], None]) -> Dialogues:
        environment = Environment(
            pool=EnvironmentPool(path, num_workers=workers, timeout_s=60.0, on_answer=on_answer),
            turns=turn_tokens(path, TOKENIZER, chat=False, system_prompt=None),
            read_calls=FORMATS["words"],
            prompt_key="prompt",
            is_own=True,
            is_dialogue=True,
            max_turns=max_turns,
            max_turn_tokens=None,
        )
        return Dialogues({"task": environment}, decode=dots, seed=0, reproducible=False)

    return DialogueEngine(inner, make, prompt_of=lambda stream, ticket: GAME, reproducible=False)


def drain(engine: Engine | DialogueEngine, submit: Callable[[int], None], groups: int) -> dict:
    """Sample so many groups to their end, a ticket as soon as there is room for one. Return the
    sampled tokens, the seconds, and those of them without anything to sample while there were
    tickets to start.
    """
    begin = time.perf_counter()
    next_ticket = tokens = 0
    idle_s = 0.0
    until_last_s = 0.0
    while next_ticket < groups or engine.num_live or engine.num_waiting:
        while next_ticket < groups and engine.free_slots - engine.num_waiting >= GROUP:
            submit(next_ticket)
            next_ticket += 1
            until_last_s = time.perf_counter() - begin
        sampled = engine.step(CHUNK)
        tokens += sampled
        if not sampled and isinstance(engine, DialogueEngine) and engine.num_acting:
            waits = time.perf_counter()
            engine.wait(1.0)
            if next_ticket < groups:
                idle_s += time.perf_counter() - waits
        engine.pop_finished()
    seconds = time.perf_counter() - begin
    return {"tokens": tokens, "s": seconds, "idle_s": idle_s, "until_last_s": until_last_s}


def one_turn(engine: Engine, length: int, groups: int, each: int) -> dict:
    """Sample completions of one turn with the native engine. Its stop string never comes."""
    params = SamplingParams(length, n=GROUP, stop_strings=("x" * each,))
    return drain(engine, lambda ticket: engine.submit(ticket, PROMPT_IDS, params), groups)


def many_turns(engine: DialogueEngine, groups: int, each: int) -> dict:
    """Sample dialogues, whose turns are of `each` tokens."""
    params = SamplingParams(MAX_LEN - 1, n=GROUP, stop_strings=("." * each,))
    return drain(engine, lambda ticket: engine.submit(ticket, GAME.prompt_ids, params), groups)


def measure_ratio(args: argparse.Namespace) -> dict:
    """Return tokens/s of all ways, round by round, and the ratios of each round."""
    groups = 4 * args.rows // GROUP
    alone = native(args.model, args.rows)
    kept = talking(native(args.model, args.rows, kept_tokens=1 << 20), "Talk", workers=args.workers)
    anew = talking(native(args.model, args.rows), "Talk", workers=args.workers)
    said = (games.NUM_TURNS - 1) * len(SAID_IDS)
    length = games.NUM_TURNS * args.each + said
    ways = {
        "one turn": partial(one_turn, alone, length, groups, args.each),
        "turns": partial(many_turns, kept, groups, args.each),
        "turns, nothing kept": partial(many_turns, anew, groups, args.each),
    }
    for way in ways.values():
        way()
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.pairs):
        order = list(ways) if number % 2 else list(reversed(ways))
        for name in order:
            found = ways[name]()
            per_completion = found["tokens"] / (groups * GROUP)
            assert per_completion == (length if name == "one turn" else length - said), found
            rates[name].append(groups * GROUP * length / found["s"])
    kept.close()
    anew.close()
    ratios = {}
    for name in list(ways)[1:]:
        pairs = zip(rates[name], rates["one turn"])
        ratios[name] = [of_turns / of_one for of_turns, of_one in pairs]
    for name, every in rates.items():
        line = f"{name:20} {statistics.median(every):8,.0f} tokens/s"
        if name in ratios:
            line += f"  {statistics.median(ratios[name]):.3f} of one turn"
            line += f" ({min(ratios[name]):.3f} to {max(ratios[name]):.3f})"
        print(line)
    return {"tokens_per_s": rates, "ratio": ratios}


def measure_idle(args: argparse.Namespace) -> dict:
    """Return the idle share with slow tools, and tokens/s beside those with tools at once."""
    groups = 4 * args.rows // GROUP
    found = {}
    for name, game in (("at once", "Talk"), ("200 ms", "SlowTalk")):
        engine = talking(
            native(args.model, args.rows, kept_tokens=1 << 20), game, workers=args.workers
        )
        many_turns(engine, 1, args.each)
        measured = many_turns(engine, 2 * groups, args.each)
        engine.close()
        idle = measured["idle_s"] / measured["until_last_s"]
        rate = measured["tokens"] / measured["s"]
        found[name] = {**measured, "idle": idle, "tokens_per_s": rate}
        print(f"tools {name:8} {rate:8,.0f} tokens/s  idle {idle:.1%}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--idle", action="store_true")
    parser.add_argument("--model", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--each", type=int)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="add everything measured to this file")
    args = parser.parse_args()
    defaults = {"rows": 32, "each": 128, "workers": 32} if args.idle else {}
    for name, value in {"rows": 128, "each": 32, "workers": 1, **defaults}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    torch.set_num_threads(1)
    measure = measure_idle if args.idle else measure_ratio
    sizes = {name: getattr(args, name) for name in ("rows", "each", "workers", "pairs")}
    found = {**sizes, **measure(args), "machine": machine()}
    print(f"machine {found['machine']}")
    if args.json:
        known = json.loads(args.json.read_text()) if args.json.exists() else {}
        known[f"{'idle' if args.idle else 'turns'}, {args.model}"] = found
        args.json.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
