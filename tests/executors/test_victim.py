"""Victim alone, with fakes on both sides: the embedded tiny model answers."""

import itertools
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from executors import victim as victim_module
from executors.victim import FIRST_STREAM, Victim, place_of
from llamarl.inference import Engine, SamplingParams
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer, named_parameters_hf
from llamarl.types import Completion, EvalCompletion, EvalReplied, Policy, Replied
from tests.build.completion import build_completion
from tests.build.eval_completion import build_eval_completion
from tests.executors.fakes import give, seat

ANSWERS = 3  # to an attack
SIZE = 2  # attacks of a ticket
EVAL_ATTACKS = 3  # of a held-out prompt
LONGEST, NEW = 12, 5
UNREADABLE = "123"
SAMPLING = SamplingParams(max_new_tokens=NEW, stop_token_ids=(2,), n=ANSWERS, seed=7)
TOKENIZER = load_tokenizer(tiny_directory())


def build_engine(device, *, max_slots=8):
    sizes = {"max_slots": max_slots, "max_len": LONGEST + NEW}
    return Engine.from_hf(tiny_directory(), dtype="float32", device=device, **sizes)


def read(attack):
    if attack == UNREADABLE:
        raise ValueError(f"{attack} spells it")
    return TOKENIZER.encode(f"{attack}=")


def ids_of(text):
    return TOKENIZER.encode(text)[1:]  # without bos


def attack(ticket, sample, text, *, finish_reason="stop"):
    return build_completion(ticket, sample, ids_of(text), finish_reason=finish_reason)


def eval_attack(sample, text, *, version=4):
    return build_eval_completion(0, sample, ids_of(text), version=version)


def eval_attacks():
    return [eval_attack(i, f"2{i}+3") for i in range(EVAL_ATTACKS)]


@pytest.fixture
def build():
    built = []

    def build(*, reproducible=True, max_slots=8):
        victim = Victim(
            build_engine=lambda device: build_engine(device, max_slots=max_slots),
            decode=lambda ids: TOKENIZER.decode(ids, skip_special_tokens=True),
            read=read,
            sampling=SAMPLING,
            max_prompt_tokens=LONGEST,
            chunk_tokens=2,
            group_size=SIZE,
            num_eval_attacks=EVAL_ATTACKS,
            reproducible=reproducible,
        )
        built.append(seat(victim))
        return victim

    yield build
    for victim in built:
        victim.teardown()


def answered_by(victim, *attacks) -> dict[tuple, Replied | EvalReplied]:
    """What came of the attacks, by their places in the engine."""
    give(victim, *attacks)
    while victim.step():
        pass
    records = []
    for sender in victim.outputs:
        records += sender.records
        sender.records = []
    return {place_of(one.attack): one for one in records}


PLACES = list(itertools.product(range(3), range(SIZE)))  # ticket, sample
SUMS = [attack(t, i, f"{t + 3}{i}+{t}7") for t, i in PLACES]


def asked_directly(one):
    """The answers of an engine that is asked this attack and nothing else."""
    engine = build_engine("cpu")
    stream, ticket = place_of(one)
    text = TOKENIZER.decode(one.token_ids.tolist())
    engine.submit(ticket, read(text), SAMPLING, stream=stream)
    while engine.num_live or engine.num_waiting:
        engine.step(NEW)
    answers = [completion for _, completion in engine.pop_finished()]
    return sorted(answers, key=lambda answer: answer.sample_index)


@pytest.mark.parametrize("reproducible", [True, False])
def test_an_attack_comes_with_the_answers_that_its_place_decides(build, reproducible):
    found = answered_by(build(reproducible=reproducible), *SUMS)
    assert len(found) == len(SUMS)
    for one in SUMS:
        record = found[place_of(one)]
        expected = asked_directly(one)
        assert record.attack.token_ids is one.token_ids and record.outcome == "score"
        assert record.attack.columns == {"victim/tokens": record.token_ids.numel()}
        assert record.prompt_ids.tolist() == read(TOKENIZER.decode(one.token_ids.tolist()))
        assert [a.tolist() for a in record.replies] == [a.token_ids.tolist() for a in expected]
        assert record.has_ended == tuple(a.finish_reason == "stop" for a in expected)


def test_neither_order_nor_slots_change_an_answer(build):
    """In step with the trainer, bit for bit; else their tokens, on which rounding has no say
    here.
    """
    attacks = [*SUMS, *eval_attacks()]
    first = answered_by(build(), *attacks)
    for seed in range(2):
        shuffled = random.Random(seed).sample(attacks, len(attacks))
        for reproducible, max_slots in ((True, 8), (False, 2)):
            victim = build(reproducible=reproducible, max_slots=max_slots)
            found = {}
            for one in shuffled:  # one by one, with steps between: what is batched differs
                give(victim, one)
                found |= answered_by(victim)
            assert found.keys() == first.keys()
            for place, record in found.items():
                assert torch.equal(record.token_ids, first[place].token_ids)


