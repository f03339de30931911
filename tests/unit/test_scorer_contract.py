"""What every Scorer of texts promises (llamarl/scoring/scorer.py), asked of each."""

import math
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from llamarl.scoring.judge import Judge
from llamarl.scoring.pool import RewardPool
from llamarl.scoring.scorer import Scorer, text_item
from llamarl.types import Outcome
from tests.build.kind_settings import judge_settings
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

'''


class ThreadScorer(Scorer):
    """The least that is a scorer: a thread that scores one item after the other, as one would that
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
        self._num_pending = 0

    @property
    def pending(self):
        return self._num_pending

    @property
    def is_busy(self):
        return self.pending >= 2

    def start(self):
        self._thread.start()

    def submit(self, key, item):
        self._num_pending += 1
        self._asked.append((key, item.prompt.text, item.text, item.meta))
        self._is_asked.release()

    def poll(self):
        self._is_known.clear()
        outcomes = [self._known.popleft() for _ in range(len(self._known))]
        self._num_pending -= len(outcomes)
        return outcomes

    def wait(self, timeout_s):
        return self._is_known.wait(timeout_s)

    def close(self):
        self._asked.clear()
        self._num_pending = 0
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


class JudgedScorer(Judge):
    """A judge who reads the two numbers of a sum and answers with it. Rewards of a judge lie
    between 0 and 1: here they are multiplied by its highest number, a power of two.
    """

    highest = 1024

    def __init__(self, *, on_result):
        self._server = JudgeServer(self._reply).__enter__()
        template = Path("template")
        template.write_text("{prompt}|{completion}|{answer}")
        settings = judge_settings(
            self._server.url, template=str(template), lowest=0.0, highest=self.highest
        )
        super().__init__(settings, on_result=on_result)

    def submit(self, key, item):
        meta = item.meta | {"answer": item.meta["extra"]}
        super().submit(key, text_item(item.prompt.text, item.text, meta))

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


SCORERS = {
    "a function": partial(RewardPool, "scoring:score"),
    "an async function": partial(RewardPool, "scoring:score_later"),
    "a function of all completions": partial(RewardPool, "scoring:score_all", num_workers=2),
    "a thread": ThreadScorer,
    "a judge": JudgedScorer,
}
NEVER_ABSTAINS = (JudgedScorer,)


@pytest.fixture(params=list(SCORERS))
def make(request, tmp_path, monkeypatch):
    """make(on_result) is a scorer; each is closed at the end."""
    (tmp_path / "scoring.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    made = []

    def make(on_result=lambda: None):
        made.append(SCORERS[request.param](on_result=on_result))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


@pytest.fixture
def scorer(make):
    scorer = make()
    scorer.start()
    return scorer


def collect(scorer):
    """All outcomes, in the order in which they became known."""
    outcomes = scorer.poll()
    give_up = time.monotonic() + PATIENCE_S
    while scorer.pending:
        assert time.monotonic() < give_up
        scorer.wait(0.1)
        outcomes += scorer.poll()
    return outcomes


def test_every_item_is_answered_once_under_its_key(scorer):
    keys = [7, 0, 3, *range(100, 300)]
    for key in keys:
        scorer.submit(key, text_item("p" * (key % 5), "c", {"extra": key}))
    scorer.release(keys)
    outcomes = collect(scorer)
    assert isinstance(scorer.name, str) and scorer.name
    assert sorted(key for key, _ in outcomes) == sorted(keys)
    assert {key: outcome.value for key, outcome in outcomes} == {k: k % 5 + k for k in keys}
    assert scorer.poll() == []


def test_what_is_pending_was_submitted_and_not_yet_returned(scorer):
    assert scorer.pending == 0
    for key in range(3):
        scorer.submit(key, text_item("p", "c", {"extra": 0}))
    scorer.release(range(3))
    assert scorer.pending == 3
    returned = 0
    give_up = time.monotonic() + PATIENCE_S
    while returned < 3:
        assert time.monotonic() < give_up
        scorer.wait(0.1)
        returned += len(scorer.poll())
        assert scorer.pending == 3 - returned


def test_it_is_busy_with_much_to_do_and_never_with_nothing(scorer):
    assert not scorer.is_busy
    for key in range(300):
        scorer.submit(key, text_item(f"p{key}", "c", {"extra": 0}))
    scorer.release(range(300))
    assert scorer.is_busy
    collect(scorer)
    assert not scorer.is_busy


def test_an_error_and_an_abstention_are_no_score_and_say_why(scorer):
    for key, completion in enumerate(("error", "abstain", "c")):
        scorer.submit(key, text_item("prompt", completion, {"extra": key}))
    scorer.release(range(3))
    outcomes = dict(collect(scorer))
    assert (outcomes[0].kind, outcomes[2].kind) == ("error", "score")
    assert math.isnan(outcomes[0].value) and "cannot score prompt" in outcomes[0].reason
    if not isinstance(scorer, NEVER_ABSTAINS):
        assert outcomes[1].kind == "abstain" and outcomes[1].reason
        assert math.isnan(outcomes[1].value)
    assert outcomes[2] == Outcome("score", 8.0, "")


def test_it_goes_on_after_an_error(scorer):
    scorer.submit(0, text_item("p", "error", {"extra": 0}))
    scorer.release([0])
    collect(scorer)
    scorer.submit(1, text_item("pp", "c", {"extra": 0}))
    scorer.release([1])
    assert collect(scorer) == [(1, Outcome("score", 2.0, ""))]


def test_who_waits_is_told_of_a_result(make):
    heard = threading.Event()
    scorer = make(on_result=heard.set)
    scorer.start()
    scorer.submit(0, text_item("p", "c", {"extra": 0}))
    scorer.release([0])
    outcomes = scorer.poll()
    if not outcomes:
        assert heard.wait(PATIENCE_S)
    assert outcomes + collect(scorer) == [(0, Outcome("score", 1.0, ""))]


def test_a_wait_with_nothing_to_come_ends_by_itself(scorer):
    give_up = time.monotonic() + PATIENCE_S
    while scorer.wait(0.01):  # of two processes the second may still be starting
        assert time.monotonic() < give_up and scorer.poll() == []


def test_closing_drops_what_is_pending_and_may_be_done_twice(scorer):
    for key in range(5):
        scorer.submit(key, text_item("p", "c", {"extra": 0}))
    scorer.release(range(4))
    scorer.close()
    assert scorer.pending == 0
    scorer.close()
