"""Dialogues over the tiny model and over scripts: tokens, endings, and going on elsewhere."""

from __future__ import annotations

import dataclasses
import json
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from safetensors.torch import load, save

from llamarl.environments.calls import FORMATS
from llamarl.environments.dialogues import Dialogues, Environment, row_of, runs_of
from llamarl.environments.engine import DialogueEngine
from llamarl.environments.pool import EnvironmentPool
from llamarl.environments.worker import Answer
from llamarl.inference.engine import Engine
from llamarl.inference.partials import pack, unpack
from llamarl.inference.sampler import SamplingParams
from llamarl.models.config import read_config, tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.tasks.environment import GIVEN, makes_prompts, turn_tokens
from llamarl.tasks.forms import PART_KEY, REWARD_KEY, SET_KEY
from llamarl.tasks.parts import section_of
from llamarl.types import ALONE, Completion, Group, Outcome, Prompt
from tests.decoding import full_forward_logprobs
from tests.made_tokenizers import FORGETFUL, byte_level
from tests.tolerances import of_logprobs

PATIENCE_S = 60.0
TOKENIZER = load_tokenizer(tiny_directory())
EOS = 2
DIGITS = tuple(range(4, 14))
ROW = Prompt(torch.tensor([1, 5, 14, 5, 18]), "1+1=", {"answer": "2"})
OWN = Prompt(torch.tensor([1]), "", {"game": 0})
# A digit ends a turn, so that the tiny model's turns are short.
TURNS = SamplingParams(24, stop_token_ids=DIGITS, n=3, seed=5)
TOLERANCE = of_logprobs(read_config(tiny_directory()), size=5.0)


def decode(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=True)


CHAT = False


def turn_tokens_of(name):
    return turn_tokens(f"tests.games:{name}", TOKENIZER, chat=CHAT, system_prompt=None)


def environment_of(
    name, on_answer=lambda: None, *, max_turns=8, max_turn_tokens=None, own=None, **options
):
    """options: the pool's."""
    path = f"tests.games:{name}"
    is_dialogue = makes_prompts(path)
    return Environment(
        pool=EnvironmentPool(path, on_answer=on_answer, **{"timeout_s": PATIENCE_S, **options}),
        turns=turn_tokens_of(name),
        read_calls=FORMATS["words"],
        prompt_key="prompt",
        is_own=is_dialogue if own is None else own,
        is_dialogue=is_dialogue,
        max_turns=max_turns,
        max_turn_tokens=max_turn_tokens,
    )


def dialogues_of(name, on_answer=lambda: None, *, reproducible=False, **options):
    """options: those of `environment_of`."""
    environments = {"task": environment_of(name, on_answer, **options)}
    return dialogues_with(environments, reproducible=reproducible)


def dialogues_with(environments, *, reproducible):
    return Dialogues(environments, decode=decode, seed=3, reproducible=reproducible)


class ScriptedEngine:
    """Says what a script has for each turn: a text with the end token, or without if it ends in a
    bar.
    """

    policy_version = 4

    def __init__(self, *turns):
        self.turns = turns
        self.partials = []
        self.finished = []
        self.released = []

    free_slots = 8
    num_live = 0

    @property
    def num_waiting(self):
        return len(self.partials)

    def export_partials(self):
        return self.partials

    def check(self, request):
        pass

    def submit_partial(self, partial):
        self.partials.append(partial)

    def step(self, chunk):
        for one in self.partials:
            text = self.turns[num_turns(one)]
            is_cut = text.endswith("|")
            ids = TOKENIZER.encode(text.rstrip("|"), add_special_tokens=False)
            ids += [] if is_cut else [EOS]
            size = len(ids)
            completion = Completion(
                ticket=one.ticket,
                sample_index=one.sample_index,
                prompt_ids=one.prompt_ids,
                token_ids=torch.cat([one.token_ids, torch.tensor(ids)]),
                generator_logprobs=torch.cat([one.generator_logprobs, torch.zeros(size)]),
                policy_versions=torch.cat([one.policy_versions, torch.full((size,), 4)]),
                finish_reason="length" if is_cut else "stop",
                loss_mask=torch.cat([one.loss_mask, torch.ones(size, dtype=torch.bool)]),
                restarts=torch.cat([one.restarts, torch.zeros(size, dtype=torch.bool)]),
            )
            self.finished.append((one.stream, completion))
        self.partials = []
        return 1

    def pop_finished(self):
        finished, self.finished = self.finished, []
        return finished

    def abort(self, ticket=None, *, stream=None):
        return 0

    def release(self, *key):
        self.released.append(key)

    def close(self):
        pass


