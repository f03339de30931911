"""A generator with the tiny model and fakes on both sides."""

from __future__ import annotations

import json
from functools import partial

import torch
from safetensors.torch import load, save

from executors.generator import Generator
from llamarl.ddma.receiver import Staged
from llamarl.executor import ExecutorGroup
from llamarl.inference import SamplingParams
from llamarl.inference.build import build_native
from llamarl.models.config import tiny_directory
from llamarl.models.parity import FULL, Canary, ParityLimits, Sequence
from llamarl.types import Completion, EvalCompletion, Policy, Prompt
from tests.executors.fakes import FakeMail, FakeTickets, FakeWeights, Outbox, Totals

PROMPT = Prompt(torch.tensor([1, 5, 6, 14, 7, 8, 18]), "12+34=", {"answer": "46"})
GROUP, EVALS = 2, 3
TOLERANCE = 0.01
IN_ONE_TOKEN = TOLERANCE * FULL**0.5  # a difference that makes that root mean square
ONE = ExecutorGroup("generator", (0,), 0, torch.device("cpu"))


def generator(
    synchronous=False,
    in_flight=True,
    new_tokens=6,
    least=None,
    temperature=1.0,
    chunk=2,
    group=ONE,
    control=None,
    cache_tokens=None,
    prefill_chunk=512,
    outputs=(),
    **options,
):
    """outputs: further ends, as `attach` takes them."""
    least = new_tokens if least is None else least
    params = SamplingParams(
        new_tokens, min_new_tokens=least, temperature=temperature, n=GROUP, stop_token_ids=(2,)
    )
    build_engine = partial(
        build_native,
        model_path=str(tiny_directory()),
        model_dtype="float32",
        max_slots=8,
        max_len=32,
        cache_tokens=cache_tokens,
        prefill_chunk=prefill_chunk,
    )
    made = Generator(
        build_engine=build_engine,
        prompts=[PROMPT] * 100,
        eval_prompts=dict.fromkeys(range(EVALS), PROMPT),
        sampling=params,
        chunk_tokens=chunk,
        in_flight_updates=in_flight,
        parity=ParityLimits.of(fixed=TOLERANCE),
        tensor_parallel=group.tensor_parallel,
        **options,
    )
    made.attach(
        group,
        [(Policy, FakeWeights(in_order=group.tensor_parallel > 1))],
        [(Completion, Outbox()), (EvalCompletion, Outbox()), *outputs],
        control or FakeMail({}, group.rank),
        Totals(),
        FakeTickets(synchronous),
    )
    made.setup()
    return made


def canary_of(difference: float) -> dict:
    """What a trainer would say of the prompt's second half, but for `difference` in one logprob."""
    source = generator()
    source.weights.staged = Staged(0)
    source.step()
    ids = PROMPT.prompt_ids.tolist()
    logprobs = source.engine.score(ids[:3], ids[3:]).tolist()
    return Canary([Sequence(ids, 3)], [*logprobs[:-1], logprobs[-1] + difference], [], []).to_json()


def stored(state):
    """As a checkpoint keeps it: safetensors and JSON."""
    tensors = {k: v.contiguous() for k, v in state.items() if isinstance(v, torch.Tensor)}
    return json.loads(json.dumps({k: v for k, v in state.items() if k not in tensors})) | load(
        save(tensors)
    )
