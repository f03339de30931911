"""Whatever a policy, a tool, an environment or a judge writes ends its own dialogue at most."""

from __future__ import annotations

import json
import re
import sys
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.environments import calls
from llamarl.environments.calls import FORMATS, Unreadable, json_calls, word_calls
from llamarl.environments.dialogues import Dialogues, Environment
from llamarl.environments.worker import Answer, answer_from
from llamarl.inference.sampler import SamplingParams
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.tasks.environment import TurnTokens
from llamarl.types import Prompt
from llamarl.words.texts import MAX_DEPTH, read_json
from llamarl.workers.guard import line_of
from tests.build.completion import build_completion
from tests.made_tokenizers import CHATML, FORGETFUL, byte_level


def fuzzed(few, many, *strategies):
    """A test of drawn values: of a few examples by default, and of so many among the slow tests."""

    def decorate(test):
        @pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.slow)])
        def run(examples):
            settings(max_examples=examples)(given(*strategies)(test))()

        return run

    return decorate


def call_of(text):
    return f"<tool_call>{text}</tool_call>"


FLOODS = [" ", "\n", " ,", "a ", "?", "\0", "[", '{"a":', "9", "\ud800", "{{ 7 * 7 }}"]
FLOODS += ["<tool_call>", "</tool_call>", call_of('{"name": "a"}')]
FLOODS += ["<|im_end|>", "<|im_start|>assistant\n"]
# Any characters, halves of surrogate pairs too.
TEXTS = st.text(st.characters(exclude_categories=()), max_size=60)
FLOODED = st.builds(str.__mul__, st.sampled_from(FLOODS), st.integers(0, 900))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
DEEP = st.builds(lambda depth: "[" * depth + "]" * depth, st.integers(0, 3000))
HUGE = st.builds(lambda digits: "9" * digits, st.sampled_from([1, 400, 5000]))
ARGUMENTS = JSON.map(json.dumps) | DEEP | HUGE
CALLS = st.builds(
    lambda name, value: call_of(f'{{"name": {json.dumps(name)}, "arguments": {{"a": {value}}}}}'),
    TEXTS,
    ARGUMENTS,
)
SAID = st.lists(TEXTS | FLOODED | CALLS | ARGUMENTS, max_size=3).map("".join)


@fuzzed(50, 4000, SAID)
def test_a_turn_is_calls_that_travel_as_json_or_cannot_be_read(text):
    for read in (json_calls, word_calls):
        try:
            found = read(text)
        except Unreadable:
            continue
        for call in found:
            assert isinstance(call["function"]["name"], str)
        assert len(json.loads(json.dumps(found))) == len(found)


WORDS = re.compile(r"\s*([A-Za-z_]\w*)?((?:[\s,]+[^\s,?]+)*)\s*\?\s*")


def words_by_expression(text):
    """A call of words as a regular expression describes it, in time that explodes."""
    found = WORDS.fullmatch(text)
    if found is None:
        return []
    return [(found.group(1) or "", re.findall(r"[^\s,]+", found.group(2)))]


@fuzzed(60, 2000, st.text("ab_1é-,? \n\x1f", max_size=8))
def test_calls_of_words_are_those_of_the_expression_that_describes_them(text):
    found = [(c["function"]["name"], c["function"]["arguments"]) for c in word_calls(text)]
    assert found == words_by_expression(text)