def are_context(completion):
    """Whether each of its runs is context."""
    return [run.is_context for run in runs_of(completion.token_ids, completion.loss_mask)]


def num_turns(completion):
    return are_context(completion).count(False)


@contextmanager
def engines():
    """engine_of(inner, name, prompt): an engine of dialogues with an environment of this name."""
    made = []

    def engine_of(inner, name, prompt, *, reproducible=False, **options):
        engine = DialogueEngine(
            inner,
            partial(dialogues_of, name, reproducible=reproducible, **options),
            prompt_of=lambda stream, ticket: prompt,
            reproducible=reproducible,
        )
        made.append(engine)
        return engine

    yield engine_of
    for engine in made:
        engine.close()


@pytest.fixture
def engine_of():
    with engines() as make:
        yield make


def drain(engine, chunk=4, until=None, wait=None, stop_at=-1):
    """Completions by their key, once all have ended, or `until` is true, or after stop_at steps."""
    finished = []
    steps = 0
    while engine.num_live and steps != stop_at and not (until and until(engine)):
        steps += 1
        if not engine.step(chunk) and engine.num_acting:
            assert (wait or engine._dialogues.wait)(PATIENCE_S) is not False
        finished += engine.pop_finished()
    return by_key(finished)


def by_key(finished):
    return {(stream, c.ticket, c.sample_index): c for stream, c in finished}


def scripted(engine_of, *turns, name="Shop", prompt=ROW, most=64, **options):
    """The completion of a script."""
    inner = ScriptedEngine(*turns)
    engine = engine_of(inner, name, prompt, **options)
    engine.submit(7, prompt.prompt_ids, SamplingParams(most, stop_token_ids=(EOS,)))
    (completion,) = drain(engine).values()
    assert inner.released == [(0, 7, 0)]
    assert completion.columns["tokens/reencode_mismatch"] == 0
    return completion


def pieces(completion):
    """Its texts, context in brackets."""
    shown = []
    for run in runs_of(completion.token_ids, completion.loss_mask):
        text = TOKENIZER.decode(run.token_ids, skip_special_tokens=False)
        shown.append(f"[{text}]" if run.is_context else text)
    return "".join(shown)


# --- Endings ---

TWO = ("add 1 2?", "add 3 4?")


@pytest.mark.parametrize(
    "turns, options, reason, finish, shown, reward",
    [
        (("add 1 2?", "3"), {}, "completed", "stop", "add 1 2?<eos>[3]3<eos>", 1.0),
        (("leave?",), {}, "tool_stopped", "stop", "leave?<eos>", 0.0),
        (TWO, {"max_turns": 2}, "turns", "length", "add 1 2?<eos>[3]add 3 4?<eos>", 2.0),
        (("add 1 2|",), {}, "tokens", "length", "add 1 2", 0.0),
        (("add 1 2?", "3"), {"most": 10}, "context", "length", "add 1 2?<eos>", 1.0),
    ],
)
def test_why_a_dialogue_ended(engine_of, turns, options, reason, finish, shown, reward):
    completion = scripted(engine_of, *turns, **options)
    ending = completion.ending
    assert (ending.reason, completion.finish_reason, ending.reward) == (reason, finish, reward)
    assert pieces(completion) == shown and not ending.error
    assert ending.num_turns == len([t for t in turns if t in shown or t.rstrip("|") in shown])


def test_a_dialogue_that_hangs_says_so(engine_of):
    completion = scripted(engine_of, "add 1 2?", "hang?", timeout_s=1.0)
    assert completion.ending.reason == "timeout" and completion.ending.error
    assert pieces(completion) == "add 1 2?<eos>[3]hang?<eos>"


