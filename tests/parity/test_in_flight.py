"""Completions that span a weight swap, sampled as by default and trained on: no parity error, since
none is due.
"""

import pytest
import torch

from llamarl.inference import Engine, SamplingParams
from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer, named_parameters_hf
from llamarl.models.parity import ParityLimits
from llamarl.types import Group, Outcome
from tests.decoding import our_decoder
from tests.engines import load
from tests.updating import update_of

TINY = tiny_directory()
TOLERANCE = 1e-3  # trainer.parity_tolerance


def finished(engine):
    """Groups by ticket; every second completion is rewarded."""
    while engine.num_live or engine.num_waiting:
        engine.step(8)
    by_ticket = {}
    for _, completion in engine.pop_finished():
        scored = (completion, Outcome.score(float(completion.sample_index % 2)))
        by_ticket.setdefault(completion.ticket, []).append(scored)
    return [Group.of(scored) for _, scored in sorted(by_ticket.items())]


@pytest.mark.parametrize("recompute_kv", [False, True])
def test_a_run_goes_on_when_completions_span_a_swap(recompute_kv):
    tokenizer = load_tokenizer(TINY)
    decoder = our_decoder(TINY, device="cpu").train()
    engine = Engine.from_hf(TINY, dtype="float32", max_slots=128, max_len=32, device="cpu")
    changes = {"lr": 5e-5, "max_grad_norm": 1.0, "temperature": 1.0, "skip_zero_advantage": True}
    changes |= {"parity": ParityLimits.of(fixed=TOLERANCE), "recomputes_kv": recompute_kv}
    update = update_of(decoder, policy_gradient, torch.optim.AdamW, **changes)

    def submit(tickets):
        params = SamplingParams(6, n=4, seed=0, stop_token_ids=(tokenizer.eos_token_id,))
        for ticket in tickets:
            engine.submit(ticket, tokenizer.encode(f"{ticket + 10}+{90 - ticket}="), params)

    submit(range(16))
    first = finished(engine)
    submit(range(16, 32))
    engine.step(1)
    engine.step(1)
    fresh = update.run(first, 0, lambda: False)
    assert fresh["parity/logprob_diff_max"] < TOLERANCE
    weights = {name: p.detach() for name, p in named_parameters_hf(decoder)}
    load(engine, weights, 1, recompute_kv=recompute_kv)
    second = finished(engine)
    assert all(set(group.policy_versions.tolist()) == {0, 1} for group in second)
    row = update.run(second, 1, lambda: False)
    judged = row["parity/logprob_diff_max"]
    assert judged < TOLERANCE if recompute_kv else judged is None
