"""Environments in workers: what one of them does to itself, the others do not notice."""

from __future__ import annotations

import json
import os

import pytest

from llamarl.environments import pool as pool_file
from llamarl.environments.pool import EnvironmentPool, Failure
from llamarl.environments.worker import Answer, answer_from
from llamarl.errors import RewardError
from llamarl.workers import process

PATIENCE_S = 60.0


@pytest.fixture
def pool_of():
    made = []

    def pool_of(name, **options):
        options = {"timeout_s": PATIENCE_S, **options}
        pool = EnvironmentPool(f"tests.games:{name}", **options)
        made.append(pool)
        return pool

    yield pool_of
    for pool in made:
        pool.close()


def answers(pool):
    """All answers that are under way, by key."""
    found = {}
    while pool.pending:
        assert pool.wait(PATIENCE_S)
        found |= dict(pool.poll())
    return found


def call(name, *words, **arguments):
    """A policy's turn that calls a tool, with words or with JSON."""
    given = {"name": name, "arguments": arguments or list(words)}
    called = [{"type": "function", "function": given}]
    return {"role": "assistant", "content": "", "tool_calls": called}


def said(answer):
    assert isinstance(answer, Answer), answer
    return [message["content"] for message in answer.messages]


def begin(pool, seeds="a", **row):
    """Begin a game of each seed; what they say."""
    for key, seed in enumerate(seeds):
        pool.begin(key, row, seed=seed)
    return [said(answer) for _, answer in sorted(answers(pool).items())]


def told(pool, turn, key=0):
    """What a game says to a turn."""
    pool.step(key, turn)
    return said(answers(pool)[key])


def test_a_dialogue_is_played_turn_by_turn(pool_of):
    pool = pool_of("Echo")
    assert begin(pool) == [["12+"]]
    for turn, (want, done) in enumerate([("2=", False), ("4=", False), ("6=", True)]):
        pool.step(0, {"role": "assistant", "content": "x"})
        answer = answers(pool)[0]
        assert (said(answer), answer.done, answer.reward) == ([want], done, 0.25), turn
    pool.end(0)
    assert answers(pool) == {0: Answer(done=True)}


def test_tools_answer_and_what_they_raise_is_an_answer(pool_of):
    pool = pool_of("Shop")
    assert begin(pool, prompt="1+1=", more=" now") == [[" now"]]
    there_is = "add, broken, die, hang, hoard, leave, throw"
    for turn, want in (
        (call("add", "3", "4"), "7"),
        (call("add", "3"), "{'error': \"missing a required argument: 'second'\"}"),
        (call("ad", "3", "4"), "7"),
        (call("sell"), f"{{'error': 'there is no tool sell; there is {there_is}'}}"),
        (call("broken"), "{'error': 'sold out'}"),
    ):
        assert told(pool, turn) == [want]
    pool.step(0, call("leave"))
    assert answers(pool)[0].stopped
    pool.end(0)
    assert answers(pool)[0].reward == 2.0


def test_only_words_may_cut_a_name_off(pool_of):
    pool = pool_of("Waiting")
    begin(pool)
    for name in ("as", ""):
        error = f"{{'error': 'there is no tool {name}; there is ask'}}"
        assert told(pool, call(name, number=3)) == [error]
    assert told(pool, call("as", "3")) == ["6"]


def test_what_a_tool_says_or_raises_is_its_answer_and_a_long_one_is_cut(pool_of):
    pool = pool_of("Hostile")
    begin(pool)
    for turn, want in (
        (call("name_file"), "caf?.txt"),
        (call("repeat", text="\udfff\ud800 x"), "?? x"),
        (call("fail"), "{'error': '(its message raises SystemExit)'}"),
        (call("quit"), "{'error': 'bye'}"),
    ):
        assert told(pool, turn) == [want]
        assert told(pool, call("repeat", text="on")) == ["on"]
    both = call("repeat", text="ab", times=1 << 20)
    both["tool_calls"] += call("repeat", text="c")["tool_calls"]
    assert told(pool, both) == ["ab" * (1 << 16) + "... (cut, of 2097152 characters)", "c"]


def is_there(pid):
    return os.path.exists(f"/proc/{pid}")


def test_what_a_tool_leaves_running_ends_with_its_call(pool_of):
    pool = pool_of("Server")
    own = sum(begin(pool, seeds="aa"), [])
    (left,) = told(pool, call("leave_child"))
    assert [is_there(pid) for pid in (*own, left)] == [True, True, False]
    pool.end(0)
    answers(pool)
    assert [is_there(pid) for pid in own] == [False, True]
    pool.forget(1)
    pool.begin(2, {}, seed="a")
    answers(pool)
    assert not is_there(own[1])


def test_a_pool_that_an_environment_keeps_serves_all_its_calls(pool_of):
    pool = pool_of("Pooled")
    begin(pool)
    for number in (3, 4):
        assert told(pool, call("square", number)) == [str(number**2)]


