"""Groups that are not whole, packed for a checkpoint and taken out again."""

import dataclasses
import json

import torch
from safetensors.torch import load, save

from llamarl.inference.partials import of_other_prompts, pack, unpack
from llamarl.inference.requests import Partial
from llamarl.inference.sampler import SamplingParams
from llamarl.types import Completion, Ending, Prompt

PROMPT = torch.tensor([1, 5])


def of(cls, ticket, index, tokens, versions, last):
    tokens = torch.tensor(tokens, dtype=torch.int64)
    versions = torch.tensor(versions, dtype=torch.int64)
    given = (ticket, index, PROMPT, tokens, -0.5 * tokens, versions)
    return Partial(0, *given, last) if cls is Partial else Completion(*given, last)


def taken_out(state, newest):
    return list(unpack(state, newest, stream=0, params_of=lambda ticket: SamplingParams(9)))


def reason_of(sample):
    """None: it has not ended."""
    return None if isinstance(sample, Partial) else sample.finish_reason


def stored(state):
    """As a checkpoint keeps it: safetensors and JSON."""
    tensors = {k: v.contiguous() for k, v in state.items() if isinstance(v, torch.Tensor)}
    values = {k: v for k, v in state.items() if k not in tensors}
    return json.loads(json.dumps(values)) | load(save(tensors))


SAMPLES = [
    of(Partial, 7, 0, [9, 8], [3, 4], SamplingParams(9)),
    of(Partial, 9, 1, [], [], SamplingParams(9)),
    of(Completion, 7, 1, [4, 2], [3, 3], "stop"),
    of(Completion, 9, 0, [4, 5, 6], [4, 4, 5], "length"),
]


def test_masks_and_endings_are_kept_and_cut_as_tokens_are():
    mask = torch.tensor([False, True])
    ending = Ending(reason="turns", num_turns=2, reward=0.5, error="", turn_rewards=(0.25, 0.25))
    begun = dataclasses.replace(SAMPLES[0], loss_mask=mask, restarts=~mask)
    ended = dataclasses.replace(SAMPLES[2], loss_mask=mask, restarts=~mask, ending=ending)
    for newest, count in ((5, 2), (3, 1)):
        first, second = taken_out(stored(pack([begun, ended])), newest)
        assert first.loss_mask.tolist() == mask.tolist()[:count]
        assert first.restarts.tolist() == (~mask).tolist()[:count]
        assert second.ending == ending and second.loss_mask.tolist() == mask.tolist()


def test_what_is_taken_out_is_what_was_put_in():
    state = pack(SAMPLES)
    assert state["in_work"] == [7, 9]
    found = taken_out(stored(state), newest=5)
    by_name = [(s.ticket, s.sample_index, reason_of(s)) for s in found]
    assert by_name == [(7, 0, None), (9, 1, None), (7, 1, "stop"), (9, 0, "length")]
    for sample, want in zip(found, SAMPLES):
        assert type(sample) is type(want)
        if isinstance(want, Partial):
            assert (sample.stream, sample.params) == (want.stream, want.params)
        for field in ("prompt_ids", "token_ids", "generator_logprobs", "policy_versions"):
            assert torch.equal(getattr(sample, field), getattr(want, field)), field
    assert pack([]) == {"in_work": []} and taken_out(pack([]), newest=0) == []


def test_tickets_that_ask_another_prompt_now_are_told():
    asked = {7: Prompt(PROMPT, "", {}), 9: Prompt(torch.tensor([1, 6]), "", {})}
    assert of_other_prompts(stored(pack(SAMPLES)), asked) == {9}
    assert of_other_prompts(stored(pack(SAMPLES)), {**asked, 9: asked[7]}) == set()
    assert of_other_prompts(pack([]), {}) == set()


def test_tokens_of_versions_that_the_checkpoint_does_not_have_are_cut_off_and_the_rest_goes_on():
    found = taken_out(stored(pack(SAMPLES)), newest=3)
    assert [s.token_ids.tolist() for s in found] == [[9], [], [4, 2], []]
    assert [reason_of(s) for s in found] == [None, None, "stop", None]
    assert [s.policy_versions.tolist() for s in found] == [[3], [], [3, 3], []]