def test_a_call_that_cannot_be_read_ends_a_dialogue(engine_of, monkeypatch):
    monkeypatch.setitem(FORMATS, "words", FORMATS["json"])
    monkeypatch.setitem(globals(), "decode", lambda ids: "<tool_call>{</tool_call>")
    completion = scripted(engine_of, "x")
    assert completion.ending.reason == "parse_error" and completion.finish_reason == "stop"
    assert completion.ending.reward == 0.0 and not completion.ending.error


def test_an_environment_without_a_reward_gives_none(engine_of):
    completion = scripted(engine_of, "look?", "a", name="Unrewarded", own=False)
    assert completion.ending.reward is None and not completion.ending.error


def test_what_reset_says_follows_the_prompt_as_context(engine_of):
    more = dataclasses.replace(ROW, meta={"more": "2+2="})
    completion = scripted(engine_of, "4", prompt=more)
    assert pieces(completion) == "[2+2=]4<eos>"
    assert completion.policy_versions.tolist() == [4] * 6


def test_a_beginning_without_room_fails_itself_and_not_its_group(engine_of):
    """Two games of one engine: the one that begins with 100 tokens has no room."""
    prompts = [Prompt(OWN.prompt_ids, "", {"game": number}) for number in range(8)]
    engine = engine_of(ScriptedEngine("1", "2", "3"), "Talkative", OWN)
    engine._prompt_of = lambda stream, ticket: prompts[ticket]
    for ticket, prompt in enumerate(prompts):
        engine.submit(ticket, prompt.prompt_ids, SamplingParams(30, stop_token_ids=(EOS,)))
    found = drain(engine).values()
    assert {completion.ending.reason for completion in found} == {"completed", "context"}
    for crowded in (completion for completion in found if completion.ending.reason == "context"):
        assert "100 tokens" in crowded.ending.error
        # A token for its version.
        assert crowded.loss_mask.tolist() == [False] and crowded.policy_versions.tolist() == [4]


def test_the_rewards_of_turns_add_up(engine_of):
    completion = scripted(engine_of, "a", "b", "c", name="Echo", prompt=OWN)
    assert pieces(completion) == "[12+]a<eos>[2=]b<eos>[4=]c<eos>"
    assert completion.ending.reward == 0.75 and completion.ending.reason == "completed"
    assert completion.ending.turn_rewards == (0.25, 0.25, 0.25)
    several = scripted(engine_of, "a", "b", name="Endless", prompt=OWN, max_turns=2)
    assert several.ending.reward == 1.0 and several.ending.reason == "turns"


def test_an_environment_that_says_nothing_does_not_join_turns(engine_of):
    engine = engine_of(tiny(), "Silent", OWN)
    engine.submit(7, OWN.prompt_ids, TURNS)
    found = drain(engine)
    assert len(found) == 3
    for completion in found.values():
        assert are_context(completion) == [True, False] * 3
        outcome = Outcome("score", 1.0, "", turn_rewards=completion.ending.turn_rewards)
        rewards = Group.of([(completion, outcome)]).turn_rewards
        runs = list(runs_of(completion.token_ids, completion.loss_mask))
        second_ends = sum(len(run.token_ids) for run in runs[:4]) - 1
        assert rewards.nonzero().tolist() == [[second_ends]]


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_group_whose_dialogues_begin_with_different_words_is_an_error(engine_of, reproducible):
    engine = engine_of(tiny(), "OwnDice", OWN, reproducible=reproducible, own=True)
    for ticket in (7, 8):
        engine.submit(ticket, OWN.prompt_ids, TURNS)
    found = drain(engine)
    assert len(found) == 6 and not engine._dialogues._groups
    lost = [one for one in found.values() if one.ending.reason == "lost"]
    # The first of a group may have ended before another of it begins.
    assert len(lost) == 6 if reproducible else len(lost) >= 4
    for completion in lost:
        for part in ("tests.games:OwnDice", "begin with different words", "argument seed of reset"):
            assert part in completion.ending.error


