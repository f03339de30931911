"""The first call of a reward worker, which may load what the function needs; async functions."""

import os
from contextlib import ExitStack

import pytest

from llamarl.errors import RewardError
from llamarl.scoring.pool import Call, Patience, RewardPool, TextItem, check_reward
from llamarl.scoring.scorer import text_item
from tests.build.user_module import write_modules

USER_MODULE = '''
import asyncio, resource, time

LOAD_S = 1.5
_model = []


def load():
    """As a model is that is read in the first call."""
    if not _model:
        time.sleep(LOAD_S)
        _model.append(1.0)
    return _model[0]


def single(prompt, completion, meta):
    return load()


def batch(prompts, completions, metas):
    return [load() for _ in completions]


async def several(prompt, completion, meta):
    return load()


def hangs(prompt, completion, meta):
    if completion == "cpu limit":
        return float(resource.getrlimit(resource.RLIMIT_CPU)[0])
    while completion == "hang":
        time.sleep(1)
    return 1.0


def hangs_once(prompt, completion, meta):
    return load() if completion != "hang" else time.sleep(1000)


_both = asyncio.Barrier(2)
_loops = set()


async def meets(prompt, completion, meta):
    """Two calls that can only both come back if they are under way at the same time."""
    _loops.add(asyncio.get_running_loop())
    if completion == "meet":
        await _both.wait()
    while completion == "spin":
        pass
    while completion == "wait":
        await asyncio.sleep(1000)
    if completion == "raise":
        raise KeyError("no")
    if completion == "exit":
        raise SystemExit(3)
    if completion == "gives up":
        raise TimeoutError("the server did not answer")
    return float(len(_loops))


async def waits_for_a_file(prompt, completion, meta):
    """The second comes back once the test has seen the first."""
    from pathlib import Path

    while completion == "second" and not Path(meta["file"]).exists():
        await asyncio.sleep(0.01)
    return 1.0


async def meets_in_batch(prompts, completions, metas):
    return list(await asyncio.gather(*map(meets, prompts, completions, metas)))


class Meeting:
    async def __call__(self, prompt, completion, meta):
        return await meets(prompt, completion, meta)


meeting = Meeting()
'''


@pytest.fixture(autouse=True)
def user_directory(tmp_path, monkeypatch):
    write_modules(tmp_path, monkeypatch, mine=USER_MODULE)


def score(name, completions, **options):
    """The outcomes of completions, each of a prompt of its own."""
    samples = [(f"p{i}", text, {"answer": "1"}) for i, text in enumerate(completions)]
    with RewardPool(f"mine:{name}", **options) as pool:
        return pool.score(samples)


def test_a_function_that_loads_in_its_first_call_is_not_killed(monkeypatch):
    """Of each form, and in each of two workers: all of them load at the same time."""
    monkeypatch.setattr("llamarl.scoring.pool.ASYNC_GRACE_S", 0.0)
    kinds = {}
    with ExitStack() as stack:
        pools = {}
        for name, num_workers in (("single", 1), ("batch", 1), ("several", 1), ("single", 2)):
            pool = RewardPool(f"mine:{name}", timeout_s=1.0, num_workers=num_workers)
            pools[name, num_workers] = stack.enter_context(pool)
            for key in range(4):
                pool.submit(key, text_item(f"p{key}", "c", {"answer": "1"}))
            pool.release(range(4))
            kinds[name, num_workers] = []
        while any(pool.pending for pool in pools.values()):
            for given, pool in pools.items():
                pool.wait(0.01)
                kinds[given] += [outcome.kind for _, outcome in pool.poll()]
    assert kinds == dict.fromkeys(kinds, ["score"] * 4) and len(kinds) == 4


@pytest.mark.slow
def test_a_worker_that_comes_after_a_killed_one_is_fresh_too():
    """The second call hangs; the worker after it has to load once more, for 1.5 s."""
    outcomes = score("hangs_once", ["c", "hang", "c", "c"], timeout_s=1.0)
    assert [outcome.kind for outcome in outcomes] == ["score", "error", "score", "score"]


@pytest.mark.slow
def test_first_calls_that_never_come_back_end_the_run_and_say_what_to_do(monkeypatch):
    monkeypatch.setattr("llamarl.scoring.pool.FIRST_CALL_S", 1.0)
    what = (
        "reward.fn=mine:hangs: the first calls of 2 workers took longer than 1 s each, and nothing "
        "was ever scored; if it loads something slow, load it at the top of the module mine, or "
        "raise reward.timeout_s"
    )
    with pytest.raises(RewardError, match=what):
        score("hangs", ["hang"] * 100, timeout_s=0.5, num_workers=3)
    with pytest.raises(ValueError, match=what):  # as a run's start says it
        check_reward(
            "mine:hangs", [text_item(f"p{i}", "hang", {}) for i in range(3)], timeout_s=0.5
        )