def test_attacks_share_no_random_numbers_with_each_other_or_the_attacker():
    attacks = [attack(5, i, "1") for i in range(4)] + [eval_attack(i, "1") for i in range(4)]
    places = [place_of(one) for one in attacks]
    assert len(set(places)) == len(places)
    assert min(stream for stream, _ in places) >= FIRST_STREAM


@pytest.mark.parametrize(
    "one, outcome, reason",
    [
        (attack(0, 0, " "), "abstain", "empty"),
        (attack(0, 0, ""), "abstain", "empty"),
        (attack(0, 0, "12+3", finish_reason="aborted"), "abstain", "aborted"),
        (attack(0, 0, "1" * LONGEST), "error", "14 tokens of the victim's tokenizer"),
        (attack(0, 0, UNREADABLE), "error", "the attack cannot be read: 123 spells it"),
        (eval_attack(1, ""), "abstain", ""),  # its evaluation was given up
    ],
)
@pytest.mark.parametrize("reproducible", [True, False])
def test_an_attack_that_is_not_asked_says_why(build, one, outcome, reason, reproducible):
    other = attack(0, 1, "12+34")
    rest = [] if isinstance(one, Completion) else [attack(0, 0, "2")]
    found = answered_by(build(reproducible=reproducible), one, other, *rest)
    record = found[place_of(one)]
    assert record.outcome == outcome and reason in record.reason
    assert record.replies == () and record.prompt_ids.numel() == 0
    assert found[place_of(other)].outcome == "score"


def test_a_ticket_is_answered_together_once_it_is_whole(build):
    victim = build()
    assert answered_by(victim, SUMS[0], SUMS[3]) == {}
    assert victim.waiting_for() == "data: ticket 0 lacks 1 attacks from the generator"
    assert set(answered_by(victim, SUMS[1])) == {place_of(SUMS[0]), place_of(SUMS[1])}


def num_begun(victim):
    return len(victim.outputs.of(Replied).records) + len(victim._asked)


def test_as_many_attacks_are_begun_as_fill_the_slots(build):
    victim = build(reproducible=False, max_slots=4 * ANSWERS)
    give(victim, *SUMS)
    victim.step()
    assert num_begun(victim) == 4


def test_two_evaluations_may_be_under_way_at_once(build):
    victim = build(reproducible=False, max_slots=3)
    places = itertools.product((4, 6), range(EVAL_ATTACKS))
    both = [eval_attack(i, "12+3", version=version) for version, i in places]
    give(victim, *both)
    while victim.step():
        pass
    assert len(victim.outputs.of(EvalReplied).records) == len(both)


@pytest.mark.parametrize("reproducible", [True, False])
def test_an_evaluation_overtakes_the_attacks_that_wait(build, monkeypatch, reproducible):
    """Also where no more attacks may be taken in."""
    monkeypatch.setattr(victim_module, "MAX_PENDING", len(SUMS))
    victim = build(reproducible=reproducible, max_slots=ANSWERS * SIZE)
    give(victim, *SUMS)
    victim.step()
    assert num_begun(victim) == SIZE, "the rest waits"
    give(victim, *SUMS, *eval_attacks())
    evaluated = victim.outputs.of(EvalReplied).records
    while len(evaluated) < EVAL_ATTACKS:
        assert victim.step()
    assert len(victim.outputs.of(Replied).records) < len(SUMS)


def test_an_evaluation_is_taken_in_where_no_attack_has_room(build, monkeypatch):
    monkeypatch.setattr(victim_module, "MAX_PENDING", 1)
    victim = build()
    give(victim, *SUMS, *eval_attacks())
    victim.step()
    assert not victim.inputs.of(EvalCompletion).records
    assert len(victim.inputs.of(Completion).records) == len(SUMS) - 1


def test_without_room_it_rests(build):
    victim = build()
    victim.outputs.of(Replied).room = 0
    give(victim, *SUMS)
    assert not victim.step()
    assert victim.waiting_for().startswith("room: in channel")


def test_its_weights_stay_those_of_the_directory(build):
    victim = build()
    answered_by(victim, *SUMS)
    held = dict(named_parameters_hf(victim.engine.decoder))
    stored = load_file(Path(tiny_directory()) / "model.safetensors")
    for name, tensor in held.items():
        assert torch.equal(tensor, stored[name].float())
    assert Policy not in victim.consumes