def test_other_values_are_no_answer():
    for values in (
        [],
        [[], [], False, False, "1"],
        [[{"role": "user"}], [], False, False, None],
        [["x"], [], False, False, None],
        [{}, [], False, False, None],
    ):
        assert answer_from(values) is None
    answer = Answer(messages=[{"role": "tool", "content": "1"}], reward=0.5)
    assert answer_from(answer.values) == answer


NOTHING = Answer().values


@pytest.mark.parametrize(
    "line",
    [
        json.dumps([2, ["answer", []], 0.0]),
        json.dumps([2, ["answer", None], 0.0]),
        json.dumps([2, ["error", 3], 0.0]),
        json.dumps([2, ["answer", NOTHING], "now"]),
        json.dumps([2, ["answer", NOTHING], float("inf")]),  # a deadline that never comes
        json.dumps([2, ["error", "x"], float("nan")]),
        "[" * 2000,
    ],
)
def test_a_line_that_no_worker_writes_ends_one_environment_alone(pool_of, line):
    pool = pool_of("Hostile")
    begin(pool, seeds="aa")
    pool.step(0, call("forge", line=line))
    failure = answers(pool)[0]
    assert isinstance(failure, Failure) and "what it was not asked" in failure.reason
    assert told(pool, call("repeat", text="on"), key=1) == ["on"]
    assert pool.num_replayed == 1


def throw(pool, keys):
    for key in keys:
        pool.step(key, call("throw"))
    return {key: said(answer) for key, answer in answers(pool).items()}


def test_games_of_a_seed_throw_the_same_dice_whoever_plays_beside_them(pool_of):
    alone = pool_of("make_shop")  # a function may be the factory
    begin(alone)
    first, second = throw(alone, [0])[0], throw(alone, [0])[0]
    assert first != second
    together = pool_of("Shop")
    begin(together, seeds="aab")
    thrown = throw(together, [0, 1, 2])
    assert thrown[0] == thrown[1] == first != thrown[2]
    throw(together, [2])
    assert throw(together, [0, 1]) == {0: second, 1: second}


@pytest.mark.parametrize(
    "tool, kind, reason",
    [
        ("hang", "timeout", "task.play.timeout_s"),
        ("die", "lost", "exited with code 3"),
        ("hoard", "lost", "memory"),
    ],
)
def test_what_hangs_dies_or_hoards_is_lost_alone_and_the_others_go_on(pool_of, tool, kind, reason):
    pool = pool_of("Shop", timeout_s=1.0 if tool == "hang" else PATIENCE_S, memory_mb=300)
    begin(pool, seeds="aaa")
    thrown = throw(pool, [0, 2])
    pool.step(1, call(tool))
    pool.step(2, call("throw"))
    found = answers(pool)
    failure = found[1]
    assert isinstance(failure, Failure) and failure.kind == kind and reason in failure.reason
    assert pool.num_replayed == 2
    # They are where they were: both throw what they would have thrown next.
    assert throw(pool, [0])[0] == said(found[2]) != thrown[0]
    pool.begin(1, {}, seed="a")
    assert said(answers(pool)[1]) == []


def test_an_environment_that_answers_otherwise_when_it_is_played_again_is_lost(pool_of):
    pool = pool_of("Noisy")
    pool.begin(0, {}, seed="a")
    pool.step(0, {"role": "assistant", "content": "x"})
    pool.begin(1, {}, seed="a")
    answers(pool)
    pool.step(1, {"role": "assistant", "content": "die"})
    found = answers(pool)
    assert "exited with code 3" in found[1].reason
    assert isinstance(found[0], Failure) and found[0].kind == "lost"
    assert "otherwise" in found[0].reason


def test_an_environment_that_raises_as_it_begins_fails_alone(pool_of):
    pool = pool_of("Refuses")
    pool.begin(0, {"prompt": "9"}, seed="a")
    pool.begin(1, {"prompt": "1"}, seed="a")
    found = answers(pool)
    assert isinstance(found[0], Failure) and "no nines" in found[0].reason
    assert said(found[1]) == []


def test_what_is_let_go_of_answers_no_more(pool_of):
    pool = pool_of("Shop")
    pool.begin(0, {}, seed="a")
    pool.forget(0)
    pool.begin(1, {}, seed="a")
    assert list(answers(pool)) == [1]
    pool.begin(0, {}, seed="a")
    assert list(answers(pool)) == [0]


def test_a_path_that_leads_nowhere_is_told_with_its_key(pool_of):
    with pytest.raises(ValueError, match="task.environment=tests.games:Ship: .*did you mean Shop"):
        pool_of("Ship").start()


def test_workers_that_cannot_start_end_the_run(pool_of, monkeypatch, tmp_path):
    (tmp_path / "ends_at_once.py").write_text("raise SystemExit(4)")
    monkeypatch.setattr(process, "ROOT", str(tmp_path))
    monkeypatch.setattr(pool_file, "WORKER", "ends_at_once")
    with pytest.raises(RewardError, match="exited with code 4 before its first answer"):
        pool_of("Shop").start()