def test_an_abort_ends_once_whatever_no_engine_samples():
    """A turn that waits for an engine is ended here; one that is sampled, by its engine."""
    dialogues = dialogues_of("Echo")
    dialogues.start()

    def begin(sample_index):
        dialogues.begin((0, 7, sample_index), OWN, TURNS)
        while dialogues.num_opening:
            dialogues.wait(PATIENCE_S)
            dialogues.take_answers()

    try:
        begin(0)
        assert [move.key for move in dialogues.pop_moves()] == [(0, 7, 0)]
        begin(1)
        dialogues.abort(7)
        (over,) = dialogues.pop_over()
        assert over.key == (0, 7, 1) and over.completion.finish_reason == "aborted"
        assert dialogues.num_open == 1
        assert dialogues.pop_moves() == []
        dialogues.abort(7)
        assert dialogues.pop_over() == []
    finally:
        dialogues.close()


# --- Templates that rewrite history ---

CHATTY = byte_level(FORGETFUL)
THOUGHT = "<think>so</think>"


def chatty(monkeypatch, engine_of, *turns, restored=None):
    """An engine of a script, with a template that leaves thoughts of earlier turns out."""
    end = CHATTY.convert_tokens_to_ids("<|im_end|>")
    monkeypatch.setitem(globals(), "TOKENIZER", CHATTY)
    monkeypatch.setitem(globals(), "EOS", end)
    monkeypatch.setitem(globals(), "CHAT", True)
    first = torch.tensor(turn_tokens_of("Echo").first())
    prompt = Prompt(first, "", {"game": 0})
    engine = engine_of(ScriptedEngine(*turns), "Echo", prompt)
    params = SamplingParams(400, stop_token_ids=(end,))
    if restored is None:
        engine.submit(7, prompt.prompt_ids, params)
    else:
        engine.submit_partial(dataclasses.replace(restored, params=params))
    return engine


def test_a_template_that_rewrites_history_has_the_dialogue_read_anew(monkeypatch, engine_of):
    said = [f"{THOUGHT}{letter}" for letter in "abc"]
    (completion,) = drain(chatty(monkeypatch, engine_of, *said)).values()
    assert completion.ending.reason == "completed" and not completion.ending.error
    (begin,) = completion.restarts.nonzero().flatten().tolist()
    read = CHATTY.decode(completion.token_ids[begin:].tolist())
    messages = [
        {"role": "user", "content": "12+"},
        {"role": "assistant", "content": said[0]},
        {"role": "user", "content": f"{len(said[0]) + 1}="},
        {"role": "assistant", "content": said[1]},
        {"role": "user", "content": f"{2 * len(said[0]) + 2}="},
    ]
    whole = CHATTY.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert "a<|im_end|>" in whole and f"{THOUGHT}a" not in whole
    assert read == f"{whole}{said[2]}<|im_end|>"
    before = CHATTY.decode([*completion.prompt_ids, *completion.token_ids[:begin]])
    head = CHATTY.apply_chat_template(messages[:3], add_generation_prompt=True, tokenize=False)
    assert before == f"{head}{said[1]}<|im_end|>"
    # What was sampled is in the mask, once, as it was sampled.
    sampled = CHATTY.decode(completion.token_ids[completion.loss_mask].tolist())
    assert sampled == "".join(f"{turn}<|im_end|>" for turn in said)


def test_a_rewritten_dialogue_goes_on_elsewhere(monkeypatch, engine_of):
    said = [f"{THOUGHT}{letter}" for letter in "abc"]
    (wanted,) = drain(chatty(monkeypatch, engine_of, *said)).values()
    assert wanted.restarts.any()
    for count in range(1, 4):
        first = chatty(monkeypatch, engine_of, *said)

        def has_had(engine, count=count):
            return any(num_turns(c) == count for c in engine._paused.values())

        drain(first, until=has_had)
        (partial_,) = first.export_partials()
        second = chatty(monkeypatch, engine_of, *said, restored=partial_)
        (found,) = drain(second).values()
        assert torch.equal(found.token_ids, wanted.token_ids)
        assert torch.equal(found.restarts, wanted.restarts)
        assert found.ending == wanted.ending


