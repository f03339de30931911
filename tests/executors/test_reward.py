"""Reward alone, with fakes on both sides and a real pool of one worker."""

import dataclasses
import itertools
import json
import time
from operator import itemgetter
from random import Random

import pytest
import torch

from executors import reward as reward_module
from executors.reward import Reward
from llamarl.controller import ExecutorController
from llamarl.errors import RewardError
from llamarl.evaluation.judges import EvalJudge
from llamarl.evaluation.report import Samples
from llamarl.scoring import assembly
from llamarl.scoring.pool import RewardPool
from llamarl.scoring.routing import InTurn
from llamarl.tasks.parts import APART, EvalSet
from llamarl.types import Completion, EvalCompletion, Group, Outcome
from tests.build.completion import build_completion
from tests.evaluated import Said, own_set
from tests.executors.fakes import FakeStream
from tests.executors.pooled import FN, WORDS, make_prompt, train_prompt

DEADLINE_S = 30.0


@pytest.fixture
def build(build_reward):
    return build_reward


def completion(ticket, sample_index, word, *, finish_reason="stop", version=3):
    ids = [WORDS.index(word)] if word else []
    return build_completion(ticket, sample_index, ids, version=version, finish_reason=finish_reason)


def answer(prompt, sample, word, *, version=3):
    """Of a held-out prompt; sample 0 is the greedy one, and 1 .. k are those sampled."""
    ids = torch.tensor([WORDS.index(word)] if word else [], dtype=torch.int64)
    return EvalCompletion(
        prompt_index=prompt,
        greedy=sample == 0,
        sample_index=max(0, sample - 1),
        token_ids=ids,
        policy_versions=torch.full_like(ids, version),
        finish_reason="stop",
    )


def settle(executor):
    """Step until there is nothing to do and no score is awaited."""
    give_up = time.monotonic() + DEADLINE_S
    while executor.step() or executor._scorer.pending:
        assert time.monotonic() < give_up, executor.waiting_for()
    return executor.outputs.of(Group).records


def settle_when_woken(executor, num_groups):
    """Step until that many groups are sent: once, and again only after a wake, as a loop that
    waits does. A score may come, and wake, before the step that asked for it has ended.
    """
    give_up = time.monotonic() + DEADLINE_S
    sent = executor.outputs.of(Group).records
    while True:
        heard = executor.control.num_wakes
        executor.step()
        if len(sent) == num_groups:
            return sent
        while executor.control.num_wakes == heard:
            assert time.monotonic() < give_up, executor.waiting_for()
            time.sleep(0.001)


def test_an_error_can_name_the_step_that_the_newest_completion_is_of(build):
    executor = build()
    assert executor.step_at == 0
    feed = executor.inputs.of(Completion).records
    feed.extend(completion(7, i, "right", version=version) for i, version in enumerate((5, 4)))
    executor.inputs.of(EvalCompletion).records.append(answer(0, 0, "", version=9))
    settle(executor)
    assert executor.step_at == 5
    controller = object.__new__(ExecutorController)
    controller._current = executor
    assert controller._doing == "in reward, step 5, among ranks [0]"


def test_a_group_is_sent_when_its_last_completion_is_scored(build):
    executor = build()
    feed = executor.inputs.of(Completion).records
    feed.extend([completion(7, 1, "wrong"), completion(8, 0, "right")])
    assert settle(executor) == []
    assert (
        executor.waiting_for()
        == "data: 2 groups are begun; ticket 7 lacks 1 completions from the generator"
    )
    feed.extend([completion(7, 0, "right"), completion(8, 1, "right")])
    groups = {group.ticket: group for group in settle_when_woken(executor, 2)}
    assert groups[7].rewards.tolist() == [1.0, 0.0] and groups[8].rewards.tolist() == [1.0, 1.0]
    assert groups[7].token_ids.tolist() == [WORDS.index("right"), WORDS.index("wrong")]
    assert groups[7].outcomes == ("score", "score")
    assert executor.waiting_for() is None


def test_an_error_or_an_abstention_is_not_trained_on(build):
    executor = build(group_size=3)
    executor.inputs.of(Completion).records.extend(
        completion(0, i, w) for i, w in enumerate(("error", "abstain", "wrong"))
    )
    (group,) = settle(executor)
    assert group.outcomes == ("error", "abstain", "score")
    assert group.trained.tolist() == [False, False, True] and group.rewards[2] == 0.0
    assert executor.metrics.counters == {"reward/scored": 1, "reward/errors": 1}


