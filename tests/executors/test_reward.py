"""Reward alone, with fakes on both sides and a real pool of one worker; and attacks, which are
scored by the mean over the answers to them.
"""

import itertools
import json
import math
import random
import time
from functools import partial
from operator import itemgetter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executors import reward as reward_module
from executors.reward import Reward
from llamarl.controller import ExecutorController
from llamarl.errors import RewardError
from llamarl.evaluation.judges import EvalJudge
from llamarl.evaluation.report import Samples
from llamarl.scoring import assembly
from llamarl.scoring.pool import RewardPool
from llamarl.scoring.replies import ReplyMean, ReplySettings, mean_outcome
from llamarl.scoring.routing import InTurn
from llamarl.scoring.scorer import Item
from llamarl.tasks.parts import APART, EvalSet
from llamarl.types import Completion, EvalCompletion, Group, Outcome, Prompt, Replied
from tests.build.completion import build_completion
from tests.build.eval_completion import build_eval_completion
from tests.build.user_module import write_modules
from tests.evaluated import Said, own_set
from tests.executors.fakes import FakeScorer, FakeStream, give, seat

DEADLINE_S = 30.0
FN = "scoring:score"
SCORING = '''
def score(prompt, completion, meta):
    """1 for the answer; what the prompt asks for by name otherwise."""
    if completion == "error":
        raise RuntimeError("cannot score " + prompt)
    if completion == "abstain":
        return None
    return float(completion == meta["answer"])


def rank(prompts, completions, metas):
    """The share of its group's completions that each equals."""
    return [completions.count(c) / len(completions) for c in completions]


def sampled(prompt, completion, meta):
    told = meta["sampled"]
    assert completion == "right" and told["raw_text"] == "right, and 1 more", told
    return told["token_ids"][1] + 10 * told["num_tokens"] + 100 * told["ended"]
'''
WORDS = ["error", "abstain", "right", "wrong", ""]  # token id -> text; the answer is "right"


def decode(ids):
    return WORDS[ids[0]] if ids else ""


def make_prompt(text):
    return Prompt(torch.tensor([1, 2]), text, {"answer": "right"})


