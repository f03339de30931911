"""The reward pool: typed outcomes whatever the user's function does, hard timeouts, no orphans; the
patience with first calls; async functions; and functions over all completions of a prompt.
"""

import fcntl
import itertools
import math
import os
import random
import threading
import time
from contextlib import ExitStack
from itertools import chain

import pytest

from llamarl.errors import RewardError
from llamarl.scoring.pool import (
    BATCH,
    MOST_CALLS,
    Call,
    Patience,
    RewardPool,
    TextItem,
    check_reward,
)
from llamarl.scoring.scorer import NOT_REACHED, score_all, text_item
from llamarl.tasks.forms import batched, form_of, with_sampled
from llamarl.types import Outcome
from tests.build.user_module import write_modules

DEADLINE_S = 30.0  # for waits that must end; never reached unless something is broken

USER_MODULE = '''
import gc, io, os, resource, signal, sys, time

class _Mute(Exception):
    def __str__(self):
        raise ValueError("no words")

class _Unshown:
    __repr__ = _Mute.__str__

def score(prompt, completion, meta):
    """Does what the completion says."""
    print("noise on stdout", completion)
    what, _, argument = completion.partition(" ")
    if what == "value":
        return float(argument)
    if what == "sleep":
        time.sleep(float(argument))
        return 1.0
    if what == "hang":
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        while True:
            pass
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "os_exit":
        os._exit(3)
    if what == "sys_exit":
        sys.exit("bye")
    if what == "raise":
        raise KeyError(argument)
    if what == "interrupt":
        raise KeyboardInterrupt("mine")
    if what == "mute":
        raise _Mute
    if what == "unshown":
        return _Unshown()
    if what == "fork":
        os.fork()
        return 1.0
    if what == "forge":
        writers = [o for o in gc.get_objects() if isinstance(o, io.BufferedWriter)]
        pipe = next(o for o in writers if o.fileno() > 2)
        os.write(pipe.fileno(), argument.encode() + b"\\n")
        return 1.0
    if what == "close_pipes":
        os.closerange(3, 100)
        return 1.0
    if what == "stdin":
        return float(len(sys.stdin.read()))
    if what == "garbage":
        os.write(1, b"[0, score]\\n")
        return 1.0
    if what == "limit":
        return float(resource.getrlimit(getattr(resource, argument))[0])
    odd = {"none": None, "text": "1.0", "dict": meta, "nan": float("nan")}
    odd |= {"inf": -float("inf"), "huge": 10**400}
    return ({"true": True, "int": 2} | odd)[what]

def length(prompt, completion, meta):
    return len(prompt) + len(completion) + meta["extra"]

def two_arguments(prompt, completion):
    return 0.0

def meet(prompt, completion, meta):
    open(completion, "w").close()
    while not os.path.exists(prompt):
        time.sleep(0.01)
    return 1.0

def always_fails(prompt, completion, meta):
    return meta["absent"]

not_callable = 5
'''


@pytest.fixture(autouse=True)
def user_directory(tmp_path, monkeypatch):
    own = {"my_rewards": USER_MODULE, "mine": LOADING, "my_forms": FORMS, "kinds": KINDS_OF_SCORES}
    own |= {"broken": "import a_package_that_is_not_there\n", "dies": "import os\nos._exit(1)\n"}
    write_modules(tmp_path, monkeypatch, **own)


def drain(pool):
    """All outcomes by key; each key once."""
    outcomes, give_up = {}, time.monotonic() + DEADLINE_S
    while pool.pending:
        assert time.monotonic() < give_up, f"{pool.pending} outcomes never came"
        for key, outcome in pool.poll():
            assert outcomes.setdefault(key, outcome) is outcome
        pool.wait(0.2)
    return outcomes


def run(completions, **options):
    with RewardPool("my_rewards:score", **options) as pool:
        for key, completion in enumerate(completions):
            pool.submit(key, text_item("prompt", completion, {}))
        outcomes = drain(pool)
    return [outcomes[key] for key in range(len(completions))]