def test_a_function_over_completions_sees_whole_groups_and_whole_evaluations(build):
    executor = build(fn="scoring:rank", group_size=3, eval_sets=own_set(2), num_eval_samples=1)
    feed = executor.inputs.of(Completion).records
    feed.extend([completion(7, 2, "wrong"), completion(8, 0, "right"), completion(7, 0, "right")])
    settle(executor)
    waited_for = "data: 2 groups are begun; ticket 7 lacks 1 completions from the generator"
    assert executor.waiting_for() == waited_for
    feed.append(completion(7, 1, "right"))
    feed.append(completion(8, 1, "right"))
    feed.append(completion(8, 2, "", finish_reason="aborted"))
    groups = {group.ticket: group for group in settle(executor)}
    assert groups[7].rewards.tolist() == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert groups[8].rewards[:2].tolist() == [1.0, 1.0]
    assert groups[8].trained.tolist() == [True, True, False]

    answers = executor.inputs.of(EvalCompletion).records
    answers.extend([answer(0, 0, "right"), answer(0, 1, "wrong"), answer(1, 0, "right")])
    settle(executor)
    assert executor.metrics.reports == []
    answers.append(answer(1, 1, "right"))
    settle(executor)
    ((version, metrics),) = executor.metrics.reports
    assert version == 3 and metrics["eval/reward"] == pytest.approx((0.5 + 1.0) / 2)


def test_an_aborted_completion_abstains_without_being_scored(build):
    executor = build()
    for i, word in enumerate(("right", "")):
        executor.inputs.of(Completion).records.append(
            completion(0, i, word, finish_reason="aborted")
        )
    (group,) = settle(executor)
    assert group.outcomes == ("abstain", "abstain") and not group.trained.any()
    assert group.finish_reasons == ("aborted", "aborted") and group.lengths.tolist() == [1, 0]
    assert executor.metrics.counters.get("reward/scored", 0) == 0


def test_accuracy_is_reported_once_a_version_and_leaves_out_what_has_no_score(build):
    executor = build()
    feed = executor.inputs.of(EvalCompletion).records
    feed.extend([answer(0, 0, "right", version=4), answer(0, 0, "right", version=5)])
    feed.append(answer(2, 0, "error", version=4))
    settle(executor)
    assert executor.metrics.reports == []
    assert (
        executor.waiting_for()
        == "data: 1 evaluation completions of policy version 4, from the generator"
    )
    feed.append(answer(1, 0, "right", version=4))
    assert settle(executor) == []
    ((step, values),) = executor.metrics.reports
    assert step == 4 and values == {
        "eval/reward": 1.0,
        "eval/accuracy": 1.0,
        "eval/errors": 1,
        "eval/length_mean": 1.0,
        "eval/left_out": 1,
        "eval/left_out_reason": "RuntimeError: cannot score eval 2 (scoring.py:5)",
    }
    feed.extend([answer(1, 0, "right", version=5), answer(2, 0, "right", version=5)])
    settle(executor)
    assert executor.metrics.reports[1:] == [
        (5, {"eval/reward": 1.0, "eval/accuracy": 1.0, "eval/errors": 0, "eval/length_mean": 1.0})
    ]


def test_a_function_is_told_what_was_sampled(build):
    with open("scoring.py", "a") as file:
        file.write(
            "\ndef sampled(prompt, completion, meta):\n"
            "    told = meta['sampled']\n"
            "    assert completion == 'right' and told['raw_text'] == 'right, and 1 more', told\n"
            "    return told['token_ids'][1] + 10 * told['num_tokens'] + 100 * told['ended']\n"
        )
    executor = build(
        fn="scoring:sampled",
        group_size=2,
        eval_sets=own_set(1),
        decode_raw=lambda ids: f"{WORDS[ids[0]]}, and {len(ids) - 1} more",
    )
    ids = torch.tensor([WORDS.index("right"), 7])
    mask = torch.ones(2, dtype=torch.bool)
    for sample, reason in enumerate(("stop", "length")):
        one = completion(4, sample, "right")
        logprobs = torch.zeros(2)
        changed = dict(token_ids=ids, generator_logprobs=logprobs, finish_reason=reason)
        changed["policy_versions"] = torch.zeros(2, dtype=torch.int64)
        changed |= {"loss_mask": mask, "restarts": ~mask}
        executor.inputs.of(Completion).records.append(dataclasses.replace(one, **changed))
    held_out = dataclasses.replace(
        answer(0, 0, "right"),
        token_ids=ids,
        policy_versions=torch.full_like(ids, 3),
        loss_mask=mask,
    )
    executor.inputs.of(EvalCompletion).records.append(held_out)
    (group,) = settle(executor)
    assert group.rewards.tolist() == [127.0, 27.0]
    ((_, values),) = executor.metrics.reports
    assert values["eval/reward"] == 127.0