# --- The tiny model ---


def tiny(**options):
    return Engine.from_hf(
        tiny_directory(), dtype="float32", max_slots=8, max_len=64, device="cpu", **options
    )


def test_what_the_model_saw_is_what_the_completion_says(engine_of):
    inner = tiny(kept_tokens=1000)
    engine = engine_of(inner, "Echo", OWN)
    engine.submit(7, OWN.prompt_ids, TURNS)
    found = drain(engine)
    assert len(found) == 3
    for completion in found.values():
        assert are_context(completion) == [True, False] * 3
        heard = 0
        runs = list(runs_of(completion.token_ids, completion.loss_mask))
        for context, turn in zip(runs[0::2], runs[1::2]):
            assert decode(context.token_ids) == (f"{heard}=" if heard else "12+")
            assert turn.token_ids[-1] in DIGITS
            heard += len(decode(turn.token_ids)) + 1
        mask = completion.loss_mask
        wanted = full_forward_logprobs(inner.decoder, completion)
        torch.testing.assert_close(
            completion.generator_logprobs[mask], wanted[mask], atol=TOLERANCE, rtol=0
        )
        assert not completion.generator_logprobs[~mask].any()
        told = {"dialogues/completed": 1, "dialogues/turns": 3, "tokens/reencode_mismatch": 0}
        assert completion.columns == told


def tokens_of(found):
    return {key: completion.token_ids.tolist() for key, completion in found.items()}


def played(engine_of, *tickets, name="Echo", inner=None, **options):
    """An engine that has these tickets of an environment to play."""
    engine = engine_of(inner or tiny(kept_tokens=1000), name, OWN, **options)
    for ticket in tickets:
        engine.submit(ticket, OWN.prompt_ids, TURNS)
    return engine


@pytest.fixture(scope="module")
def undisturbed():
    """Completions of ticket 7 of Echo, 9 of Endless, and 8 without dialogues, each made alone."""
    with engines() as engine_of:
        found = drain(played(engine_of, 7))
        found |= drain(played(engine_of, 9, name="Endless", max_turns=2))
    alone = tiny()
    alone.submit(8, PLAIN.prompt_ids, SHORT, stream=1)
    while alone.num_live or alone.num_waiting:
        alone.step(4)
    found |= by_key(alone.pop_finished())
    assert len(found) == 9
    return found


def of_ticket(found, ticket):
    return {key: completion for key, completion in found.items() if key[1] == ticket}


def test_tokens_do_not_depend_on_what_is_kept_on_chunks_or_on_who_is_fast(engine_of, undisturbed):
    engine = played(engine_of, 7, inner=tiny(kept_tokens=0), reproducible=True)
    assert tokens_of(drain(engine, chunk=1)) == tokens_of(of_ticket(undisturbed, 7))


def stored(state):
    """As a checkpoint keeps it: safetensors and JSON."""
    tensors = {k: v.contiguous() for k, v in state.items() if isinstance(v, torch.Tensor)}
    rest = json.loads(json.dumps({k: v for k, v in state.items() if k not in tensors}))
    return rest | load(save(tensors))


@pytest.mark.parametrize("stop_at", [2, 9, 16])
def test_a_dialogue_goes_on_elsewhere_from_any_of_its_tokens(engine_of, undisturbed, stop_at):
    first = played(engine_of, 7)
    found = drain(first, chunk=1, stop_at=stop_at)
    state = stored(pack(first.export_partials()))
    second = played(engine_of)
    second.weights_changed(0)
    for partial_ in unpack(state, 0, stream=0, params_of=lambda ticket: TURNS):
        second.submit_partial(partial_)
    found |= drain(second, chunk=1)
    wanted = of_ticket(undisturbed, 7)
    assert tokens_of(found) == tokens_of(wanted)
    for key, completion in found.items():
        assert completion.ending == wanted[key].ending
        assert torch.equal(completion.loss_mask, wanted[key].loss_mask)


