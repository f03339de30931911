"""A helper does every job once, and gradients with its help are those without it, to the bit."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from llamarl.errors import TimedOut
from llamarl.models.fused import helped_by
from llamarl.models.masters import Masters
from llamarl.native import helper as helpers
from llamarl.native.helper import Helper
from tests.helping import LastFirst
from tests.updating import VERSION, decoder_of, go_on, groups_of, update_of

NUM_JOBS = 200
PROJECTIONS = 2 * 7  # layers, and what each has


def test_every_job_is_done_once_by_one_of_the_two():
    done = {}  # who did each

    def note_down(number):
        assert number not in done
        done[number] = threading.current_thread()

    with Helper() as helper:
        for number in range(NUM_JOBS):
            helper.give(partial(note_down, number))
        helper.finish()
        assert sorted(done) == list(range(NUM_JOBS))
        owners = sum(thread is threading.current_thread() for thread in done.values())
        assert helper.num_done == NUM_JOBS - owners


def test_the_thread_does_jobs_while_its_owner_does_something_else():
    is_done = threading.Event()
    with Helper() as helper:
        helper.give(is_done.set)
        assert is_done.wait(60), "nobody has called finish"
        helper.finish()
        assert helper.num_done == 1


def test_what_a_job_raises_in_the_thread_is_raised_in_finish_and_once():
    has_begun = threading.Event()

    def fail() -> None:
        has_begun.set()
        raise ValueError("of a job")

    with Helper() as helper:
        helper.give(fail)
        assert has_begun.wait(60)
        with pytest.raises(ValueError, match="of a job"):
            helper.finish()
        helper.finish()


def test_a_job_that_never_ends_ends_in_words(monkeypatch):
    monkeypatch.setattr(helpers, "LONGEST_S", 0.01)
    has_begun = threading.Event()
    may_end = threading.Event()

    def hang() -> None:
        has_begun.set()
        may_end.wait(60)

    with Helper() as helper:
        helper.give(hang)
        assert has_begun.wait(60)
        with pytest.raises(TimedOut, match=r"one job for 0.01 s.*placement.adapt=false"):
            helper.finish()
        may_end.set()


def test_a_pass_that_fails_leaves_no_job_to_the_next():
    done = []
    with Helper() as helper:
        with pytest.raises(ValueError, match="of the pass"), helped_by(helper):
            raise ValueError("of the pass")
        helper.give(lambda: done.append("left by a pass"))
        helper.drop()
        done.clear()
        helper.finish()
    assert not done


def trained(helper, compute_dtype, *, checkpointing=False) -> list[torch.Tensor]:
    """Return the weights behind two updates, of several microbatches each."""
    decoder = decoder_of()
    decoder.activation_checkpointing = checkpointing
    if compute_dtype != torch.float32:
        decoder.masters = Masters(decoder, decoder.layers, compute_dtype)
    update = update_of(decoder, microbatch_tokens=20)
    update.helper = helper
    for version in (VERSION, VERSION + 1):
        update.run(groups_of(), version, go_on)
    return [parameter.detach() for parameter in decoder.parameters()]


@pytest.mark.bitwise("a helper changes no bit")
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_same_bits_whoever_computes_their_gradients(compute_dtype):
    alone = trained(None, compute_dtype)
    owner = LastFirst()
    with Helper() as helper:
        for helping in (owner, helper):
            pairs = zip(alone, trained(helping, compute_dtype), strict=True)
            assert all(torch.equal(without, with_help) for without, with_help in pairs)
    num_microbatches, left = divmod(owner.num_done, PROJECTIONS)
    assert num_microbatches > 2 and not left, "every weight's gradient, of every microbatch"


@pytest.mark.bitwise("a helper changes no bit")
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_same_bits_where_activations_are_computed_again(compute_dtype):
    alone = trained(None, compute_dtype, checkpointing=True)
    pairs = zip(alone, trained(LastFirst(), compute_dtype, checkpointing=True), strict=True)
    assert all(torch.equal(without, with_help) for without, with_help in pairs)
