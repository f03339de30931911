"""A judge behind an endpoint: what it is asked, what its replies become, and each way to fail."""

import asyncio
import email.utils
import json
import logging
import re
import socket
import time
from contextlib import contextmanager
from itertools import pairwise, permutations

import pytest
import tenacity
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.scoring import endpoint as endpoint_module
from llamarl.scoring.endpoint import NoReply, seconds_of
from llamarl.scoring.judge import Judge, choice_in, number_in
from llamarl.scoring.scorer import text_item
from llamarl.types import Outcome
from llamarl.words.texts import url_problem
from tests.build.kind_settings import judge_settings
from tests.judge_server import HANG_UP, NO_REPLY, JudgeServer, Reply, between, longer

PATIENCE_S = 60.0
KEY = "sk-a-secret-that-must-not-be-seen"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(endpoint_module, "FIRST_PAUSE_S", 0.001)


@contextmanager
def started(server, **options):
    """A judge of the server's, started."""
    judge = Judge(judge_settings(server.url, **options))
    try:
        judge.start()
        yield judge
    finally:
        judge.close()


def judged(judge, items):
    """The outcomes of (prompt, completion, meta), one batch, in order."""
    for key, item in enumerate(items):
        judge.submit(key, text_item(*item))
    judge.release(range(len(items)))
    outcomes = {}
    give_up = time.monotonic() + PATIENCE_S
    while judge.pending:
        assert time.monotonic() < give_up
        judge.wait(0.1)
        outcomes.update(judge.poll())
    return [outcomes[key] for key in range(len(items))]


def asked(reply, items, **options):
    """The outcomes of one batch, and the server that was asked."""
    with JudgeServer(reply) as server, started(server, **options) as judge:
        return judged(judge, items), server


def asked_once(reply, **options):
    """The outcome of one completion, and the server that was asked."""
    (outcome,), server = asked(reply, [("p", "c", {})], **options)
    return outcome, server


def values_of(outcomes):
    return [outcome.value for outcome in outcomes]


# --- What it is asked, and what that becomes ---


def test_a_number_becomes_a_reward_from_0_to_1():
    items = [("Why?", "c" * size, {}) for size in (1, 4, 10)]
    outcomes, server = asked(lambda q: f"Fine. Score: {len(between(q, 'answer'))}", items)
    assert values_of(outcomes) == pytest.approx([0.0, 3 / 9, 1.0])
    body = min(server.bodies, key=lambda body: len(body["messages"][0]["content"]))
    assert body["model"] == "wise" and body["temperature"] == 0.0 and body["max_tokens"] == 1024
    assert between(server.questions[0], "request") == "Why?"
    assert "from 1 (useless) to 10" in server.questions[0]
    assert set(server.paths) == {"/v1/chat/completions"}


def test_a_template_of_ones_own_is_filled_once(tmp_path):
    template = tmp_path / "template"
    template.write_text("{answer}|{prompt}|{completion}|{lowest}|{highest}|{other}")
    item = ("{completion}", "{prompt}", {"answer": "{a}"})
    options = {"template": str(template), "lowest": 0, "highest": 5}
    (outcome,), server = asked(lambda q: "5", [item], **options)
    assert server.questions == ["{a}|{completion}|{prompt}|0|5|{other}"]
    assert outcome == Outcome("score", 1.0, "")


@pytest.mark.parametrize(
    "ask, template, what", [("score", "{a}{b}", "{completion}"), ("group", "{a}", "{b}")]
)
def test_a_template_without_what_is_judged_is_refused(ask, template, what, tmp_path):
    file = tmp_path / "template"
    file.write_text(template)
    with pytest.raises(ValueError, match=f"reward.template lacks {re.escape(what)}"):
        Judge(judge_settings(ask=ask, template=str(file)))


def test_a_group_is_compared_pair_by_pair_in_both_orders():
    items = [("p", text, {"answer": "x"}) for text in ("aa", "a", "aaa", "bb")]
    outcomes, server = asked(longer, items, ask="group")
    # "aa" loses to "aaa", ties with "bb", beats "a"
    assert values_of(outcomes) == pytest.approx([1.5 / 3, 0.0, 1.0, 1.5 / 3])
    orders = {(between(q, "answer_a"), between(q, "answer_b")) for q in server.questions}
    texts = [text for _, text, _ in items]
    assert orders == set(permutations(texts, 2))
    assert len(server.questions) == 12