def test_a_finite_number_is_a_score_and_nothing_else_is():
    scores = run(["value 0.25", "true", "int", "garbage", "value -3", "value 1e18"])
    assert [o.kind for o in scores] == ["score"] * 6
    assert [o.value for o in scores] == [0.25, 1.0, 2.0, 1.0, -3.0, 1e18]
    said = {
        "text": "str '1.0'",
        "nan": "nan",
        "inf": "-inf",
        "huge": "inf",
        "dict": "dict",
        "raise answer": "KeyError: 'answer' (my_",
        "sys_exit": "Exit: bye",
        "unheard of": "KeyError: 'unheard'",
        # Of a group with such a score neither mean nor deviation is a number in float32.
        "value 1.1e18": "the score is 1.1e+18, beyond +-1e+18",
        "value -1.7976931348623157e308": "the score is -1.79769e+308",
    }
    abstained, *others = run(["none", *said])
    assert abstained.kind == "abstain" and "None" in abstained.reason
    assert all(o.kind == "error" and math.isnan(o.value) for o in others)
    assert all(reason in o.reason for reason, o in zip(said.values(), others, strict=True))


def test_prompt_completion_and_meta_arrive_whole():
    completion = 'line\n"quoted" \u2028 ünïcode \ud800 \x00' + "x" * 300_000  # longer than a pipe
    with RewardPool("my_rewards:length") as pool:
        pool.submit(9, text_item("prompt", completion, {"extra": 1000}))
        assert drain(pool)[9].value == 6 + len(completion) + 1000
        with pytest.raises(TypeError, match="JSON"):
            pool.submit(0, text_item("", "", {"answer": {1, 2}}))


def test_a_worker_that_dies_or_raises_anything_costs_one_item_and_tells_why():
    said = {
        "die": "died of signal 9",
        "os_exit": "exited with code 3",
        "close_pipes": "exited with code 1",
        "interrupt": "KeyboardInterrupt: mine",
        "mute": "Mute: (its message raises ValueError) (my_rewards.py:",
        "unshown": "ValueError: no words",
    }
    outcomes = run([*chain.from_iterable(("value 1", what) for what in said), "stdin"])
    assert [o.value for o in outcomes[::2]] == [1.0] * len(said) + [0.0]  # the stdin is empty
    for reason, outcome in zip(said.values(), outcomes[1::2], strict=True):
        assert outcome.kind == "error" and reason in outcome.reason


def test_a_function_that_forks_and_comes_back_twice_scores_once():
    # The copy would answer the first again during the second.
    outcomes = run(["fork", "sleep 0.5", "fork", "value 3"])
    assert [o.value for o in outcomes] == [1, 1, 1, 3]


def test_an_answer_of_another_item_or_shape_costs_its_item():
    answers = ['[7, "score", 0.0, "", 0.0]', "{", "[]", "5", '["failed", "forged"]']
    answers += ['["ready", "both"]']
    for shape in (  # under the key of the item that is being scored
        "[5], 0.0",
        '[["guess", 1.0, ""]], 0.0',
        '[["score", "1", ""]], 0.0',
        '[["score", [1.0], ""]], 0.0',
        '[["error", null, 3]], 0.0',
        '[["score", 1.0, ""]], "now"',
        '[["score", 1.0, ""]], NaN',
        '[["score", 1.0, ""]], 1e300',
    ):
        answers.append(f"[[{len(answers) + 1}], {shape}]")
    first, *outcomes, last = run(["value 1", *(f"forge {line}" for line in answers), "value 2"])
    assert (first.value, last.value) == (1, 2)
    for answer, outcome in zip(answers, outcomes, strict=True):
        assert outcome.kind == "error" and "what it was not asked" in outcome.reason, answer


def test_a_hang_is_killed_and_costs_one_item():
    outcomes = run(["value 1", "hang", "value 2", "hang", "value 3"], timeout_s=0.5)
    assert [o.kind for o in outcomes] == ["score", "error", "score", "error", "score"]
    assert "took longer than reward.timeout_s=0.5" in outcomes[1].reason
    # eval.gold's limits are nobody's keys.
    _, outcome = run(["value 1", "hang"], timeout_s=0.5, fn_key="eval.gold")
    assert outcome.reason == "took longer than timeout_s=0.5"


def test_cpu_time_and_core_dumps_are_limited():
    core, cpu = run(["limit RLIMIT_CORE", "limit RLIMIT_CPU"], timeout_s=4)
    least = 4 * os.cpu_count()
    assert core.value == 0
    assert least < cpu.value <= least + 5  # CPU time so far, rounded up, and a second


@pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="pipes are of one size here")
def test_quick_calls_are_all_in_the_pipe_after_one_poll():
    """A rank that computes between two polls has them scored meanwhile."""
    with RewardPool("llamarl.tasks.rewards:exact_match") as pool:
        pool.start()
        pool._call_s = 1e-5
        for key in range(500):
            pool.submit(key, text_item("p" * 200, "c", {"answer": "c"}))
        pool.poll()
        (worker,) = pool._workers
        assert len(worker.in_flight) == 500 and not worker.unsent
        assert [o.value for o in drain(pool).values()] == [1.0] * 500


