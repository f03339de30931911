"""Reward functions over all completions of a prompt: their own form, and TRL's."""

import itertools

import pytest

from llamarl.scoring.pool import RewardPool, check_reward
from llamarl.scoring.scorer import text_item
from llamarl.tasks.forms import batched, form_of, with_sampled
from llamarl.types import Outcome
from tests.build.user_module import write_modules

USER_MODULE = '''
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


@pytest.fixture(autouse=True)
def user_directory(tmp_path, monkeypatch):
    # A first call has timeout_s, as others.
    monkeypatch.setattr("llamarl.scoring.pool.FIRST_CALL_S", 0.0)
    write_modules(tmp_path, monkeypatch, my_rewards=USER_MODULE, kinds=KINDS_OF_SCORES)


def score(name, samples, **options):
    with RewardPool(f"my_rewards:{name}", **options) as pool:
        return pool.score(samples)


def values(name, samples, **options):
    outcomes = score(name, samples, **options)
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
    with RewardPool("my_rewards:rank") as pool:
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
    for (what, _, _), outcome in zip(samples, score("odd", samples), strict=True):
        assert outcome.kind == "error" and said[what] in outcome.reason


def test_each_value_of_a_list_is_judged_by_itself():
    outcomes = score("odd", [("p", str(i), {"what": "values"}) for i in range(5)])
    kinds = [outcome.kind for outcome in outcomes]
    assert kinds == ["error", "error", "abstain", "error", "score"]
    assert "finite" in outcomes[0].reason and outcomes[4] == Outcome("score", 0.5, "")


@pytest.mark.slow
def test_a_call_that_overruns_costs_its_own_completions_alone():
    samples = [("p", "1", {}), ("q", "1", {}), ("p", "2", {}), ("r", "1", {})]
    outcomes = score("hang_on_two", samples, timeout_s=1.25)
    assert [outcome.kind for outcome in outcomes] == ["error", "score", "error", "score"]
    limit = "took longer than reward.timeout_s=1.25 for each of the 2 completions"
    assert limit in outcomes[0].reason


def test_the_time_limit_of_a_call_is_that_of_each_completion():
    assert values("slow", [("p", str(i), {}) for i in range(8)], timeout_s=0.7) == [1.0] * 8


def test_a_function_of_trls_form_gets_the_meta_as_columns_and_takes_what_it_names():
    meta = {"answer": "2", "level": 3, "prompt": "1+1="}
    outcomes = score("trl", [("1+1=", text, meta) for text in ("2", "3", "skip")])
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
    *others, absent = score("compute_score", [("q", "4", meta) for meta in (*wrong, {})])
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
        check_reward(f"my_rewards:{name}", [])
    assert reason in str(error.value)