def test_who_prefers_a_place_has_no_preference(caplog):
    caplog.set_level(logging.INFO)
    items = [("p", text, {}) for text in ("a", "b", "c")]
    outcomes, _ = asked(lambda q: "Verdict: A", items, ask="group")
    assert values_of(outcomes) == [0.5, 0.5, 0.5]
    assert "3 order_ties, 3 pairs, 7 requests" in caplog.text


def test_only_completions_of_one_prompt_are_compared_and_equal_ones_are_not_asked_about():
    items = [("p", "a", {}), ("q", "bb", {}), ("p", "a", {}), ("q", "b", {}), ("r", "a", {})]
    outcomes, server = asked(longer, items, ask="group")
    assert values_of(outcomes[:4]) == [0.5, 1.0, 0.5, 0.0]
    assert outcomes[4].kind == "abstain" and "no other completion" in outcomes[4].reason
    assert len(server.questions) == 2


def test_a_completion_is_compared_with_the_prompts_own_answer():
    items = [("p", text, {"answer": "four"}) for text in ("five5", "six", "four", "nine")]
    outcomes, _ = asked(longer, [*items, ("p", "x", {})], ask="reference")
    assert values_of(outcomes[:4]) == [1.0, 0.0, 0.5, 0.5]
    assert outcomes[4].kind == "error" and "set task.answer_key" in outcomes[4].reason


@pytest.mark.parametrize(
    "read, reply, found",
    [
        (number_in, "Score: 7", 7),
        (number_in, "It has 3 faults.\n**Score:** 4/10", 4),
        (number_in, "Score: 3. No, wait.\nscore = **6.5**", 6.5),
        (number_in, "8/10.", 8),
        (number_in, "I would say 7 of 10", None),
        (number_in, "Score: 7.5-8", None),
        (number_in, "Score: 7.25 - 9.5", None),
        (number_in, "Score: 7.", 7),
        (choice_in, "Verdict: A", "a"),
        (choice_in, "A is worse.\n**Verdict:** B.\n", "b"),
        (choice_in, "Verdict: A\nOn second thought:\nverdict: tie", "tie"),
        (choice_in, "so [[B]]", "b"),
        (choice_in, "**A**", "a"),
        (choice_in, "Verdict: A is as good as B", None),
        (choice_in, "Verdict: a", None),
    ],
)
def test_only_what_is_said_to_be_the_score_or_the_verdict_is_one(read, reply, found):
    assert read(reply) == found


# --- What fails ---

BUSY = Reply(status=503, body=b"busy")
REDIRECT = Reply(status=307, headers={"Location": "http://10.0.0.1/"})
WAIT = Reply(status=429, headers={"Retry-After": "3600"}, body=b"")


@pytest.mark.parametrize(
    "reply, reason",
    [
        ("lovely", 'judge nonsense: no "Score: N" in the reply: lovely'),
        ("Score: 11", "judge nonsense: the score 11 is not within 1 to 10"),
        (Reply(body=b"<html>"), "judge nonsense: no chat completion: <html>"),
        (Reply(body=b"[]"), "judge nonsense: no chat completion: []"),
        (Reply(body=b"[" * 100_000), "judge nonsense: no chat completion: [[["),
        (Reply(text=None), "judge nonsense: its content is no text, but NoneType"),
        (Reply(text="Score: 1", finish_reason="length"), "raise reward.max_tokens"),
        (Reply(body=b"x" * (1 << 21)), "the reply is longer than 1048576 bytes"),
        (Reply(status=400, body=b"no such\nmodel"), "judge refused: HTTP 400: no such model"),
        (REDIRECT, "a redirect to http://10.0.0.1/, which is not followed"),
        (WAIT, "it asks to wait more than 300 s"),
    ],
)
def test_what_will_not_pass_is_an_error_at_once(reply, reason):
    outcome, server = asked_once(lambda q: reply)
    assert outcome.kind == "error" and outcome.value != outcome.value
    assert reason in outcome.reason
    assert len(server.questions) == 1


@pytest.mark.parametrize("busy", [Reply(status=408, body=b"busy"), BUSY])
def test_what_may_pass_is_asked_again(busy):
    replies = [busy, busy, "Score: 10"]
    outcome, server = asked_once(lambda q: replies.pop(0))
    assert outcome == Outcome("score", 1.0, "") and len(server.questions) == 3


@pytest.mark.parametrize(
    "reply, reason", [(BUSY, "judge refused: HTTP 503: busy"), (HANG_UP, "judge down: ")]
)
def test_after_the_last_retry_it_is_an_error(reply, reason):
    outcome, server = asked_once(lambda q: reply, max_retries=2)
    assert outcome.kind == "error" and outcome.reason.startswith(reason)
    assert len(server.questions) == 3