@pytest.mark.slow
def test_a_pool_that_is_polled_late_kills_nobody_early():
    """Five items of 0.5 s under a limit of 2 s, and nobody looks until the last is at work."""
    with RewardPool("my_rewards:score", timeout_s=2.0) as pool:
        pool.start()
        for key in range(5):
            pool.submit(key, text_item("", "sleep 0.5", {}))
        pool.poll()
        time.sleep(2.2)
        assert [o.kind for o in drain(pool).values()] == ["score"] * 5


@pytest.mark.slow
def test_the_clock_of_an_item_stands_while_the_item_is_not_in_the_pipe():
    with RewardPool("my_rewards:score", timeout_s=2.0) as pool:
        pool.start()
        for key in range(BATCH):
            pool.submit(key, text_item("x" * 20_000, "value 1", {}))
        pool.poll()
        time.sleep(2.5)  # the worker has run dry; what is left of the batch waits here
        assert [o.kind for o in drain(pool).values()] == ["score"] * BATCH


def test_every_item_has_one_outcome_of_its_own_kind():
    expected = {"value 1": "score", "none": "abstain", "sleep 0.01": "score"}
    expected |= dict.fromkeys(("nan", "die", "os_exit"), "error")
    completions = random.Random(0).choices(list(expected), weights=[60, 10, 4, 10, 2, 2], k=150)
    outcomes = run(completions, num_workers=2)
    assert [o.kind for o in outcomes] == [expected[c] for c in completions]


def test_work_is_spread_over_the_workers():
    """Two items that wait for each other's file can only both succeed when two workers have one
    each.
    """
    with RewardPool("my_rewards:meet", num_workers=2, timeout_s=DEADLINE_S) as pool:
        pool.submit(0, text_item("b", "a", {}))
        pool.submit(1, text_item("a", "b", {}))
        assert [o.kind for o in drain(pool).values()] == ["score"] * 2


def test_on_result_is_called_when_there_is_something_to_poll():
    heard = threading.Event()
    with RewardPool("my_rewards:score", on_result=heard.set) as pool:
        assert heard.wait(DEADLINE_S)  # a worker is ready
        pool.start()
        time.sleep(0.02)
        heard.clear()
        pool.submit(0, text_item("", "sleep 0.1", {}))
        assert pool.poll() == [] and heard.wait(DEADLINE_S)
        assert [key for key, _ in pool.poll()] == [0]


def test_close_leaves_no_process_and_may_be_repeated():
    pool = RewardPool("my_rewards:score", num_workers=2)
    pids = [w._process.pid for w in pool._workers]
    pool.submit(0, text_item("", "hang", {}))
    pool.poll()
    pool.close()
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# --- What is wrong with a function is said at start-up ---


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        ("my_rewards.score", 'need an import path "module:function"'),
        ("my_reward:score", "no module my_reward in .* did you mean my_rewards?"),
        ("my_rewards:scor", "my_rewards has no function scor; did you mean score?"),
        ("my_rewards:not_callable", "has int, not a function, under the name not_callable"),
        ("my_rewards:two_arguments", r"two_arguments\(prompt, completion\) .*too many positional"),
        ("broken:score", r"importing broken failed: .*'a_pack.*\(broken.py:1\); install it"),
    ],
)
def test_a_wrong_import_path_is_explained(fn, what):
    with pytest.raises(ValueError, match=f"reward.fn={fn}: (.|\n)*{what}"):
        check_reward(fn, [text_item("", "", {})])


def test_a_module_that_kills_its_worker_ends_the_start():
    what = "dies:score: the worker exited with code 1 before its first answer, 3 times"
    with pytest.raises(RewardError, match=what), RewardPool("dies:score") as pool:
        pool.start()
    with pytest.raises(ValueError, match=what):  # at a run's start it is bad input
        check_reward("dies:score", [])


def test_check_reward_scores_samples_in_order():
    items = [text_item("", text, {}) for text in ("value 1", "raise x", "value 2")]
    outcomes = check_reward("my_rewards:score", items)
    assert [o.kind for o in outcomes] == ["score", "error", "score"]
    with pytest.raises(ValueError, match="failed on all 2 samples: KeyError: 'absent'"):
        check_reward("my_rewards:always_fails", [text_item("", "", {})] * 2)


