"""K/V of a completion that stopped and goes on: they are taken where they are kept, and computed
anew where they were dropped.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from llamarl.inference.engine import Engine
from llamarl.inference.requests import Partial
from llamarl.inference.sampler import SamplingParams
from tests.decoding import (
    MAX_LEN,
    TOLERANCE,
    drain,
    full_forward_logprobs,
    random_decoder,
)

PROMPT = [1, 5, 9]
CONTEXT = [3, 11, 4]
EVERY = tuple(range(31))
# A turn ends with whatever token comes third at the least.
TURN = SamplingParams(30, stop_token_ids=EVERY, min_new_tokens=0)


def engine(kept_tokens, **options):
    return Engine(
        random_decoder(), max_slots=8, max_len=MAX_LEN, kept_tokens=kept_tokens, **options
    )


def behind(completion, context, params, stream=0):
    """What goes on with a completion behind a context."""
    size = len(context)
    versions = completion.policy_versions
    return Partial(
        stream=stream,
        ticket=completion.ticket,
        sample_index=completion.sample_index,
        prompt_ids=completion.prompt_ids,
        token_ids=torch.cat([completion.token_ids, torch.tensor(context)]),
        generator_logprobs=torch.cat([completion.generator_logprobs, torch.zeros(size)]),
        policy_versions=torch.cat([versions, versions[-1].expand(size)]),
        params=params,
        loss_mask=torch.cat([completion.loss_mask, torch.zeros(size, dtype=torch.bool)]),
    )


def first_turns(made, count=3):
    made.submit(7, PROMPT, dataclasses.replace(TURN, n=count))
    return drain(made)


def go_on(made, finished, context=CONTEXT):
    for completion in finished.values():
        most = completion.token_ids.numel() + len(context) + 8
        made.submit_partial(behind(completion, context, SamplingParams(most)))
    return drain(made)


def computed_tokens(made, monkeypatch):
    """A list to which each pass of a prompt adds how many tokens it computes."""
    counted = []
    prefill = made._runner.prefill

    def call(first_slot, prompts, *given, **named):
        counted.append(sum(ids.numel() for ids in prompts))
        return prefill(first_slot, prompts, *given, **named)

    monkeypatch.setattr(made._runner, "prefill", call)
    return counted


def test_a_turn_behind_kept_rows_is_as_one_forward_says_and_computes_only_what_is_new(
    way, monkeypatch
):
    made = engine(kept_tokens=100)
    finished = first_turns(made)
    assert made._kept.places == 3 * (len(PROMPT) - 1), "the turn's token was not read"
    counted = computed_tokens(made, monkeypatch)
    found = go_on(made, finished)
    assert counted == [3 * (2 + len(CONTEXT))]
    assert made._kept.places == 0
    for key, completion in found.items():
        assert completion.loss_mask.tolist() == [True, False, False, False] + [True] * 8
        assert completion.token_ids[0] == finished[key].token_ids[0]
        wanted = full_forward_logprobs(made.decoder, completion)
        mask = completion.loss_mask
        torch.testing.assert_close(
            completion.generator_logprobs[mask], wanted[mask], atol=TOLERANCE, rtol=0
        )


def test_rows_that_were_dropped_are_computed_anew_and_sample_the_same(way):
    kept = engine(kept_tokens=100)
    found = go_on(kept, first_turns(kept))
    none = engine(kept_tokens=0)
    anew = go_on(none, first_turns(none))
    some = engine(kept_tokens=2 * (len(PROMPT) - 1))
    turns = first_turns(some)
    assert [key[2] for key in some._kept._rows] == [1, 2], "the oldest was dropped"
    mixed = go_on(some, turns)
    for others in (anew, mixed):
        for key, completion in found.items():
            assert torch.equal(completion.token_ids, others[key].token_ids)
            torch.testing.assert_close(
                completion.generator_logprobs,
                others[key].generator_logprobs,
                atol=TOLERANCE,
                rtol=0,
            )


def test_a_row_that_ended_before_its_chunk_did_keeps_what_it_had_read(way):
    """Ended rows go on computing until they are taken out, and must not spoil what is kept."""
    stops = SamplingParams(20, stop_token_ids=tuple(range(0, 31, 4)), n=6, seed=3)

    def played(chunk):
        made = engine(kept_tokens=1000)
        made.submit(7, PROMPT, stops)
        finished = drain(made, chunk)
        found = go_on(made, {k: c for k, c in finished.items() if c.finish_reason == "stop"})
        return made, found

    made, found = played(chunk=12)
    _, others = played(chunk=1)
    assert len({c.loss_mask.long().argmin().item() for c in found.values()}) > 2
    for key, completion in found.items():
        assert torch.equal(completion.token_ids, others[key].token_ids)
        mask = completion.loss_mask
        wanted = full_forward_logprobs(made.decoder, completion)
        torch.testing.assert_close(
            completion.generator_logprobs[mask], wanted[mask], atol=TOLERANCE, rtol=0
        )


def test_a_turn_behind_a_restart_reads_what_follows_it_alone(way):
    made = engine(kept_tokens=100)
    finished = first_turns(made, count=1)
    (completion,) = finished.values()
    partial = behind(completion, CONTEXT, SamplingParams(20))
    restarts = torch.tensor([False, True, False, False])
    made.release(0, 7, 0)
    made.submit_partial(dataclasses.replace(partial, restarts=restarts))
    made.step(4)
    # Also in another engine, in the middle of the turn.
    (moved,) = made.export_partials()
    other = engine(kept_tokens=100)
    other.submit_partial(moved)
    found = [*drain(made).values(), *drain(other).values()]
    assert torch.equal(found[0].token_ids, found[1].token_ids)
    for one in found:
        assert one.token_ids.numel() == 20 and one.restarts.nonzero().tolist() == [[1]]
        alone = dataclasses.replace(
            one,
            prompt_ids=one.token_ids[1:4],
            token_ids=one.token_ids[4:],
            generator_logprobs=one.generator_logprobs[4:],
            policy_versions=one.policy_versions[4:],
            loss_mask=one.loss_mask[4:],
            restarts=one.restarts[4:],
        )
        torch.testing.assert_close(
            alone.generator_logprobs,
            full_forward_logprobs(made.decoder, alone),
            atol=TOLERANCE,
            rtol=0,
        )


def test_new_weights_that_recompute_drop_what_is_kept(way):
    made = engine(kept_tokens=100)
    finished = first_turns(made)
    made.weights_changed(1)
    assert made._kept.places
    made.weights_changed(2, recompute_kv=True)
    assert not made._kept.places
    for completion in go_on(made, finished).values():
        assert completion.policy_versions.tolist() == [0, 0, 0, 0] + [2] * 8


def test_a_context_longer_than_a_piece_is_prefilled_in_pieces_from_the_first_token(way):
    made = engine(kept_tokens=100, prefill_chunk=4)
    finished = first_turns(made, count=1)
    long = [3, 11, 4, 8, 9, 10]
    for completion in finished.values():
        made.submit_partial(behind(completion, long, SamplingParams(12)))
    (completion,) = drain(made).values()
    wanted = full_forward_logprobs(made.decoder, completion)
    mask = completion.loss_mask
    torch.testing.assert_close(
        completion.generator_logprobs[mask], wanted[mask], atol=TOLERANCE, rtol=0
    )


def test_what_is_aborted_or_released_keeps_nothing():
    made = engine(kept_tokens=100)
    first_turns(made)
    made.release(0, 7, 1)
    assert [key[2] for key in made._kept._rows] == [0, 2]
    made.abort(7)
    assert not made._kept.places


def test_a_stop_string_of_the_context_or_of_an_earlier_turn_ends_no_later_turn():
    def decode(ids):
        return "".join(chr(97 + i) for i in ids)

    made = engine(kept_tokens=100, decode=decode)
    # Whatever is sampled first is a stop string, and so is the context.
    stops = tuple(decode([i]) for i in range(31))
    made.submit(7, PROMPT, SamplingParams(30, stop_strings=stops))
    (completion,) = drain(made).values()
    assert completion.finish_reason == "stop" and completion.token_ids.numel() == 1
    said = decode(completion.token_ids.tolist())
    params = SamplingParams(12, stop_strings=(said + decode(CONTEXT), decode(CONTEXT)))
    made.submit_partial(behind(completion, CONTEXT, params))
    (found,) = drain(made).values()
    assert found.token_ids.numel() == 12 and found.finish_reason == "length"


@pytest.mark.parametrize("is_sampled", [True, False])
def test_a_stop_token_ends_a_turn_only_where_it_was_sampled(is_sampled):
    made = engine(kept_tokens=0)
    partial = Partial(
        stream=0,
        ticket=7,
        sample_index=0,
        prompt_ids=torch.tensor(PROMPT),
        token_ids=torch.tensor([4, 2]),
        generator_logprobs=torch.zeros(2),
        policy_versions=torch.zeros(2, dtype=torch.int64),
        params=SamplingParams(5, stop_token_ids=(2,)),
        loss_mask=torch.tensor([True, is_sampled]),
    )
    if is_sampled:
        with pytest.raises(ValueError, match="cannot go on"):
            made.submit_partial(partial)
    else:
        made.submit_partial(partial)
        (found,) = drain(made).values()
        assert found.token_ids.numel() > 2