def test_a_dialogue_whose_environment_says_something_else_when_it_is_played_again_is_lost(
    engine_of,
):
    def is_in_its_second_turn(engine):
        turns = [dialogue.num_turns for dialogue in engine._dialogues._open.values()]
        return engine._inner.num_live and any(turns)

    first = engine_of(tiny(), "Noisy", OWN)
    first.submit(7, OWN.prompt_ids, dataclasses.replace(TURNS, max_new_tokens=60, n=1))
    drain(first, chunk=1, until=is_in_its_second_turn)
    (partial_,) = first.export_partials()
    assert partial_.loss_mask.any()
    second = engine_of(tiny(), "Noisy", OWN)
    second.submit_partial(partial_)
    (found,) = drain(second).values()
    assert found.ending.reason == "lost" and "what it said before" in found.ending.error
    assert torch.equal(found.token_ids, partial_.token_ids)


def test_new_weights_may_come_at_any_turn(engine_of):
    engine = played(engine_of, 7)
    found = {}
    for version in range(1, 60):
        if not engine.num_live:
            break
        engine.weights_changed(version)
        if not engine.step(1) and engine.num_acting:
            engine._dialogues.wait(PATIENCE_S)
        found |= {c.sample_index: c for _, c in engine.pop_finished()}
    for completion in found.values():
        versions = completion.policy_versions
        assert (versions.diff() >= 0).all() and versions[-1] > versions[0]
        # Context has the version of the token before it.
        context = (~completion.loss_mask).nonzero().flatten()
        inner = context[context > 2]
        assert torch.equal(versions[inner], versions[inner - 1])


@pytest.mark.parametrize("stop_at", [0, 7, 15])
def test_a_dialogue_may_be_aborted_at_any_turn(engine_of, stop_at):
    engine = played(engine_of, 7, 8)
    done = drain(engine, chunk=1, stop_at=stop_at)
    ended = [key for key in done if key[1] == 7]
    assert engine.abort(7, stream=0) == 3 - len(ended)
    aborted = {c.sample_index: c for _, c in engine.pop_finished() if c.ticket == 7}
    assert len(aborted) == 3 - len(ended)
    for completion in aborted.values():
        assert completion.finish_reason == "aborted" and completion.ending.reason == "aborted"
    rest = drain(engine)
    assert all(c.ending.reason == "completed" for key, c in rest.items())
    assert {key[1] for key in rest} <= {8} and not engine.num_live
    assert engine._inner._kept.places == 0


PLAIN = Prompt(ROW.prompt_ids, ROW.text, {**ROW.meta, SET_KEY: "sums", REWARD_KEY: "own"})
SHORT = dataclasses.replace(TURNS, max_new_tokens=6, stop_token_ids=(EOS,))


def test_a_dialogue_that_waits_for_its_environment_holds_no_slot(engine_of):
    engine = played(engine_of)
    assert engine.free_slots == 8
    engine.submit(7, OWN.prompt_ids, TURNS)
    assert (engine.num_live, engine.free_slots) == (3, 5), "they will soon need one"

    def are_all_heard(engine):
        return not engine._inner.num_live and engine._paused and not engine._dialogues.num_opening

    drain(engine, chunk=1, until=are_all_heard)
    assert engine.num_live and engine.free_slots == 8


def of_part(name):
    """A game of a mixture's part."""
    more = {PART_KEY: name, REWARD_KEY: GIVEN}
    return dataclasses.replace(OWN, meta={**OWN.meta, **more})


def several(engine_of, *, reproducible=False):
    """An engine whose tickets 7 and 9 are played by two environments, and whose ticket 8 is not."""
    engine = played(engine_of)
    engine._dialogues.close()
    parts = {
        "task.parts.echo": environment_of("Echo"),
        "task.parts.endless": environment_of("Endless", max_turns=2),
    }
    engine._dialogues = dialogues_with(parts, reproducible=reproducible)
    engine._dialogues.start()
    engine._reproducible = reproducible
    prompts = {7: of_part("echo"), 9: of_part("endless")}
    engine._prompt_of = lambda stream, ticket: prompts.get(ticket, PLAIN)
    engine._is_played = lambda prompt: section_of(prompt).startswith("task.parts.")
    return engine