def test_a_server_that_asks_to_wait_is_given_its_time(monkeypatch):
    pause_s = endpoint_module.Endpoint._pause_s
    pauses = []

    def at_once(endpoint, state):
        pauses.append(pause_s(endpoint, state))
        return 0.0

    monkeypatch.setattr(endpoint_module.Endpoint, "_pause_s", at_once)
    replies = [Reply(status=429, headers={"Retry-After": "7"}, body=b""), "Score: 10"]
    outcome, _ = asked_once(lambda q: replies.pop(0))
    assert outcome.value == 1.0 and len(pauses) == 1 and pauses[0] >= 7.0


def test_pauses_grow_and_are_not_equal(monkeypatch):
    monkeypatch.setattr(endpoint_module, "FIRST_PAUSE_S", 1.0)
    endpoint = endpoint_module.Endpoint(judge_settings(), "reward")

    def pause_s(attempt, retry_after_s=None):
        state = tenacity.RetryCallState(None, None, (), {})
        state.attempt_number = attempt
        failure = NoReply("down", "gone", may_pass=True, retry_after_s=retry_after_s)
        state.set_exception((NoReply, failure, None))
        return endpoint._pause_s(state)

    for attempt, longest_s in ((1, 1.0), (4, 8.0), (21, 30.0), (2001, 30.0)):
        pauses = {pause_s(attempt) for _ in range(100)}
        assert len(pauses) > 1
        assert longest_s / 2 <= min(pauses) and max(pauses) <= longest_s
    assert pause_s(1, retry_after_s=7.0) >= 7.0


def test_seconds_of_a_retry_after():
    assert seconds_of(None) is None and seconds_of("soon") is None
    assert seconds_of("Mon, 01 Jan 0001 00:00:00 -0000") in (None, 0.0)
    assert seconds_of("12") == 12.0
    assert seconds_of("\x1f12") == 12.0, "white space to str.strip, and not to float"
    assert seconds_of("Mon, 01 Jan 2024 00:00:00 +99999999999999999999") is None
    assert seconds_of(email.utils.formatdate(time.time() - 100)) == 0.0
    assert seconds_of(email.utils.formatdate(time.time() + 1e6)) > 1e5


def test_a_slow_judge_costs_its_own_completion_alone():
    def reply(question):
        return NO_REPLY if between(question, "answer") == "slow" else "Score: 10"

    items = [("p", text, {}) for text in ("fast", "slow", "also fast")]
    outcomes, server = asked(reply, items, timeout_s=2.0)
    assert len(server.questions) == 3  # it is not asked again
    assert [outcome.kind for outcome in outcomes] == ["score", "error", "score"]
    assert outcomes[1].reason == "judge slow: no reply in reward.timeout_s=2"


def test_all_tries_of_a_question_have_one_deadline(monkeypatch):
    limits = []

    async def fails(endpoint, body, limit_s):
        limits.append(limit_s)
        raise NoReply("down", "gone", may_pass=True)

    async def ask():
        endpoint = endpoint_module.Endpoint(judge_settings(timeout_s=9.0), "reward")
        with pytest.raises(NoReply, match="gone"):
            await endpoint.ask("why?")
        await endpoint.close()

    monkeypatch.setattr(endpoint_module.Endpoint, "_fetch", fails)
    asyncio.run(ask())
    assert len(limits) == 6 and limits[0] == 9.0
    assert all(later < sooner for sooner, later in pairwise(limits))


def test_half_a_surrogate_pair_is_asked_about_as_a_question_mark():
    items = [("p", "c", {"answer": "\ud800"})]
    (outcome,), server = asked(lambda q: "Score: 10", items, ask="reference")
    assert outcome.kind == "error"  # "Score: 10" is no verdict
    for question in server.questions:
        assert {between(question, f"answer_{place}") for place in "ab"} == {"c", "?"}


def test_no_reply_of_a_judge_raises_anything_but_that_it_failed():
    endpoint = endpoint_module.Endpoint(judge_settings(), "reward")
    texts = st.text(st.characters(exclude_categories=()), max_size=40)
    parts = ["Score: ", "Verdict:", "[[A", "9" * 400, " " * 500, "7/10", "[" * 2000]
    said = st.lists(texts | st.sampled_from(parts), max_size=4).map("".join)
    message = said.map(lambda text: json.dumps({"choices": [{"message": {"content": text}}]}))

    @settings(max_examples=150)
    @given(message | said)
    def check(content):
        try:
            text, _ = endpoint._read(content.encode("utf-8", "surrogatepass"))
        except NoReply:
            return
        number = number_in(text)
        assert number is None or isinstance(number, float)
        assert choice_in(text) in (None, "a", "b", "tie")
        assert seconds_of(text) is None or seconds_of(text) >= 0.0

    check()
    asyncio.run(endpoint.close())