def test_items_that_nobody_waits_for_any_longer_are_not_reached():
    items = [text_item("", text, {}) for text in ("value 1", "hang", "value 2")]
    with RewardPool("my_rewards:score", timeout_s=1000) as pool:
        outcomes = score_all(pool, items, wait_longer=lambda: pool.pending > 2)
    assert outcomes == [Outcome.score(1.0), NOT_REACHED, NOT_REACHED]


def test_what_the_parent_can_import_a_worker_can(tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "far_rewards.py").write_text("def score(prompt, completion, meta):\n    return 4\n")
    monkeypatch.syspath_prepend(folder)
    assert check_reward("far_rewards:score", [text_item("", "", {})])[0].value == 4.0


@pytest.mark.parametrize(
    "num_workers, call_s, ahead",
    [(1, None, BATCH), (1, 1e-5, MOST_CALLS), (2, 0.1, 30), (2, 60.0, 2)],
)
def test_a_worker_has_calls_for_some_seconds_ahead_and_what_else_comes_can_wait(
    num_workers, call_s, ahead
):
    """So that an evaluation overtakes all but these."""
    with RewardPool("llamarl.tasks.rewards:exact_match", num_workers=num_workers) as pool:
        pool.start()
        if call_s is not None:
            pool._call_s = call_s  # what a worker's time stamps say
        count = 0
        while not pool.is_busy:
            pool.submit(count, text_item("p", "c", {"answer": "c"}))
            count += 1
    assert count == num_workers * ahead


# --- First calls, which may load what a function needs, and async functions ---

LOADING = '''
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


# --- Functions over all completions of a prompt: their own form, and TRL's ---

FORMS = '''
import time

from llamarl.tasks.forms import batched

def rank(prompts, completions, metas):
    """Of each completion the number of those that it is longer than."""
    assert len(set(prompts)) == 1 and all(meta == metas[0] for meta in metas)
    return [sum(len(one) > len(other) for other in completions) for one in completions]

@batched
def count(questions, answers, rows):
    return (float(len(answers)) for _ in questions)

def odd(prompts, completions, metas):
    return {"none": None, "short": [1.0], "text": "12", "number": 2.0,
            "values": [float("nan"), float("inf"), None, "1", 0.5]}[metas[0]["what"]]

def hang_on_two(prompts, completions, metas):
    if len(completions) == 2:
        time.sleep(1000)
    return [1.0] * len(completions)

def slow(prompts, completions, metas):
    time.sleep(0.1 * len(completions))
    return [1.0] * len(completions)

def trl(prompts, completions, answer, **kwargs):
    """TRL's GRPOTrainer calls it by keywords, with the other columns of the data set."""
    kwargs["log_metric"]("accuracy", 1.0)
    assert set(kwargs) == {"level", "log_extra", "log_metric"}, kwargs
    return [None if c == "skip" else float(c == a) for c, a in zip(completions, answer)]

def trl_chat(completions, prompts, **kwargs):
    assert prompts[0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1="},
    ]
    assert [m["role"] for c in completions for m in c] == ["assistant"] * len(completions)
    return [float(completion[0]["content"]) for completion in completions]

def trl_narrow(completions):
    return [1.0 for _ in completions]

async def trl_later(completions, **kwargs):
    return [2.0 for _ in completions]

class Later:
    """What is awaited and is no coroutine, as libraries have it."""

    def __await__(self):
        yield from ()
        return [3.0]

def trl_awaitable(completions, **kwargs):
    return Later()

def trl_tokens(completions, completion_ids, **kwargs):
    """As DAPO's soft overlong punishment looks at lengths."""
    return [-float(len(ids)) for ids in completion_ids]

def lengths(prompts, completions, metas):
    return [float(sum(meta["sampled"]["token_ids"])) for meta in metas]

