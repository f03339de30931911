"""The reward pool: typed outcomes whatever the user's function does, hard timeouts, no orphans."""

import fcntl
import math
import os
import random
import signal
import textwrap
import threading
import time

import pytest

from llamarl.errors import RewardError
from llamarl.scoring.pool import BATCH, MOST_CALLS, RewardPool, check_reward
from llamarl.scoring.scorer import NOT_REACHED, score_all, text_item
from llamarl.types import Outcome

DEADLINE_S = 30.0  # for waits that must end; never reached unless something is broken

USER_MODULE = '''
import asyncio, gc, io, os, resource, signal, subprocess, sys, time


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
    if what == "fork_and_hang":
        child = subprocess.Popen(["sleep", "1000"])
        open(argument, "w").write(str(child.pid))
        time.sleep(1000)
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


async def later(prompt, completion, meta):
    return 0.0


def always_fails(prompt, completion, meta):
    return meta["absent"]


not_callable = 5
'''


@pytest.fixture(autouse=True)
def user_directory(tmp_path, monkeypatch):
    """The user's own directory, which is the current one and not on sys.path."""
    (tmp_path / "my_rewards.py").write_text(USER_MODULE)
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "dies.py").write_text("import os\nos._exit(1)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
    scores = run(["value 0.25", "true", "int", "garbage", "value -3"])
    assert [(o.kind, o.value) for o in scores] == [
        ("score", v) for v in (0.25, 1.0, 2.0, 1.0, -3.0)
    ]
    others = run(
        ["none", "text", "nan", "inf", "huge", "dict", "raise answer", "sys_exit", "unheard of"]
    )
    assert [o.kind for o in others] == ["abstain"] + ["error"] * 8
    assert all(math.isnan(o.value) for o in others)
    reasons = [
        "None",
        "str '1.0'",
        "nan",
        "-inf",
        "inf",
        "dict",
        "KeyError: 'answer' (my_",
        "Exit: bye",
        "KeyError: 'unheard'",
    ]
    assert all(said in outcome.reason for said, outcome in zip(reasons, others, strict=True))


def test_a_number_whose_square_float32_does_not_hold_is_an_error_that_says_so():
    """Of such a group neither the mean nor the deviation is a number in float32."""
    fits, large, negative = run(["value 1e18", "value 1.1e18", "value -1.7976931348623157e308"])
    assert (fits.kind, fits.value) == ("score", 1e18)
    assert (large.kind, negative.kind) == ("error", "error")
    assert "the score is 1.1e+18, beyond +-1e+18" in large.reason
    assert "the score is -1.79769e+308" in negative.reason


def test_prompt_completion_and_meta_arrive_whole():
    completion = 'line\n"quoted" \u2028 ünïcode \ud800 \x00' + "x" * 300_000  # longer than a pipe
    with RewardPool("my_rewards:length") as pool:
        pool.submit(9, text_item("prompt", completion, {"extra": 1000}))
        assert drain(pool)[9].value == 6 + len(completion) + 1000


def test_a_worker_that_dies_costs_one_item():
    outcomes = run(["value 1", "die", "value 2", "os_exit", "value 3"])
    assert [o.value for o in outcomes if o.kind == "score"] == [1, 2, 3]
    assert "died of signal 9" in outcomes[1].reason and "exited with code 3" in outcomes[3].reason


def test_whatever_is_raised_is_told_as_what_it_is():
    outcomes = run(["interrupt", "mute", "unshown", "value 1"])
    assert [o.kind for o in outcomes] == ["error"] * 3 + ["score"]
    assert "KeyboardInterrupt: mine" in outcomes[0].reason
    assert "Mute: (its message raises ValueError) (my_rewards.py:" in outcomes[1].reason
    assert "ValueError: no words" in outcomes[2].reason


def test_a_function_that_forks_and_comes_back_twice_scores_once():
    outcomes = run(
        ["fork", "sleep 0.5", "fork", "value 3"]
    )  # the copy would answer the first again during the second
    assert [o.value for o in outcomes] == [1, 1, 1, 3]


@pytest.mark.parametrize(
    "line",
    ['[7, "score", 0.0, "", 0.0]', "{", "[]", "5", '["failed", "forged"]', '["ready", "both"]'],
)
def test_an_answer_for_another_item_costs_one_item(line):
    outcomes = run(["value 1", f"forge {line}", "value 2", "value 3"])
    assert [o.value for o in outcomes if o.kind == "score"] == [1, 2, 3]
    assert "sent what it was not asked" in outcomes[1].reason


def test_an_answer_of_another_shape_costs_its_item():
    """The keys are those of the item that is being scored."""
    answers = [
        "[5], 0.0",
        '[["guess", 1.0, ""]], 0.0',
        '[["score", "1", ""]], 0.0',
        '[["score", [1.0], ""]], 0.0',
        '[["error", null, 3]], 0.0',
        '[["score", 1.0, ""]], "now"',
        '[["score", 1.0, ""]], NaN',
        '[["score", 1.0, ""]], 1e300',
    ]
    forged = [f"forge [[{key}], {answer}]" for key, answer in enumerate(answers, 1)]
    first, *outcomes, last = run(["value 1", *forged, "value 2"])
    assert (first.value, last.value) == (1, 2)
    for answer, outcome in zip(answers, outcomes, strict=True):
        assert outcome.kind == "error" and "what it was not asked" in outcome.reason, answer


def test_a_worker_that_ends_by_itself_tells_its_own_exit_code():
    outcomes = run(["close_pipes", "value 1"])
    assert "exited with code 1" in outcomes[0].reason and outcomes[1].value == 1


def test_a_hang_is_killed_and_costs_one_item():
    outcomes = run(["value 1", "hang", "value 2", "hang", "value 3"], timeout_s=0.5)
    assert [o.kind for o in outcomes] == ["score", "error", "score", "error", "score"]
    assert "took longer than reward.timeout_s=0.5" in outcomes[1].reason
    # eval.gold's limits are nobody's keys.
    _, outcome = run(["value 1", "hang"], timeout_s=0.5, fn_key="eval.gold")
    assert outcome.reason == "took longer than timeout_s=0.5"


def test_a_kill_takes_the_children_of_the_function_with_it(user_directory):
    run(["value 1", f"fork_and_hang {user_directory / 'pid'}"], timeout_s=1.0)
    await_death(int((user_directory / "pid").read_text()))


def test_cpu_time_and_core_dumps_are_limited():
    outcomes = run(["limit RLIMIT_CORE", "limit RLIMIT_CPU"], timeout_s=4)
    assert outcomes[0].value == 0
    least = 4 * os.cpu_count()
    assert least < outcomes[1].value <= least + 5  # CPU time so far, rounded up, and a second


def test_the_function_finds_an_empty_stdin():
    assert run(["stdin", "value 1"])[0].value == 0.0


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


@pytest.mark.parametrize("seed", range(1))
def test_every_item_has_one_outcome_of_its_own_kind(seed):
    rng = random.Random(seed)
    expected = {
        "value 1": "score",
        "none": "abstain",
        "nan": "error",
        "die": "error",
        "os_exit": "error",
        "sleep 0.01": "score",
    }
    completions = rng.choices(list(expected), weights=[60, 10, 10, 2, 2, 4], k=150)
    outcomes = run(completions, num_workers=2)
    assert [o.kind for o in outcomes] == [expected[c] for c in completions]


def test_work_is_spread_over_the_workers():
    """Two items that wait for each other's file can only both succeed when two workers have one
    each.
    """
    code = """
    import os, time
    def score(prompt, completion, meta):
        open(completion, "w").close()
        while not os.path.exists(prompt):
            time.sleep(0.01)
        return 1.0
    """
    with open("meet.py", "w") as file:
        file.write(textwrap.dedent(code))
    with RewardPool("meet:score", num_workers=2, timeout_s=DEADLINE_S) as pool:
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


def await_death(pid):
    give_up = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    pytest.fail(f"process {pid} lives on")


# -- what is wrong with a function is said at start-up
# ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        ("my_rewards.score", 'need an import path "module:function"'),
        ("my_reward:score", "no module my_reward in .* did you mean my_rewards?"),
        ("my_rewards:scor", "my_rewards has no function scor; did you mean score?"),
        ("my_rewards:not_callable", "has int, not a function, under the name not_callable"),
        (
            "my_rewards:two_arguments",
            r"two_arguments\(prompt, completion\) cannot be called as .*too many positional",
        ),
        (
            "broken:score",
            r"importing broken failed: ModuleNotFoundError: No module named "
            r"'a_pack.*\(broken.py:1\); install it",
        ),
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
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "far_rewards.py").write_text(
        "def score(prompt, completion, meta):\n    return 4\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
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