def reward_of(fn=FN, **options):
    settings = {"group_size": 2, "eval_sets": own_set(3), **options}
    return Reward(
        prompts=FakeStream(lambda ticket: make_prompt(f"train {ticket}")),
        eval_prompts=lambda number: make_prompt(f"eval {number}"),
        decode=decode,
        make_scorer=lambda site: InTurn(RewardPool(fn, on_result=site.on_result)),
        **settings,
    )


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Builds rewards whose pool has one worker, in the folder of SCORING."""
    write_modules(tmp_path, monkeypatch, scoring=SCORING)
    built = []

    def build(*args, **options):
        built.append(reward_of(*args, **options))
        return seat(built[-1])

    yield build
    for executor in built:
        executor.teardown()


def completion(ticket, sample_index, word, *, finish_reason="stop", version=3, **fields):
    ids = [WORDS.index(word)] if word else []
    changes = {"finish_reason": finish_reason, "version": version, **fields}
    return build_completion(ticket, sample_index, ids, **changes)


def answer(prompt, sample, word, *, version=3, **fields):
    ids = [WORDS.index(word)] if word else []
    return build_eval_completion(prompt, sample, ids, version=version, **fields)


def settle(executor, *records):
    """Step until there is nothing to do and no score is awaited."""
    give(executor, *records)
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
    news = [completion(7, i, "right", version=version) for i, version in enumerate((5, 4))]
    settle(executor, *news, answer(0, 0, "", version=9))
    assert executor.step_at == 5
    controller = object.__new__(ExecutorController)
    controller._current = executor
    assert controller._doing == "in reward, step 5, among ranks [0]"


def test_a_group_is_sent_when_its_last_completion_is_scored(build):
    executor = build()
    assert settle(executor, completion(7, 1, "wrong"), completion(8, 0, "right")) == []
    waits = "data: 2 groups are begun; ticket 7 lacks 1 completions from the generator"
    assert executor.waiting_for() == waits
    give(executor, completion(7, 0, "right"), completion(8, 1, "right"))
    groups = {group.ticket: group for group in settle_when_woken(executor, 2)}
    assert groups[7].rewards.tolist() == [1.0, 0.0] and groups[8].rewards.tolist() == [1.0, 1.0]
    assert groups[7].token_ids.tolist() == [WORDS.index("right"), WORDS.index("wrong")]
    assert groups[7].outcomes == ("score", "score")
    assert executor.waiting_for() is None


def test_an_error_an_abstention_or_an_aborted_completion_is_not_trained_on(build):
    executor = build(group_size=5)
    words = ["error", "abstain", "wrong", "right", ""]
    reasons = ("stop", "stop", "stop", "aborted", "aborted")
    news = [completion(0, i, w, finish_reason=reasons[i]) for i, w in enumerate(words)]
    (group,) = settle(executor, *news)
    assert group.outcomes == ("error", "abstain", "score", "abstain", "abstain")
    assert group.trained.tolist() == [False, False, True, False, False] and group.rewards[2] == 0.0
    assert group.finish_reasons == reasons and group.lengths.tolist() == [1, 1, 1, 1, 0]
    assert executor.metrics.counters == {"reward/scored": 1, "reward/errors": 1}


def test_a_function_over_completions_sees_whole_groups_and_each_set_by_itself(build):
    sets = (EvalSet("", 0, 2), EvalSet("a", APART, 1))
    executor = build("scoring:rank", group_size=3, eval_sets=sets, num_eval_samples=1)
    executor.eval_prompts = lambda number: make_prompt("other" if number == 1 else "in both sets")
    settle(executor, completion(7, 2, "wrong"), completion(8, 0, "right"))
    settle(executor, completion(7, 0, "right"))
    assert "2 groups are begun; ticket 7 lacks 1" in executor.waiting_for()
    last = completion(8, 2, "", finish_reason="aborted")
    groups = settle(executor, completion(7, 1, "right"), completion(8, 1, "right"), last)
    first, second = sorted(groups, key=lambda group: group.ticket)
    assert first.rewards.tolist() == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert second.rewards[:2].tolist() == [1.0, 1.0]
    assert second.trained.tolist() == [True, True, False]

    settle(executor, *(answer(number, 0, "right") for number in (0, 1, APART)))
    settle(executor, answer(0, 1, "wrong"), answer(1, 1, "right"))
    told = "data: 1 evaluation completions of eval.sets.a of policy version 3, from the generator"
    assert executor.waiting_for() == told and executor.metrics.reports == []
    settle(executor, answer(APART, 1, "right"))
    ((version, metrics),) = executor.metrics.reports
    assert version == 3
    # Of one prompt right and wrong; with the other set's answers it would be 3/4.
    assert metrics["eval/reward"] == pytest.approx((0.5 + 1.0) / 2)
    assert metrics["eval/a/reward"] == 1.0


def test_accuracy_is_reported_once_a_version_and_leaves_out_what_has_no_score(build):
    executor = build()
    settle(executor, answer(0, 0, "right", version=4), answer(0, 0, "right", version=5))
    settle(executor, answer(2, 0, "error", version=4))
    assert executor.metrics.reports == []
    waits = "data: 1 evaluation completions of policy version 4, from the generator"
    assert executor.waiting_for() == waits
    assert settle(executor, answer(1, 0, "right", version=4)) == []
    told = {"eval/reward": 1.0, "eval/accuracy": 1.0, "eval/errors": 0, "eval/length_mean": 1.0}
    reason = "RuntimeError: cannot score eval 2 (scoring.py:5)"
    left_out = {"eval/errors": 1, "eval/left_out": 1, "eval/left_out_reason": reason}
    assert executor.metrics.reports == [(4, told | left_out)]
    settle(executor, answer(1, 0, "right", version=5), answer(2, 0, "right", version=5))
    assert executor.metrics.reports[1:] == [(5, told)]


def test_a_function_is_told_what_was_sampled(build):
    executor = build(
        "scoring:sampled",
        eval_sets=own_set(1),
        decode_raw=lambda ids: f"{WORDS[ids[0]]}, and {len(ids) - 1} more",
    )
    ids = [WORDS.index("right"), 7]
    mask = torch.ones(2, dtype=torch.bool)
    masks = {"loss_mask": mask, "restarts": ~mask}
    for sample, reason in enumerate(("stop", "length")):
        give(executor, build_completion(4, sample, ids, finish_reason=reason, **masks))
    (group,) = settle(executor, build_eval_completion(0, 0, ids, loss_mask=mask))
    assert group.rewards.tolist() == [127.0, 27.0]
    ((_, values),) = executor.metrics.reports
    assert values["eval/reward"] == 127.0


# --- Evaluations ---


def writes(folder):
    """What makes a judge that writes evaluations."""
    return lambda site: Samples(folder, success_above=None)


def test_what_is_answered_at_an_evaluation_is_written_with_its_set_and_its_scores(build, tmp_path):
    sets = (EvalSet("", 0, 1), EvalSet("a", APART, 2))
    folder = tmp_path / "samples"
    executor = build(eval_sets=sets, num_eval_samples=1, judges=[writes(folder)])
    settle(executor, answer(APART + 1, 0, "error"), answer(0, 0, "right"))
    settle(executor, answer(APART, 1, "wrong"), answer(APART, 0, "right"))
    settle(executor, answer(APART + 1, 1, "wrong"))
    assert not folder.exists(), "an evaluation is written when it is whole"
    settle(executor, answer(0, 1, "right", finish_reason="aborted"))
    (file,) = folder.iterdir()
    assert file.name == "step_3.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kept = itemgetter("number", "sample", "prompt", "completion", "outcome", "score")
    assert [(row.get("set"), *kept(row)) for row in rows] == [
        (None, 0, 0, "eval 0", "right", "score", 1.0),
        (None, 0, 1, "eval 0", "right", "abstain", None),
        ("a", 0, 0, f"eval {APART}", "right", "score", 1.0),
        ("a", 0, 1, f"eval {APART}", "wrong", "score", 0.0),
        ("a", 1, 0, f"eval {APART + 1}", "error", "error", None),
        ("a", 1, 1, f"eval {APART + 1}", "wrong", "score", 0.0),
    ]
    assert [row["finish_reason"] for row in rows] == ["stop", "aborted"] + ["stop"] * 4
    assert rows[1]["reason"] == "the completion was aborted" and "reason" not in rows[0]


def test_samples_that_cannot_be_written_are_warned_of_once_and_end_nothing(build, tmp_path, caplog):
    (tmp_path / "samples").write_text("a file in its place")
    executor = build(eval_sets=own_set(1), judges=[writes(tmp_path / "samples")])
    for version in (3, 4):
        settle(executor, answer(0, 0, "right", version=version))
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
    settle(executor, answer(1, 0, "wrong"), answer(0, 0, "right"), answer(0, 0, ""))
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
    words = [("right", "wrong", "right"), ("right", "abstain", "wrong")]
    for prompt, of_prompt in enumerate(words):
        give(executor, *(answer(prompt, sample, word) for sample, word in enumerate(of_prompt)))
    assert settle(executor) == []
    ((step, values),) = executor.metrics.reports
    assert step == 3 and values["eval/accuracy"] == 1.0
    assert (values["eval/pass_at_1_sampled"], values["eval/pass_at_k"]) == (0.25, 0.5)


# --- Room ---


def right_pairs(num_tickets):
    """Return both completions of each ticket, all of them right."""
    places = itertools.product(range(num_tickets), range(2))
    return [completion(ticket, sample, "right") for ticket, sample in places]


def test_groups_wait_for_room_and_completions_then_stay_in_their_channel(build):
    executor = build()
    sink = executor.outputs.of(Group)
    sink.room = 1
    feed = executor.inputs.of(Completion).records
    assert len(settle(executor, *right_pairs(2))) == 1
    assert executor.waiting_for() == "room: in channel groups, which the trainer empties"
    settle(executor, completion(9, 0, "right"), *(answer(j, 0, "right") for j in range(3)))
    assert len(feed) == 1 and len(executor.metrics.reports) == 1  # evaluations need no room
    sink.room = 2
    assert [g.ticket for g in settle(executor)] == [0, 1] and not feed


def test_no_more_is_taken_than_the_pool_may_hold_but_evaluations(build, monkeypatch):
    monkeypatch.setattr(reward_module, "MAX_PENDING", 5)
    executor = build()
    give(executor, *right_pairs(10))
    executor.step()
    assert len(executor.inputs.of(Completion).records) == 15
    give(executor, *(answer(j, 0, "right") for j in range(3)))
    executor.step()
    assert not executor.inputs.of(EvalCompletion).records
    assert sorted(g.ticket for g in settle(executor)) == list(range(10))


# --- Errors ---


def test_too_many_errors_end_the_run_and_say_why(build):
    executor = build(max_error_rate=0.3)
    words = ["right"] * 33 + ["error"] * 30
    given_up = completion(99, 0, "right", finish_reason="aborted")  # which says nothing
    # 30 of 63 are more than 30 %, but too few to tell.
    settle(executor, given_up, *(completion(i, 0, w) for i, w in enumerate(words)))
    said = rf"reward {FN}: 48% of the last 64 scores are errors, above .*=0.3"
    with pytest.raises(RewardError, match=said) as error:
        settle(executor, completion(63, 0, "error"))
    assert str(error.value).count("RuntimeError: cannot score train") == 3


def test_some_errors_do_not(build, caplog):
    executor = build(max_error_rate=0.6)
    words = ["error", "right"] * 40
    settle(executor, *(completion(i, 0, w) for i, w in enumerate(words)))
    assert executor.metrics.counters["reward/errors"] == 40
    assert len(caplog.records) == assembly.LOGGED_REASONS
    assert "its completion is masked: RuntimeError: cannot score train 0" in caplog.text


def test_the_errors_of_one_prompt_count_once_where_all_are_errors(build):
    """The answers to a held-out prompt, and groups: ten completions of each, and all are errors."""
    executor = build(max_error_rate=0.1, group_size=10, num_eval_samples=9)
    give(executor, *(answer(0, i, "error") for i in range(10)))
    places = itertools.product(range(4), range(10))
    settle(executor, *(completion(ticket, sample, "error") for ticket, sample in places))
    with pytest.raises(RewardError, match="100% of the last 51 scores are errors"):
        settle(executor, completion(4, 0, "error"))


ERROR, RIGHT = Outcome.error("no"), Outcome.score(1.0)


def add_all(rate, outcomes, *, first=0, size=1):
    """Add outcomes of prompts from `first` on, of which each has `size`, with a check of each."""
    for number, outcome in enumerate(outcomes):
        rate.add(outcome, first + number // size)
        rate.check()


@pytest.mark.parametrize("limit, enough", [(0.1, 6), (0.5, 19), (0.0, 1)])
def test_a_run_whose_completions_are_all_errors_ends_soon(limit, enough):
    """With a limit of 10 %, errors of all of six prompts come once in a million times."""
    rate = assembly.ErrorRate("f", limit)
    add_all(rate, [ERROR] * (enough - 1))
    with pytest.raises(RewardError, match=f"100% of the last {enough} scores are errors"):
        add_all(rate, [Outcome.error("another")], first=enough)


@pytest.mark.parametrize("limit, first", [(0.1, RIGHT), (1.0, ERROR)])
def test_a_score_among_errors_or_no_limit_makes_them_wait_for_a_rate(limit, first):
    add_all(assembly.ErrorRate("f", limit), [first] + [ERROR] * (assembly.MIN_OUTCOMES - 2))


def test_bad_rows_do_not_make_a_rate_however_large_their_groups_are():
    """The bad rows fail at once, while the other groups are still scored."""
    add_all(assembly.ErrorRate("f", 0.1), [ERROR] * 3 * 64 + [RIGHT] * 37 * 64, size=64)


@pytest.mark.parametrize("size", [1, 64])
def test_errors_of_half_of_each_group_make_a_rate_whatever_its_size(size):
    with pytest.raises(RewardError, match=r"5\d% of the last"):
        add_all(assembly.ErrorRate("f", 0.4), [ERROR, RIGHT] * 1024, size=size)


def test_the_rate_is_of_the_newest_prompts():
    rate = assembly.ErrorRate("f", 0.5)
    add_all(rate, [RIGHT] * 1000)
    add_all(rate, [ERROR] * (assembly.ERROR_WINDOW // 2), first=1000)  # at most half of the window
    with pytest.raises(RewardError, match="5[67]% of the last 256 scores"):
        add_all(rate, [ERROR] * (assembly.ERROR_WINDOW // 8), first=2000)


@pytest.mark.parametrize("size, seed", [(4, 0), (64, 1)])
def test_bad_rows_at_half_of_the_limit_end_no_run(size, seed):
    draws = random.Random(seed)
    rate = assembly.ErrorRate("f", 0.1)
    for ticket in range(2000):
        kind = ERROR if draws.random() < 0.05 else RIGHT
        for _ in range(size):
            rate.add(kind, ticket)
        rate.check()


def test_a_wrong_function_is_an_error_of_setup(build):
    said = "reward.fn=scoring:scored: scoring has no function scored; did you mean score"
    with pytest.raises(ValueError, match=said):
        build("scoring:scored")


def test_teardown_is_harmless_before_setup():
    reward_of().teardown()


# --- Attacks, which are scored by the answers to them ---


class Later(FakeScorer):
    """A scorer that scores what it was given in an order of its own, some at each poll."""

    def __init__(self, seed):
        super().__init__()
        self._random = random.Random(seed)
        self.seen = []

    def score(self, item):
        return float(item.text == "right")

    def submit(self, key, item):
        self.seen.append((item.prompt.text, item.text, item.meta))
        super().submit(key, item)

    def poll(self):
        self._random.shuffle(self.known)
        count = self._random.randint(0, len(self.known))
        known = self.known[:count]
        del self.known[:count]
        return known


class WithNovelty(Later):
    """The same, with a reward of 1 for novelty besides."""

    def outcome(self, item):
        value = self.score(item)
        return Outcome("score", value + 1, "", value)


def answered(*words, ticket=0, sample=0, outcome="score", reason=""):
    return Replied(
        attack=build_completion(ticket, sample, [2]),
        prompt_ids=torch.tensor([9]),
        lengths=torch.ones(len(words), dtype=torch.int64),
        token_ids=torch.tensor([WORDS.index(word) for word in words], dtype=torch.int64),
        has_ended=(True,) * len(words),
        outcome=outcome,
        reason=reason,
    )


def attack(*words, **options):
    item = Item(
        prompt=Prompt(torch.tensor([1]), "the attacker's prompt", {"words": ["right"]}),
        token_ids=torch.tensor([2]),
        text="the attack",
        has_ended=True,
        is_held_out=False,
    )
    return ReplySettings(decode, 0.5).with_replies(item, answered(*words, **options))


def scored(attacks, *, seed=0, threshold=0.5, make=Later):
    """(the outcome of each, the source)."""
    source = make(seed)
    scoring = ReplyMean(InTurn(source), ReplySettings(decode, threshold))
    for key, one in enumerate(attacks):
        scoring.submit(key, one)
    scoring.release(range(len(attacks)))
    outcomes = scoring.poll()
    while scoring.pending:
        outcomes += scoring.poll()
    assert len(dict(outcomes)) == len(outcomes) == len(attacks)  # each once
    return [outcome for _, outcome in sorted(outcomes, key=lambda one: one[0])], source


@given(
    st.lists(st.lists(st.sampled_from(["right", "wrong"]), min_size=1, max_size=5), max_size=6),
    st.integers(0, 5),
)
def test_an_attacks_score_is_the_mean_over_its_answers(rows, seed):
    outcomes, source = scored([attack(*words) for words in rows], seed=seed)
    for outcome, words in zip(outcomes, rows):
        share = words.count("right") / len(words)
        columns = {"reward/success": float(share > 0.5)}
        assert outcome == Outcome("score", share, "", columns=columns)
    # What compares completions of a prompt gets the answers to one attack at a time, also where two
    # attacks are alike.
    assert [len(keys) for keys in source.released] == [len(words) for words in rows]


def test_what_scores_sees_the_attack_as_prompt_and_the_answer_as_completion():
    _, source = scored([attack("right", "wrong")])
    assert [(prompt, text, meta["words"]) for prompt, text, meta in source.seen] == [
        ("the attack", "right", ["right"]),
        ("the attack", "wrong", ["right"]),
    ]
    # What was sampled is the answer, in the victim's tokens.
    told = [meta["sampled"] for _, _, meta in source.seen]
    assert [one["token_ids"] for one in told] == [[2], [3]] and WORDS[2:4] == ["right", "wrong"]
    assert [one["raw_text"] for one in told] == ["right", "wrong"]


def test_an_answer_without_a_score_leaves_the_attack_without_one_and_is_named():
    attacks = [attack("right", "error", "abstain"), attack("abstain", "right"), attack("right")]
    outcomes, _ = scored(attacks)
    assert math.isnan(outcomes[0].value)
    assert [(outcome.kind, outcome.reason) for outcome in outcomes] == [
        ("error", "reply 2 of 3: it broke"),
        ("abstain", "reply 1 of 2: nothing to say"),
        ("score", ""),
    ]
    assert [outcome.columns for outcome in outcomes] == [{}, {}, {"reward/success": 1.0}]


def test_what_was_not_asked_has_the_outcome_that_it_came_with():
    known = [("error", "too long"), ("abstain", "empty")]
    attacks = [attack(outcome=kind, reason=reason) for kind, reason in known]
    outcomes, source = scored([*attacks, attack("", "")])
    wanted = [*known, ("error", "the victim's 2 replies are empty")]
    assert [(outcome.kind, outcome.reason) for outcome in outcomes] == wanted
    assert source.seen == []


@pytest.mark.parametrize(
    "make, threshold, values, successes",
    [
        (Later, 0.5, [0.5, 1.0], [0.0, 1.0]),
        (Later, 0.4, [0.5, 1.0], [1.0, 1.0]),
        (WithNovelty, 0.5, [1.5, 2.0], [0.0, 1.0]),  # novelty is rewarded and is no success
    ],
)
def test_a_success_is_above_the_threshold(make, threshold, values, successes):
    attacks = [attack("right", "wrong"), attack("right", "right")]
    outcomes, _ = scored(attacks, threshold=threshold, make=make)
    assert [outcome.value for outcome in outcomes] == values
    assert [outcome.columns["reward/success"] for outcome in outcomes] == successes


def test_nothing_is_kept_of_attacks_that_were_scored_before_their_group_was_whole():
    source = InTurn(Later(0))
    scoring = ReplyMean(source, ReplySettings(decode, 0.5))
    for key in range(2):
        scoring.submit(key, attack("right", "wrong"))
    while scoring.pending:
        scoring.poll()
    scoring.release(range(2))
    assert not source._attacks and not scoring._said


def test_the_columns_of_a_mean_are_the_means_of_the_columns():
    values = [0.1, 0.2, 0.3]
    outcomes = []
    for value in values:
        columns = {"reward/a/mean": value, "reward/b/mean": 1.0}
        outcomes.append(Outcome("score", value, "", columns=columns))
    mean = mean_outcome(outcomes)
    assert mean.value == sum(values) / 3
    assert mean.columns == {"reward/a/mean": mean.value, "reward/b/mean": 1.0}


@pytest.fixture
def build_with_victim(build):
    """A Reward whose completions come with answers."""
    return partial(build, replies=ReplySettings(decode, 0.5))


def test_a_group_is_whole_with_the_mean_rewards_of_its_attacks(build_with_victim):
    wrong = answered("right", "wrong", ticket=3, sample=1)
    (group,) = settle(build_with_victim(), wrong, answered("right", "right", ticket=3, sample=0))
    assert group.ticket == 3 and group.rewards.tolist() == [1.0, 0.5]


def test_a_victim_that_answers_nothing_ends_the_run(build_with_victim):
    reward = build_with_victim(max_error_rate=0.1)
    places = itertools.product(range(40), range(2))
    attacks = [answered("", "", ticket=ticket, sample=sample) for ticket, sample in places]
    with pytest.raises(RewardError, match="the victim's 2 replies are empty"):
        settle(reward, *attacks)
