"""The reward pool: typed outcomes whatever the user's function does, hard timeouts, no orphans."""

import fcntl
import math
import os
import random
import threading
import time
from itertools import chain

import pytest

from llamarl.errors import RewardError
from llamarl.scoring.pool import BATCH, MOST_CALLS, RewardPool, check_reward
from llamarl.scoring.scorer import NOT_REACHED, score_all, text_item
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
    broken = "import a_package_that_is_not_there\n"
    dies = "import os\nos._exit(1)\n"
    write_modules(tmp_path, monkeypatch, my_rewards=USER_MODULE, broken=broken, dies=dies)


def drain(pool):
    """All outcomes by key; each key once."""
    outcomes, give_up = {}, time.monotonic() + DEADLINE_S
    while pool.pending:
        assert time.monotonic() < give_up, f"{pool.pending} outcomes never came"
        for key, outcome in pool.poll():
            assert key not in outcomes
            outcomes[key] = outcome
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


def test_meta_that_is_not_json_is_refused():
    with pytest.raises(TypeError, match="JSON"), RewardPool("my_rewards:score") as pool:
        pool.submit(0, text_item("", "", {"answer": {1, 2}}))


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