def writes(folder):
    """What makes a judge that writes evaluations."""
    return lambda site: Samples(folder, success_above=None)


def test_what_is_answered_at_an_evaluation_is_written_with_its_scores(build, tmp_path):
    sets = own_set(2)
    written = writes(tmp_path / "samples")
    executor = build(eval_sets=sets, num_eval_samples=1, judges=[written])
    feed = executor.inputs.of(EvalCompletion).records
    feed.extend([answer(1, 1, "wrong"), answer(0, 0, "right"), answer(1, 0, "error")])
    settle(executor)
    assert not (tmp_path / "samples").exists(), "an evaluation is written when it is whole"
    cut = dataclasses.replace(answer(0, 1, "right"), finish_reason="aborted")
    feed.append(cut)
    settle(executor)
    (file,) = (tmp_path / "samples").iterdir()
    assert file.name == "step_3.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kept = itemgetter("number", "sample", "prompt", "completion", "outcome", "score")
    assert [kept(row) for row in rows] == [
        (0, 0, "eval 0", "right", "score", 1.0),
        (0, 1, "eval 0", "right", "abstain", None),
        (1, 0, "eval 1", "error", "error", None),
        (1, 1, "eval 1", "wrong", "score", 0.0),
    ]
    assert [row["finish_reason"] for row in rows] == ["stop", "aborted", "stop", "stop"]
    assert rows[1]["reason"] == "the completion was aborted" and "reason" not in rows[0]


def test_samples_that_cannot_be_written_are_warned_of_once_and_end_nothing(build, tmp_path, caplog):
    (tmp_path / "samples").write_text("a file in its place")
    sets = own_set(1)
    executor = build(eval_sets=sets, judges=[writes(tmp_path / "samples")])
    for version in (3, 4):
        executor.inputs.of(EvalCompletion).records.append(answer(0, 0, "right", version=version))
        settle(executor)
    assert [step for step, _ in executor.metrics.reports] == [3, 4]
    assert caplog.text.count("writes no samples") == 1


class Patient(EvalJudge):
    """A judge that speaks when it is told to."""

    def __init__(self):
        self.may_speak = False
        self.begun = []

    def judge(self, version, answers):
        ((one, own),) = answers.items()
        self.begun.append((version, [answer.item.text for answer in own]))
        yield
        while not self.may_speak:
            yield
        return {one: Said({"eval/judged": float(len(own))})}


def test_an_evaluation_is_reported_once_its_judges_have_spoken(build):
    judge = Patient()
    executor = build(eval_sets=own_set(2), judges=[lambda site: judge])
    feed = executor.inputs.of(EvalCompletion).records
    feed.extend([answer(1, 0, "wrong"), answer(0, 0, "right"), answer(0, 0, "")])
    settle(executor)
    assert judge.begun == [(3, ["right", "wrong"])] and not executor.metrics.reports
    told = "scores: judgements of the evaluation of policy version 3"
    assert executor.waiting_for() == told
    judge.may_speak = True
    assert executor.step()
    ((step, values),) = executor.metrics.reports
    assert step == 3 and values["eval/reward"] == 0.5 and values["eval/judged"] == 2.0
    assert executor.waiting_for() is None and not executor.step()


def test_sampled_answers_are_reported_with_the_greedy_ones(build):
    executor = build(eval_sets=own_set(2), num_eval_samples=2)
    words = {
        (0, 0): "right",
        (0, 1): "wrong",
        (0, 2): "right",
        (1, 0): "right",
        (1, 1): "abstain",
        (1, 2): "wrong",
    }
    executor.inputs.of(EvalCompletion).records.extend(
        answer(j, i, word) for (j, i), word in words.items()
    )
    assert settle(executor) == []
    ((step, values),) = executor.metrics.reports
    assert step == 3 and values["eval/accuracy"] == 1.0
    assert (values["eval/pass_at_1_sampled"], values["eval/pass_at_k"]) == (0.25, 0.5)


