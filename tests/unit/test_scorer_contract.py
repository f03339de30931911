"""What every Scorer of texts promises (llamarl/scoring/scorer.py), asked of each."""

import math
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from llamarl.scoring.judge import Judge
from llamarl.scoring.pool import RewardPool
from llamarl.scoring.scorer import text_item
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
    "a judge": JudgedScorer,
}
NEVER_ABSTAINS = (JudgedScorer,)


@pytest.fixture(scope="module", params=list(SCORERS))
def make(request, tmp_path_factory):
    """make(on_result) is a scorer that has started; each is closed at the end."""
    folder = tmp_path_factory.mktemp("scoring")
    (folder / "scoring.py").write_text(MODULE)
    made = []

    def make(on_result=lambda: None):
        made.append(SCORERS[request.param](on_result=on_result))
        made[-1].start()
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield make
        for scorer in made:
            scorer.close()


@pytest.fixture(scope="module")
def one_scorer(make):
    return make()


@pytest.fixture
def scorer(one_scorer):
    """The one scorer, with nothing to do."""
    yield one_scorer
    collect(one_scorer)


def ask(scorer, *asked, first=0):
    """Submit (prompt, completion, extra) under the keys that follow each other."""
    keys = range(first, first + len(asked))
    for key, (prompt, completion, extra) in zip(keys, asked):
        scorer.submit(key, text_item(prompt, completion, {"extra": extra}))
    scorer.release(keys)


def collect(scorer):
    """All outcomes, in the order in which they became known."""
    outcomes = scorer.poll()
    give_up = time.monotonic() + PATIENCE_S
    while pending := scorer.pending:
        assert time.monotonic() < give_up
        scorer.wait(0.1)
        come = scorer.poll()
        assert scorer.pending == pending - len(come), "submitted, and not yet returned"
        outcomes += come
    return outcomes


def test_much_to_do_is_busy_to_one_that_has_timed_nothing(make):
    scorer = make()
    assert not scorer.is_busy
    ask(scorer, *[("p", "c", key) for key in range(300)])
    assert scorer.is_busy
    collect(scorer)
    assert not scorer.is_busy


def test_every_item_is_answered_once_under_its_key(scorer):
    assert not scorer.is_busy and scorer.pending == 0
    asked = [("p" * (key % 5), "c", key) for key in range(300)]
    ask(scorer, *asked, first=7)
    assert scorer.pending == 300
    outcomes = collect(scorer)
    assert isinstance(scorer.name, str) and scorer.name
    assert sorted(key for key, _ in outcomes) == list(range(7, 307))
    assert all(outcome.value == (key - 7) % 5 + key - 7 for key, outcome in outcomes)
    assert scorer.poll() == [] and not scorer.is_busy


def test_an_error_and_an_abstention_are_no_score_and_say_why_and_it_goes_on(scorer):
    ask(scorer, ("prompt", "error", 0), ("prompt", "abstain", 1), ("prompt", "c", 2))
    outcomes = dict(collect(scorer))
    assert (outcomes[0].kind, outcomes[2].kind) == ("error", "score")
    assert math.isnan(outcomes[0].value) and "cannot score prompt" in outcomes[0].reason
    if not isinstance(scorer, NEVER_ABSTAINS):
        assert outcomes[1].kind == "abstain" and outcomes[1].reason
        assert math.isnan(outcomes[1].value)
    assert outcomes[2] == Outcome("score", 8.0, "")
    ask(scorer, ("pp", "error", 0))
    collect(scorer)
    ask(scorer, ("pp", "c", 0))
    assert collect(scorer) == [(0, Outcome("score", 2.0, ""))]


def test_who_waits_is_told_of_a_result_and_a_closed_scorer_has_none(make):
    heard = threading.Event()
    scorer = make(on_result=heard.set)
    ask(scorer, ("p", "c", 0))
    outcomes = scorer.poll()
    if not outcomes:
        assert heard.wait(PATIENCE_S)
    assert outcomes + collect(scorer) == [(0, Outcome("score", 1.0, ""))]
    ask(scorer, *[("p", "c", 0)] * 5)
    scorer.close()
    assert scorer.pending == 0
    scorer.close()


def test_a_wait_with_nothing_to_come_ends_by_itself(scorer):
    give_up = time.monotonic() + PATIENCE_S
    while scorer.wait(0.01):  # of two processes the second may still be starting
        assert time.monotonic() < give_up and scorer.poll() == []
