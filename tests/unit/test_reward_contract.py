"""What every source of scores promises (llamarl/tasks/source.py: RewardSource), asked of each."""

import math
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial

import pytest

from llamarl.tasks.endpoint import EndpointSettings
from llamarl.tasks.judge import Judge
from llamarl.tasks.pool import RewardPool
from llamarl.tasks.source import Outcome
from tests.judge_server import JudgeServer, Reply

PATIENCE_S = 60.0
MODULE = '''
def score(prompt, completion, meta):
    """The prompt's length, unless the completion asks for something else."""
    if completion == "error":
        raise RuntimeError("cannot score " + prompt)
    return None if completion == "abstain" else float(len(prompt) + meta["extra"])


async def score_later(prompt, completion, meta):
    return score(prompt, completion, meta)


def score_all(prompts, completions, metas):
    return [score(*one) for one in zip(prompts, completions, metas)]


def trl_style(prompts, completions, extra, **columns):
    return [score(p, c, {"extra": e}) for p, c, e in zip(prompts, completions, extra)]
'''


class ThreadSource:
    """The least that is a source: a thread that scores one item after the other, as one would that
    asks a server.
    """

    name = "thread"

    def __init__(self, *, on_result):
        self._on_result = on_result
        self._asked = deque()
        self._known = deque()
        self._is_asked = threading.Semaphore(0)
        self._is_known = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.pending = 0

    @property
    def is_busy(self):
        return self.pending >= 2

    def start(self):
        self._thread.start()

    def submit(self, key, prompt, completion, meta):
        self.pending += 1
        self._asked.append((key, prompt, completion, meta))
        self._is_asked.release()

    def release(self, keys):
        pass

    def poll(self):
        self._is_known.clear()
        outcomes = [self._known.popleft() for _ in range(len(self._known))]
        self.pending -= len(outcomes)
        return outcomes

    def wait(self, timeout_s):
        return self._is_known.wait(timeout_s)

    def close(self):
        self._asked.clear()
        self.pending = 0
        if self._thread.is_alive():
            self._is_asked.release()
            self._thread.join()

    def _work(self):
        while True:
            self._is_asked.acquire()
            if not self._asked:
                return
            key, prompt, completion, meta = self._asked.popleft()
            self._known.append((key, self._outcome(prompt, completion, meta)))
            self._is_known.set()
            self._on_result()

    def _outcome(self, prompt, completion, meta):
        if completion == "error":
            return Outcome.error("cannot score " + prompt)
        if completion == "abstain":
            return Outcome.abstain("it says so")
        return Outcome("score", float(len(prompt) + meta["extra"]), "")


class JudgedSource(Judge):
    """A judge who reads the two numbers of a sum and answers with it. Rewards of a judge lie
    between 0 and 1: here they are multiplied by its highest number, a power of two.
    """

    highest = 1024

    def __init__(self, *, on_result):
        self._server = JudgeServer(self._reply).__enter__()
        super().__init__(
            EndpointSettings(url=self._server.url, model="wise"),
            template="{prompt}|{completion}|{answer}",
            lowest=0,
            highest=self.highest,
            on_result=on_result,
        )

    def submit(self, key, prompt, completion, meta):
        super().submit(key, prompt, completion, meta | {"answer": meta["extra"]})

    def poll(self):
        return [(key, self._enlarged(outcome)) for key, outcome in super().poll()]

    def close(self):
        super().close()
        self._server.__exit__()

    @staticmethod
    def _reply(question):
        prompt, completion, extra = question.split("|")
        if completion == "error":
            return Reply(status=400, body=f"cannot score {prompt}".encode())
        return f"Score: {len(prompt) + int(extra)}"

    def _enlarged(self, outcome):
        return replace(outcome, value=outcome.value * self.highest)


SOURCES = {
    "a function": partial(RewardPool, "scoring:score"),
    "an async function": partial(RewardPool, "scoring:score_later"),
    "a function in two processes": partial(RewardPool, "scoring:score", num_workers=2),
    "a function of all completions": partial(RewardPool, "scoring:score_all"),
    "a function of TRL's form": partial(RewardPool, "scoring:trl_style", num_workers=2),
    "a thread": ThreadSource,
    "a judge": JudgedSource,
}
NEVER_ABSTAINS = (JudgedSource,)