def right_pairs(num_tickets):
    """Return both completions of each ticket, all of them right."""
    places = itertools.product(range(num_tickets), range(2))
    return [completion(ticket, sample, "right") for ticket, sample in places]


@pytest.mark.parametrize("output", ["scored", "groups"])
def test_groups_wait_for_room_and_completions_then_stay_in_their_channel(build, output):
    executor = build(output=output)
    sink = executor.outputs.of(Group)
    sink.room = 1
    feed = executor.inputs.of(Completion).records
    feed.extend(right_pairs(2))
    assert len(settle(executor)) == 1
    assert executor.waiting_for() == f"room: in channel {output}, which the trainer empties"
    feed.append(completion(9, 0, "right"))
    executor.inputs.of(EvalCompletion).records.extend(answer(j, 0, "right") for j in range(3))
    settle(executor)
    assert len(feed) == 1 and len(executor.metrics.reports) == 1  # evaluations need no room
    sink.room = 2
    assert [g.ticket for g in settle(executor)] == [0, 1] and not feed


def test_no_more_is_taken_than_the_pool_may_hold(build, monkeypatch):
    monkeypatch.setattr(reward_module, "MAX_PENDING", 5)
    executor = build()
    feed = executor.inputs.of(Completion).records
    feed.extend(right_pairs(10))
    executor.step()
    assert len(feed) == 15
    assert sorted(g.ticket for g in settle(executor)) == list(range(10))


def test_an_evaluation_needs_no_room_and_is_taken_at_once(build, monkeypatch):
    monkeypatch.setattr(reward_module, "MAX_PENDING", 2)
    executor = build()
    executor.inputs.of(Completion).records.extend(right_pairs(10))
    executor.step()
    feed = executor.inputs.of(EvalCompletion).records
    feed.extend(answer(j, 0, "right") for j in range(3))
    executor.step()
    assert not feed
    assert sorted(g.ticket for g in settle(executor)) == list(range(10))


def test_too_many_errors_end_the_run_and_say_why(build):
    executor = build(max_error_rate=0.3)
    words = ["right"] * 33 + ["error"] * 30
    executor.inputs.of(Completion).records.extend(completion(i, 0, w) for i, w in enumerate(words))
    settle(executor)  # 30 of 63 are more than 30 %, but too few to tell
    executor.inputs.of(Completion).records.append(completion(63, 0, "error"))
    with pytest.raises(
        RewardError, match=rf"reward {FN}: 48% of the last 64 scores are errors, above .*=0.3"
    ) as error:
        settle(executor)
    assert str(error.value).count("RuntimeError: cannot score train") == 3


@pytest.mark.parametrize("limit, enough", [(0.1, 6), (0.5, 19), (0.0, 1)])
def test_a_run_whose_completions_are_all_errors_ends_soon(limit, enough):
    """With a limit of 10 %, errors of all of six prompts come once in a million times."""
    rate = assembly.ErrorRate("f", limit)
    for number in range(enough):
        rate.check()
        rate.add(Outcome.error(f"reason {number % 2}"), number)
    with pytest.raises(RewardError, match=f"100% of the last {enough} scores are errors"):
        rate.check()


def test_a_score_among_errors_or_no_limit_makes_them_wait_for_a_rate():
    for limit, first in ((0.1, Outcome.score(1.0)), (1.0, Outcome.error("x"))):
        rate = assembly.ErrorRate("f", limit)
        rate.add(first, 0)
        for number in range(1, assembly.MIN_OUTCOMES - 1):
            rate.add(Outcome.error("x"), number)
            rate.check()


def test_the_errors_of_one_prompt_count_once_where_all_are_errors(build):
    """The answers to a held-out prompt, and groups: ten completions of each, and all are errors."""
    executor = build(max_error_rate=0.1, group_size=10, num_eval_samples=9)
    executor.inputs.of(EvalCompletion).records.extend(answer(0, i, "error") for i in range(10))
    for ticket in range(4):
        records = [completion(ticket, i, "error") for i in range(10)]
        executor.inputs.of(Completion).records.extend(records)
    settle(executor)
    executor.inputs.of(Completion).records.append(completion(4, 0, "error"))
    with pytest.raises(RewardError, match="100% of the last 51 scores are errors"):
        settle(executor)