def test_a_failed_pair_masks_both_of_it_and_nobody_else():
    def reply(question):
        both = {between(question, "answer_a"), between(question, "answer_b")}
        return "who knows" if both == {"a", "bb"} else longer(question)

    items = [("p", text, {}) for text in ("a", "bb", "ccc")]
    outcomes, _ = asked(reply, items, ask="group")
    assert [outcome.kind for outcome in outcomes] == ["error", "error", "score"]
    assert "judge nonsense" in outcomes[0].reason and outcomes[2].value == 1.0


def test_no_more_than_max_parallel_requests_are_under_way():
    def reply(question):
        time.sleep(0.02)
        return "Score: 10"

    outcomes, server = asked(reply, [("p", str(i), {}) for i in range(30)], max_parallel=3)
    assert {outcome.value for outcome in outcomes} == {1.0}
    assert server.most_at_once <= 3


# --- The start ---


def test_a_judge_that_is_down_is_told_at_the_start():
    section = "reward.parts.taste"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens there
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        judge = Judge(judge_settings(url, max_retries=1), section)
        with pytest.raises(ValueError, match=f"^{section}.url={url}: judge down: Connect"):
            judge.start()
        judge.close()


def test_a_judge_that_refuses_is_told_at_the_start():
    with JudgeServer(lambda q: "", probe_reply=Reply(status=401, body=b"who?")) as server:
        with pytest.raises(ValueError, match="HTTP 401: who.; reward.api_key_env names"):
            with started(server):
                pass


@pytest.mark.parametrize(
    "url, problem",
    [
        ("https://me:secret@host/v1", "holds a user name, a password"),
        ("https://host/v1?key=secret", "a query"),
        ("host:8000/v1", "needs the form"),
        ("http://me:secret@ho\N{ACCOUNT OF}st/v1", "is no url; it needs the form"),
        ("http://host/v1\n", "holds a space or a sign that cannot be printed"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_and_not_repeated(url, problem):
    with pytest.raises(ValueError) as error:
        Judge(judge_settings(url))
    assert problem in str(error.value) and "secret" not in str(error.value)
    assert url_problem("http://[::1]:8000/v1") is None


# --- Credentials ---


def test_the_key_is_sent_and_stands_nowhere_else(monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_KEY", KEY)
    busy = Reply(status=503, body=f"busy, {KEY}".encode())  # which is tried again
    replies = [busy, "Score: 10", Reply(status=400, body=f"bad key {KEY}".encode())]
    with JudgeServer(lambda q: replies.pop(0)) as server:
        with started(server, api_key_env="MY_KEY", max_parallel=1) as judge:
            outcomes = judged(judge, [("p", "c", {}), ("p", "d", {})])
            assert KEY not in judge.name and KEY not in repr(judge._settings)
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert sorted(outcome.kind for outcome in outcomes) == ["error", "score"]
    assert any("bad key (the key)" in outcome.reason for outcome in outcomes)
    assert KEY not in caplog.text


def test_without_a_name_no_key_is_sent_whatever_the_environment_holds(monkeypatch):
    for name in ("OPENAI_API_KEY", "http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    outcome, server = asked_once(lambda q: "Score: 10")
    assert outcome == Outcome("score", 1.0, "")
    assert all("Authorization" not in headers for headers in server.headers)


@pytest.mark.parametrize("value", [None, "two\nlines", "h\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_a_key_that_is_missing_or_fits_no_header_is_refused_unseen(monkeypatch, value):
    monkeypatch.delenv("MY_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("MY_KEY", value)
    with pytest.raises(ValueError, match="reward.api_key_env=MY_KEY") as error:
        Judge(judge_settings(api_key_env="MY_KEY"))
    assert not value or value not in str(error.value)


def test_a_key_that_travels_unencrypted_to_another_host_is_warned_of(monkeypatch, caplog):
    monkeypatch.setenv("MY_KEY", KEY)
    urls = ["http://127.0.0.1:1/v1", "http://localhost:1/v1", "https://judge.example/v1"]
    for url in (*urls, "http://judge.example/v1"):
        assert not caplog.records
        endpoint_module.Endpoint(judge_settings(url, api_key_env="MY_KEY"), "reward")
    assert "the key travels unencrypted" in caplog.text and KEY not in caplog.text