def operations(function, *given):
    """How many functions a call makes, Python's own and others."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function(*given)
    except Unreadable:
        pass
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("read", [json_calls, word_calls])
def test_reading_a_turn_takes_time_linear_in_its_length(read, flood):
    """No expression goes back and forth in it, and as many passes are made for each call in it."""
    assert not [name for name, value in vars(calls).items() if value is re or "re." in repr(value)]
    once, twice = operations(read, flood * 200), operations(read, flood * 400)
    assert twice <= 2 * once


@pytest.mark.parametrize("begin, middle, end", [("[", "", "]"), ('{"a":', "0", "}")])
def test_json_of_others_is_read_to_a_depth_at_which_anybody_can_walk_through_it(begin, middle, end):
    text = begin * MAX_DEPTH + middle + end * MAX_DEPTH
    assert read_json(text) == json.loads(text)
    with pytest.raises(ValueError, match="nested deeper than 64"):
        read_json(begin + text + end)


@pytest.mark.parametrize("opening", ["[", '{"a":', call_of("[")])
def test_a_call_without_end_in_brackets_is_unreadable(opening):
    with pytest.raises(Unreadable):
        json_calls("<tool_call>" + opening * 1000)


# --- Dialogues over any texts ---


class Pool:
    """Plays environments that answer from a list."""

    name = "task.environment=somebody:Game"
    pending = 0

    def __init__(self, answers):
        self.answers = answers
        self.calls = 0
        self.told = deque()

    def begin(self, key, row, seed):
        self._call(key, [row, seed])

    def step(self, key, turn):
        self._call(key, turn)

    def end(self, key):
        self.told.append((key, Answer(done=True, reward=1.0)))

    def forget(self, key):
        pass

    def poll(self):
        told, self.told = list(self.told), deque()
        return told

    def _call(self, key, what):
        json.dumps(what)  # as the pipe of a worker takes it
        text = self.answers[self.calls % len(self.answers)]
        self.calls += 1
        self.told.append((key, Answer(messages=[{"role": "user", "content": text}])))


KINDS = {
    "plain": (load_tokenizer(tiny_directory()), False),
    "chat": (byte_level(CHATML), True),
    "forgetful": (byte_level(FORGETFUL), True),
}
SAMPLED = [5, 6]


def played(kind, policy, answers, *, read="json", is_own=True, turns=None):
    """The end of a dialogue between texts, and the contexts that it had."""
    tokenizer, chat = KINDS[kind]
    turns = turns or TurnTokens(tokenizer, chat=chat, system_prompt=None)
    texts = iter(policy)
    pool = Pool(answers)
    environment = Environment(
        pool=pool,
        turns=turns,
        read_calls=FORMATS[read],
        prompt_key="prompt",
        is_own=is_own,
        is_dialogue=True,
        max_turns=len(policy),
        max_turn_tokens=None,
    )
    dialogues = Dialogues(
        {"task": environment}, decode=lambda ids: next(texts, ""), seed=0, reproducible=False
    )
    first = turns.first() if is_own else turns.prompt("a")[0]
    prompt = Prompt(torch.tensor(first), "a", {"game": 0} if is_own else {})
    key = (0, 7, 0)
    had = dialogues.begin(key, prompt, SamplingParams(1 << 20, stop_token_ids=(6,)))
    contexts = []
    while True:
        moves, over = dialogues.poll()
        if over:
            (ended,) = over
            return ended.completion.ending, contexts
        if not moves:
            continue  # it asks for its reward now
        (move,) = moves
        contexts.append(move.context)
        ids = [*had.token_ids.tolist(), *move.context, *SAMPLED]
        mask = [*had.loss_mask.tolist(), *[False] * len(move.context), True, True]
        mask = torch.tensor(mask)
        had = build_completion(7, tokens=ids, prompt=prompt.prompt_ids.tolist(), loss_mask=mask)
        dialogues.hear(key, had)


TEXTS_OF_TURNS = st.lists(SAID, min_size=1, max_size=3)


@fuzzed(
    30,
    3000,
    st.sampled_from(sorted(KINDS)),
    TEXTS_OF_TURNS,
    TEXTS_OF_TURNS,
    st.sampled_from(["json", "words"]),
    st.booleans(),
)
def test_a_dialogue_of_any_texts_ends_by_itself(kind, policy, answers, read, is_own):
    ending, contexts = played(kind, policy, answers, read=read, is_own=is_own)
    assert ending.reason in ("turns", "parse_error", "lost")
    assert all(contexts[1:])


@fuzzed(20, 1000, SAID, JSON)
def test_an_answer_that_left_its_worker_can_always_be_encoded(text, value):
    answer = Answer(messages=[{"role": "tool", "content": text, "more": value}])
    answer.cut()
    (turn,) = answer_from(read_json(line_of(answer.values))).messages
    KINDS["chat"][0].encode(turn["content"], add_special_tokens=False)
    assert len(turn["content"]) == len(text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("turn", ["first", "later"])
def test_half_a_surrogate_pair_that_comes_all_the_same_ends_its_dialogue_alone(kind, turn):
    bad = "caf\udce9.txt"
    answers = [bad] if turn == "first" else ["1", bad]
    ending, _ = played(kind, ["2", "3"], answers)
    assert ending.reason == "lost"
    assert "task.environment=somebody:Game, ticket 7" in ending.error
    assert "behind 'caf" in ending.error


@pytest.mark.parametrize("where", ["whole", "context"])
def test_a_chat_template_that_raises_anything_ends_its_dialogue_alone(where, monkeypatch):
    tokenizer, chat = KINDS["chat"]
    turns = TurnTokens(tokenizer, chat=chat, system_prompt=None)

    def fails(*given, **options):
        raise KeyError("no such role")

    monkeypatch.setattr(turns, where, fails)
    ending, _ = played("chat", ["1", "2"], ["hello there"], turns=turns)
    assert ending.reason == "lost"
    for part in ("somebody:Game", "ticket 7", "'hello there'", "KeyError: 'no such role'"):
        assert part in ending.error