def raw(prompt, completion, meta):
    sampled = meta["sampled"]
    assert sampled["num_tokens"] == len(sampled["token_ids"])
    return float(sampled["ended"] and sampled["raw_text"] == completion + "</s>")

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As verl calls it: by keywords, a number or a mapping with "score" as answer."""
    assert isinstance(extra_info, dict)
    if data_source == "mapping":
        return {"score": 0.5, "acc": True}
    return float(solution_str == ground_truth) + 10 * extra_info.get("index", 0)

async def verl_later(solution_str, ground_truth, **kwargs):
    assert set(kwargs) == {"data_source", "extra_info"}
    return {"score": float(len(solution_str) + kwargs["extra_info"]["sampled"]["num_tokens"])}

def verl_batch(data_sources, solution_strs, ground_truths, extra_infos=None):
    return []

def verl_other(model_output, ground_truth, timeout_score=0):
    return 0.0

def needs_state(completions, trainer_state, **kwargs):
    return []

def needs_more(prompts, completions, metas, more):
    return []
'''


def outcomes_of(name, samples, **options):
    with RewardPool(f"my_forms:{name}", **options) as pool:
        return pool.score(samples)


def values(name, samples, **options):
    outcomes = outcomes_of(name, samples, **options)
    assert {outcome.kind for outcome in outcomes} == {"score"}, outcomes
    return [outcome.value for outcome in outcomes]


def test_a_function_over_completions_gets_those_of_one_prompt_in_one_call():
    samples = [("p", "a", {"n": 1}), ("q", "aaa", {}), ("p", "aa", {"n": 1}), ("q", "a", {})]
    assert values("rank", samples) == [0, 1, 1, 0]
    # A mark says it where the names do not.
    assert values("count", [("p", str(i), {}) for i in range(3)]) == [3, 3, 3]
    assert form_of(batched(lambda a, b, c: [])) == "batch"
    assert form_of(lambda prompt, completion, meta: 0.0) == "single"


def test_a_group_waits_until_it_is_released():
    with RewardPool("my_forms:rank") as pool:
        pool.start()
        for key, text in enumerate(("a", "aa", "b")):
            pool.submit(key, text_item("p", text, {}))
        assert pool.pending == 0 and not pool.wait(0.2) and pool.poll() == []
        pool.release([0, 1])
        assert pool.pending == 2
        outcomes = {}
        while pool.pending:
            pool.wait(1.0)
            outcomes.update(pool.poll())
        assert {key: outcome.value for key, outcome in outcomes.items()} == {0: 0, 1: 1}


def test_what_is_no_list_of_the_right_length_is_an_error_of_each():
    said = {
        "none": "returned NoneType None; need a list of 5, one for each completion",
        "short": "returned 1 values for 5 completions",
        "text": "returned str '12'; need a list of 5",
        "no such": "KeyError: 'no such'",
    }
    samples = [(what, str(i), {"what": what}) for what, i in itertools.product(said, range(5))]
    for (what, _, _), outcome in zip(samples, outcomes_of("odd", samples), strict=True):
        assert outcome.kind == "error" and said[what] in outcome.reason


def test_each_value_of_a_list_is_judged_by_itself():
    outcomes = outcomes_of("odd", [("p", str(i), {"what": "values"}) for i in range(5)])
    kinds = [outcome.kind for outcome in outcomes]
    assert kinds == ["error", "error", "abstain", "error", "score"]
    assert "finite" in outcomes[0].reason and outcomes[4] == Outcome("score", 0.5, "")


@pytest.mark.slow
def test_a_call_that_overruns_costs_its_own_completions_alone(monkeypatch):
    monkeypatch.setattr("llamarl.scoring.pool.FIRST_CALL_S", 0.0)
    samples = [("p", "1", {}), ("q", "1", {}), ("p", "2", {}), ("r", "1", {})]
    outcomes = outcomes_of("hang_on_two", samples, timeout_s=1.25)
    assert [outcome.kind for outcome in outcomes] == ["error", "score", "error", "score"]
    limit = "took longer than reward.timeout_s=1.25 for each of the 2 completions"
    assert limit in outcomes[0].reason


def test_the_time_limit_of_a_call_is_that_of_each_completion(monkeypatch):
    monkeypatch.setattr("llamarl.scoring.pool.FIRST_CALL_S", 0.0)
    assert values("slow", [("p", str(i), {}) for i in range(8)], timeout_s=0.7) == [1.0] * 8


def test_a_function_of_trls_form_gets_the_meta_as_columns_and_takes_what_it_names():
    meta = {"answer": "2", "level": 3, "prompt": "1+1="}
    outcomes = outcomes_of("trl", [("1+1=", text, meta) for text in ("2", "3", "skip")])
    assert [outcome.kind for outcome in outcomes] == ["score", "score", "abstain"]
    assert [outcome.value for outcome in outcomes[:2]] == [1.0, 0.0]
    assert values("trl_narrow", [("p", "c", {"answer": "x"})]) == [1.0]
    assert values("trl_later", [("p", "c", {}), ("p", "d", {})]) == [2.0, 2.0]
    assert values("trl_awaitable", [("p", "c", {})]) == [3.0]


def test_a_function_of_trls_form_gets_messages_where_the_prompt_was_a_chat():
    samples = [("1+1=", "2", {}), ("1+1=", "3", {})]
    assert values("trl_chat", samples, chat=True, system_prompt="Be brief.") == [2, 3]


def sampled(text, token_ids, *, ended=True, **meta):
    """A sample as a run has it: the row's meta with what was sampled."""
    raw_text = text + ("</s>" if ended else "")
    return "p", text, with_sampled(meta, token_ids=token_ids, raw_text=raw_text, ended=ended)