def test_bad_rows_do_not_make_a_rate_however_large_their_groups_are():
    """The bad rows fail at once, while the other groups are still scored."""
    rate = assembly.ErrorRate("f", 0.1)
    for ticket in range(40):
        kind = Outcome.error("bad row") if ticket < 3 else Outcome.score(1.0)
        for _ in range(64):
            rate.add(kind, ticket)
            rate.check()


@pytest.mark.parametrize("size", [1, 64])
def test_errors_of_half_of_each_group_make_a_rate_whatever_its_size(size):
    rate = assembly.ErrorRate("f", 0.4)
    with pytest.raises(RewardError, match=r"5\d% of the last"):
        for number in range(4 * 512):
            rate.add(Outcome.score(1.0) if number % 2 else Outcome.error("no"), number // size)
            rate.check()


def test_the_rate_is_of_the_newest_prompts():
    rate = assembly.ErrorRate("f", 0.5)
    for number in range(1000):
        rate.add(Outcome.score(1.0), number)
    for number in range(1000, 1000 + assembly.ERROR_WINDOW // 2):
        rate.add(Outcome.error("no"), number)
        rate.check()  # at most half of the window
    with pytest.raises(RewardError, match="5[67]% of the last 256 scores"):
        for number in range(2000, 2000 + assembly.ERROR_WINDOW // 8):
            rate.add(Outcome.error("no"), number)
            rate.check()


@pytest.mark.parametrize("size, seed", [(4, 0), (64, 1)])
def test_bad_rows_at_half_of_the_limit_end_no_run(size, seed):
    draws = Random(seed)
    rate = assembly.ErrorRate("f", 0.1)
    for ticket in range(2000):
        kind = Outcome.error("bad row") if draws.random() < 0.05 else Outcome.score(1.0)
        for _ in range(size):
            rate.add(kind, ticket)
        rate.check()


def test_some_errors_do_not(build, caplog):
    executor = build(max_error_rate=0.6)
    words = ["error", "right"] * 40
    executor.inputs.of(Completion).records.extend(completion(i, 0, w) for i, w in enumerate(words))
    settle(executor)
    assert executor.metrics.counters["reward/errors"] == 40
    assert len(caplog.records) == assembly.LOGGED_REASONS
    assert "its completion is masked: RuntimeError: cannot score train 0" in caplog.text


def test_a_wrong_function_is_an_error_of_setup(build):
    with pytest.raises(
        ValueError,
        match="reward.fn=scoring:scored: scoring has no function scored; did you mean score",
    ):
        build(fn="scoring:scored")


def test_teardown_is_harmless_before_setup():
    Reward(
        prompts=FakeStream(train_prompt),
        eval_prompts=make_prompt,
        decode=str,
        make_scorer=lambda site: InTurn(RewardPool(FN)),
        group_size=2,
        eval_sets=own_set(0),
    ).teardown()


def test_a_function_over_completions_sees_each_set_by_itself(build):
    sets = (EvalSet("", 0, 1), EvalSet("a", APART, 1))
    executor = build(fn="scoring:rank", eval_sets=sets, num_eval_samples=1)
    executor.eval_prompts = lambda number: make_prompt("the same in both")
    feed = executor.inputs.of(EvalCompletion).records
    feed.extend([answer(0, 0, "right"), answer(APART, 0, "right"), answer(0, 1, "wrong")])
    settle(executor)
    told = "data: 1 evaluation completions of eval.sets.a of policy version 3, from the generator"
    assert executor.waiting_for() == told and executor.metrics.reports == []
    feed.append(answer(APART, 1, "right"))
    settle(executor)
    ((step, values),) = executor.metrics.reports
    assert step == 3
    assert values["eval/reward"] == 0.5  # of right and wrong; among all four it would be 3/4
    assert values["eval/a/reward"] == 1.0


def test_what_is_answered_is_written_with_its_set_and_its_number_there(build, tmp_path):
    sets = (EvalSet("", 0, 1), EvalSet("a", APART, 2))
    executor = build(eval_sets=sets, judges=[writes(tmp_path / "samples")])
    feed = executor.inputs.of(EvalCompletion).records
    feed.extend(answer(number, 0, "right") for number in (APART + 1, 0, APART))
    settle(executor)
    lines = (tmp_path / "samples" / "step_3.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row.get("set"), row["number"]) for row in rows] == [(None, 0), ("a", 0), ("a", 1)]