@pytest.mark.slow
def test_one_prompt_that_hangs_first_ends_no_run(monkeypatch):
    monkeypatch.setattr("llamarl.scoring.pool.FIRST_CALL_S", 2.0)
    samples = [("bad", "hang", {})] * 3 + [("good", "c", {})]
    with RewardPool("mine:hangs", timeout_s=1.0) as pool:
        outcomes = pool.score(samples)
    assert [outcome.kind for outcome in outcomes] == ["error"] * 3 + ["score"]
    said = "took longer than reward.timeout_s=1, and than the 2 s of a worker's first call"
    assert outcomes[0].reason == said


def test_once_a_first_call_has_come_back_a_hang_costs_little(monkeypatch):
    """With FIRST_CALL_S for each of them this would take hours."""
    monkeypatch.setattr("llamarl.scoring.pool.FIRST_CALL_S", 3600.0)
    outcomes = score("hangs", ["c", *["hang"] * 3, "c"], timeout_s=0.5)
    assert [outcome.kind for outcome in outcomes] == ["score", *["error"] * 3, "score"]
    assert "load it at the top of the module mine" not in outcomes[1].reason
    assert "2 times in a row; if it loads something slow" in outcomes[3].reason


def test_the_patience_for_a_first_call_follows_those_that_came_back():
    patience = Patience(timeout_s=2.0)
    assert patience.seconds == 120.0
    patience.note_return(3.0)
    patience.note_return(1.0)
    seconds = [patience.seconds]
    for number in range(3):
        patience.note_kill(Call({0: TextItem(f"p{number}", "c", "{}", "null")}))
        seconds.append(patience.seconds)
    assert seconds == [32.0, 64.0, 120.0, 120.0]  # 2 + 10 * 3, doubled up to a start's 120
    patience.note_return(0.0)
    assert patience.seconds == 32.0


def test_the_limit_on_cpu_time_leaves_a_first_call_its_patience():
    first, second = score("hangs", ["cpu limit"] * 2, timeout_s=3.0)
    cores = os.cpu_count()
    assert 120 * cores < first.value <= 120 * cores + 5
    assert 3 * cores < second.value <= 3 * cores + 5


def test_async_calls_are_under_way_at_the_same_time_in_one_worker():
    """The next call has the same loop, to which what the function keeps open is bound."""
    samples = [("p", "meet", {})] * 2
    for name in ("meets", "meets_in_batch"):
        with RewardPool(f"mine:{name}", timeout_s=60.0) as pool:
            for _ in range(2):
                assert [outcome.value for outcome in pool.score(samples)] == [1.0, 1.0]
    # An instance whose call is async.
    assert [one.value for one in score("meeting", ["meet", "a", "meet", "b"])] == [1.0] * 4


def test_an_async_outcome_is_told_before_slower_ones_of_its_batch_are(tmp_path):
    file = tmp_path / "first was seen"
    with RewardPool("mine:waits_for_a_file", timeout_s=100.0) as pool:
        for key, text in enumerate(("second", "first")):
            pool.submit(key, text_item("p", text, {"file": str(file)}))
        outcomes = []
        while not outcomes:
            assert pool.wait(60.0)
            outcomes = pool.poll()
        assert [(key, outcome.value) for key, outcome in outcomes] == [(1, 1.0)]
        assert pool.pending == 1
        file.touch()
        while pool.pending:
            assert pool.wait(60.0)
            outcomes += pool.poll()
    assert [(key, outcome.value) for key, outcome in outcomes] == [(1, 1.0), (0, 1.0)]


def test_an_async_call_that_overruns_or_raises_costs_itself_alone(monkeypatch):
    monkeypatch.setattr("llamarl.scoring.pool.FIRST_CALL_S", 0.0)
    completions = ["a", "wait", "raise", "exit", "gives up", "b"]
    outcomes = score("meets", completions, timeout_s=1.0)
    assert [outcome.kind for outcome in outcomes] == ["score", *["error"] * 4, "score"]
    assert outcomes[1].reason.startswith("took longer than reward.timeout_s=1")
    assert "KeyError: 'no'" in outcomes[2].reason and "SystemExit: 3" in outcomes[3].reason
    # A limit of the user's own is not the pool's.
    assert outcomes[4].reason.startswith("TimeoutError: the server did not answer")


@pytest.mark.slow
def test_an_async_call_that_does_not_yield_is_killed_and_costs_itself_alone(monkeypatch):
    monkeypatch.setattr("llamarl.scoring.pool.FIRST_CALL_S", 0.0)
    monkeypatch.setattr("llamarl.scoring.pool.ASYNC_GRACE_S", 0.5)
    outcomes = score("meets", ["a", "spin", "b", "c"], timeout_s=1.5)
    assert [outcome.kind for outcome in outcomes] == ["score", "error", "score", "score"]
    assert "took longer than reward.timeout_s=1.5" in outcomes[1].reason