@pytest.fixture(params=list(SOURCES))
def make(request, tmp_path, monkeypatch):
    """make(on_result) is a source; each is closed at the end."""
    (tmp_path / "scoring.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    made = []

    def make(on_result=lambda: None):
        made.append(SOURCES[request.param](on_result=on_result))
        return made[-1]

    yield make
    for source in made:
        source.close()


@pytest.fixture
def source(make):
    source = make()
    source.start()
    return source


def collect(source):
    """All outcomes, in the order in which they became known."""
    outcomes = source.poll()
    give_up = time.monotonic() + PATIENCE_S
    while source.pending:
        assert time.monotonic() < give_up
        source.wait(0.1)
        outcomes += source.poll()
    return outcomes


def test_it_has_a_name(source):
    assert isinstance(source.name, str) and source.name


def test_every_item_is_answered_once_under_its_key(source):
    keys = [7, 0, 3, *range(100, 300)]
    for key in keys:
        source.submit(key, "p" * (key % 5), "c", {"extra": key})
    source.release(keys)
    outcomes = collect(source)
    assert sorted(key for key, _ in outcomes) == sorted(keys)
    assert {key: outcome.value for key, outcome in outcomes} == {k: k % 5 + k for k in keys}
    assert source.poll() == []


def test_what_is_pending_was_submitted_and_not_yet_returned(source):
    assert source.pending == 0
    for key in range(3):
        source.submit(key, "p", "c", {"extra": 0})
    source.release(range(3))
    assert source.pending == 3
    returned = 0
    give_up = time.monotonic() + PATIENCE_S
    while returned < 3:
        assert time.monotonic() < give_up
        source.wait(0.1)
        returned += len(source.poll())
        assert source.pending == 3 - returned


def test_it_is_busy_with_much_to_do_and_never_with_nothing(source):
    assert not source.is_busy
    for key in range(300):
        source.submit(key, f"p{key}", "c", {"extra": 0})
    source.release(range(300))
    assert source.is_busy
    collect(source)
    assert not source.is_busy


def test_an_error_and_an_abstention_are_no_score_and_say_why(source):
    for key, completion in enumerate(("error", "abstain", "c")):
        source.submit(key, "prompt", completion, {"extra": key})
    source.release(range(3))
    outcomes = dict(collect(source))
    assert (outcomes[0].kind, outcomes[2].kind) == ("error", "score")
    assert math.isnan(outcomes[0].value) and "cannot score prompt" in outcomes[0].reason
    if not isinstance(source, NEVER_ABSTAINS):
        assert outcomes[1].kind == "abstain" and outcomes[1].reason
        assert math.isnan(outcomes[1].value)
    assert outcomes[2] == Outcome("score", 8.0, "")


def test_it_goes_on_after_an_error(source):
    source.submit(0, "p", "error", {"extra": 0})
    source.release([0])
    collect(source)
    source.submit(1, "pp", "c", {"extra": 0})
    source.release([1])
    assert collect(source) == [(1, Outcome("score", 2.0, ""))]


def test_who_waits_is_told_of_a_result(make):
    heard = threading.Event()
    source = make(on_result=heard.set)
    source.start()
    source.submit(0, "p", "c", {"extra": 0})
    source.release([0])
    outcomes = source.poll()
    if not outcomes:
        assert heard.wait(PATIENCE_S)
    assert outcomes + collect(source) == [(0, Outcome("score", 1.0, ""))]


def test_a_wait_with_nothing_to_come_ends_by_itself(source):
    give_up = time.monotonic() + PATIENCE_S
    while source.wait(0.01):  # of two processes the second may still be starting
        assert time.monotonic() < give_up and source.poll() == []


def test_closing_drops_what_is_pending_and_may_be_done_twice(source):
    for key in range(5):
        source.submit(key, "p", "c", {"extra": 0})
    source.release(range(4))
    source.close()
    assert source.pending == 0
    source.close()