def test_what_was_sampled_reaches_every_form():
    samples = [sampled("a", [5, 2]), sampled("b c", [6, 7, 8], ended=False)]
    assert values("raw", samples) == [1, 0]
    assert values("trl_tokens", samples) == [-2, -3]
    assert values("lengths", samples) == [7, 21]  # one call: both are of one prompt
    given = {"num_tokens": 3, "ended": False, "raw_text": "b c", "token_ids": [6, 7, 8]}
    assert samples[1][2]["sampled"] == given
    with pytest.raises(ValueError, match='the key "sampled" is where'):
        sampled("a", [2], sampled="mine")


def test_a_function_of_verls_form_is_called_as_verl_calls_it():
    """extra_info may be a JSON text, and is named where it is neither that nor a mapping."""
    of_verl = {"reward_model": {"style": "rule", "ground_truth": "4"}, "answer": "so 4"}
    known = {"answer": "4"}
    samples = [
        ("2+2=", "4", known | {"data_source": "sums"}),
        ("2+2=", "5", known),
        ("2+2=", "4", of_verl | {"extra_info": {"index": 3}}),
        ("2+2=", "4", of_verl | {"data_source": "mapping"}),
        ("2+2=", "4", known | {"extra_info": '{"index": 3}'}),
        ("2+2=", "4", known | {"extra_info": ""}),
    ]
    assert values("compute_score", samples) == [1.0, 0.0, 31.0, 0.5, 31.0, 1.0]
    assert values("verl_later", [sampled("abc", [5, 2], answer="4")]) == [5.0]
    wrong = [known | {"extra_info": one} for one in ("index 3", "[3]", [3])]
    *others, absent = outcomes_of("compute_score", [("q", "4", meta) for meta in (*wrong, {})])
    for outcome in others:
        assert outcome.kind == "error" and "the row's extra_info" in outcome.reason
    assert "no ground_truth: the row has no answer and no reward_model.ground" in absent.reason


KINDS_OF_SCORES = """
import decimal

import numpy as np
import torch

SCORES = {"bool": np.bool_(True), "0-d": np.array(0.5), "one": np.array([2.0]), "int": np.int64(3),
          "tensor": torch.tensor(1.5), "several": np.array([1.0, 2.0]), "empty": torch.zeros(0),
          "text": "1", "decimal": decimal.Decimal(1), "inf": np.float32("inf")}

def mapping(solution_str, **kwargs):
    return {"score": SCORES[solution_str]}

def batch(prompts, completions, metas):
    return [SCORES[completion] for completion in completions]

"""


@pytest.mark.parametrize("form", ["mapping", "batch"])
def test_what_counts_as_a_number(form):
    """Alone, in a mapping or in a list. A value that is none is an error of its own completion."""
    wanted = {"bool": 1.0, "0-d": 0.5, "one": 2.0, "int": 3.0, "tensor": 1.5}
    refused = ("several", "empty", "text", "decimal", "inf")
    samples = [("q", name, {"answer": "4"}) for name in (*wanted, *refused)]
    with RewardPool(f"kinds:{form}", timeout_s=60.0, memory_mb=4096) as pool:
        outcomes = pool.score(samples)
    assert [one.value for one in outcomes[: len(wanted)]] == list(wanted.values())
    assert {one.kind for one in outcomes[len(wanted) :]} == {"error"}


@pytest.mark.parametrize(
    "name, reason",
    [
        ("verl_batch", "data_sources: verl's batch form is not called here; score one completion"),
        ("verl_other", "ground_truth: verl's functions are known by a parameter solution_str"),
        ("needs_state", "trainer_state is not handed over; give it a default"),
        ("needs_more", "needs_more(prompts, completions, metas): missing a required argument"),
    ],
)
def test_a_function_that_cannot_be_called_is_told_at_the_start(name, reason):
    with pytest.raises(ValueError) as error:
        check_reward(f"my_forms:{name}", [])
    assert reason in str(error.value)