def begin_three(engine):
    engine.submit(9, OWN.prompt_ids, TURNS)
    engine.submit(8, PLAIN.prompt_ids, SHORT, stream=1)
    engine.submit(7, OWN.prompt_ids, TURNS)
    return engine


@pytest.mark.parametrize("reproducible", [False, True])
def test_each_prompt_is_played_by_the_environment_of_its_section(
    engine_of, undisturbed, reproducible
):
    engine = begin_three(several(engine_of, reproducible=reproducible))
    assert engine.num_live == 9
    found = drain(engine, wait=engine.wait)
    assert tokens_of(found) == tokens_of(undisturbed)
    reasons = {key[1]: completion.ending.reason for key, completion in found.items()}
    assert reasons == {7: "completed", 8: "completed", 9: "turns"}
    for key, completion in found.items():
        if key[1] == 8:  # it is sampled in one turn, as without dialogues
            assert completion.loss_mask.all() and completion.ending == ALONE
        assert any("dialogues/" in name for name in completion.columns) == (key[1] != 8)
    assert not engine.num_live and engine._inner._kept.places == 0


def test_dialogues_with_several_environments_go_on_elsewhere_and_may_be_aborted(
    engine_of, undisturbed
):
    first = begin_three(several(engine_of))
    done = drain(first, chunk=1, stop_at=4, wait=first.wait)
    left = first.export_partials()
    second = several(engine_of)
    for partial_ in left:
        second.submit_partial(partial_)
    found = done | drain(second, chunk=1, wait=second.wait)
    assert tokens_of(found) == tokens_of(undisturbed)
    aborted = {}
    for ticket, stream in ((9, 0), (8, 1)):
        ended = {p.sample_index for p in left if p.ticket == ticket}
        assert ended and first.abort(ticket, stream=stream) == len(ended)
        aborted |= dict.fromkeys(((stream, ticket, index) for index in ended), "aborted")
    rest = drain(first, wait=first.wait)
    assert {key: c.finish_reason for key, c in rest.items() if key[1] != 7} == aborted
    assert {key[1] for key in rest} == {7, 8, 9} and not first.num_live


class Acting:
    """A pool whose environment is at work, or has answered, as a test says."""

    name = "acting"
    pending = 1

    def begin(self, number, row, seed):
        self.number = number

    def poll(self):
        said = [{"role": "user", "content": "7"}]
        return [] if self.pending else [(self.number, Answer(messages=said))]


@pytest.mark.parametrize("reproducible", [False, True])
def test_nothing_goes_on_before_the_environments_of_all_sections_have_answered(reproducible):
    slow, fast = Acting(), Acting()
    environments = {
        "task.parts.slow": dataclasses.replace(environment_of("Echo"), pool=slow),
        "task.parts.fast": dataclasses.replace(environment_of("Echo"), pool=fast),
    }
    both_ = dialogues_with(environments, reproducible=reproducible)
    for ticket, name in enumerate(("fast", "slow")):
        both_.begin((0, ticket, 0), of_part(name), TURNS)
    fast.pending = 0
    moves, _ = both_.poll()
    assert [move.key[1] for move in moves] == ([] if reproducible else [0])
    slow.pending = 0
    fast.poll = list
    moves, _ = both_.poll()
    assert [move.key[1] for move in moves] == ([1, 0] if reproducible else [1])


def test_an_environment_gets_a_row_as_it_is_in_its_file():
    own = {"answer": "2", PART_KEY: "of the row"}
    for added in ({SET_KEY: "sums", REWARD_KEY: GIVEN}, {}):
        prompt = dataclasses.replace(ROW, meta={**own, **added})
        assert row_of(prompt, "prompt") == {**own, "prompt": "1+1="}
    prompt = dataclasses.replace(ROW, meta={"answer": "2", PART_KEY: "sums", REWARD_KEY: GIVEN})
    assert row_of(prompt, "prompt") == {"answer": "2", "prompt": "1+1="}
