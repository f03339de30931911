"""Reward with models alone, with fakes on both sides and a small random scorer."""

from functools import partial

import pytest
import torch

from executors.reward import Reward
from llamarl.comm.together import RankCalls
from llamarl.executor import ExecutorGroup
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.scoring.model import asked_of
from llamarl.scoring.sharded import Transcript, same_tokens
from llamarl.scoring.weighted import Weighted, WeightedPart
from llamarl.types import EvalCompletion, Group
from tests.build.kind_settings import model_settings
from tests.evaluated import own_set
from tests.executors.fakes import FakeControl, FakeMetrics, FakeReceiver, FakeSender
from tests.executors.scorings import (
    ASKED,
    SIZE,
    Lengths,
    all_of,
    answer,
    close_to,
    completion,
    feed,
    part,
    prompt,
    words,
)
from tests.scorers import SCORES, spoil_head, transformers_scores, write_scorer

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("float32_products")]


@pytest.fixture
def scorer(tmp_path):
    """Transformers' model; its directory is tmp_path."""
    return write_scorer(tmp_path)


@pytest.fixture
def build(tmp_path):
    def build(
        parts=None, *, meta=None, reproducible=False, is_set_up=True, transcript=None, **changes
    ):
        model = model_settings(tmp_path, **changes)
        executor = Reward(
            prompts=[prompt(i, **(meta or {})) for i in range(len(ASKED))],
            eval_prompts=prompt,
            decode=words,
            group_size=SIZE,
            eval_sets=own_set(len(ASKED)),
            make_scorer=partial(Weighted, parts or [part("model", model, transcript=transcript)]),
            first_takes=True,
            reproducible=reproducible,
        )
        group = ExecutorGroup("reward", (0,), 0, torch.device("cpu"))
        inputs = [(record, FakeReceiver()) for record in executor.consumes]
        outputs = [(Group, FakeSender())]
        executor.attach(group, inputs, outputs, FakeControl(), FakeMetrics())
        if is_set_up:
            executor.setup()
        return executor

    return build


def test_a_reward_without_its_model_ends_without_waiting_for_other_ranks(build, monkeypatch):
    def load(scorer):
        raise ValueError("no such model")

    monkeypatch.setattr(Weighted, "load", load)
    monkeypatch.setattr(RankCalls, "leave", lambda ranks: pytest.fail("waits for other ranks"))
    executor = build(is_set_up=False)
    with pytest.raises(ValueError, match="no such model"):
        executor.setup()
    executor.teardown()


def test_rewards_are_the_models_scores_of_the_sampled_tokens(build, scorer):
    executor = build()
    first, second = all_of(0), all_of(2)
    groups = feed(executor, first[2], second[0], first[0])
    assert groups == {}
    assert executor.waiting_for().startswith("data: 2 groups are begun; ticket 0 lacks 1")
    groups = feed(executor, first[1], *second[1:])
    for ticket, group in groups.items():
        close_to(group.rewards, transformers_scores(scorer, [ASKED[ticket]]))
        assert column(group, "model") == group.rewards.tolist()
    assert sorted(groups) == [0, 2] and executor.waiting_for() is None
    assert executor.metrics.counters["reward/scored"] == 2 * SIZE
    assert len(executor.metrics.means["reward/tail_s"]) == 2 * SIZE
    assert executor.metrics.sums["reward/model/tokens"] >= 6
    executor.teardown()


def test_a_score_is_shifted_and_scaled(build, scorer):
    group = feed(build(scale=-2.0, shift=0.5), *all_of(1))[1]
    close_to(group.rewards / 2, -(transformers_scores(scorer, [ASKED[1]]) - 0.5))


def test_held_out_answers_are_scored_by_the_same_model(build, scorer):
    executor = build()
    executor.inputs.of(EvalCompletion).records.extend(answer(i) for i in range(len(ASKED)))
    assert feed(executor) == {}
    ((version, values),) = executor.metrics.reports
    wanted = transformers_scores(scorer, ASKED)[::SIZE].mean()
    assert version == 5 and values["eval/reward"] == pytest.approx(float(wanted), abs=SCORES)
    assert not executor.metrics.means  # they are no part of what is trained on


def test_an_aborted_completion_is_masked_and_holds_up_nobody(build, scorer):
    group = feed(build(), *all_of(0)[:2], completion(0, 2, finish_reason="aborted"))[0]
    assert group.outcomes == ("score", "score", "abstain") and group.trained.tolist() == [
        True,
        True,
        False,
    ]
    close_to(group.rewards[:2], transformers_scores(scorer, [ASKED[0]])[:2])


def test_a_score_that_is_not_finite_is_an_error(build, scorer, tmp_path):
    spoil_head(tmp_path)
    executor = build()
    group = feed(executor, *all_of(0))[0]
    assert group.outcomes == ("error",) * SIZE and not group.trained.any()
    assert executor.metrics.counters["reward/errors"] == SIZE
    assert not any(group.columns)


def test_what_is_too_long_for_the_scorer_is_an_error(build, tmp_path):
    asked = ASKED[0]
    sizes = [asked.prompt_ids.numel() + c.numel() for c in asked.completions]
    write_scorer(tmp_path, max_position_embeddings=max(sizes) - 1)
    group = feed(build(), *all_of(0))[0]
    assert [o == "error" for o in group.outcomes] == [size == max(sizes) for size in sizes]


@pytest.mark.bitwise("a reproducible reward scores alike in any order")
def test_a_reproducible_reward_has_the_same_bits_in_any_order(build, scorer):
    in_turn = []
    for ticket in range(4):
        in_turn += all_of(ticket)
    alone = feed(build(reproducible=True), *in_turn)
    mixed = feed(build(reproducible=True), *reversed(in_turn))
    for ticket, group in alone.items():
        assert torch.equal(group.rewards, mixed[ticket].rewards)


def column(group, part):
    """What a part gave each completion of a group."""
    return [columns[f"reward/{part}/mean"] for columns in group.columns]


def test_parts_are_weighed_and_added(build, scorer, tmp_path):
    model = model_settings(tmp_path)
    parts = [
        part("rm", model, 2.0),
        WeightedPart("words", Lengths, -0.5),
        part("again", model, 1.0),
    ]
    executor = build(parts)
    group = feed(executor, *all_of(3))[3]
    lengths = torch.tensor([float(len(c)) for c in ASKED[3].completions])
    wanted = 3 * transformers_scores(scorer, [ASKED[3]]) - 0.5 * lengths
    torch.testing.assert_close(group.rewards, wanted, rtol=0, atol=3 * SCORES)
    assert list(executor.metrics.means) == ["reward/tail_s"]
    assert column(group, "words") == lengths.tolist()
    assert column(group, "rm") == pytest.approx(column(group, "again"), rel=0, abs=SCORES)


def test_sources_without_a_model_are_weighed_too_and_hear_of_whole_groups(build):
    """One of them may have scored everything before the group is whole."""
    executor = build([WeightedPart("words", Lengths, 0.5), WeightedPart("again", Lengths, 2.0)])
    feed(executor, *all_of(3)[:1])
    group = feed(executor, *all_of(3)[1:])[3]
    lengths = torch.tensor([float(len(c)) for c in ASKED[3].completions])
    torch.testing.assert_close(group.rewards, 2.5 * lengths, rtol=0, atol=0)
    for scorer in executor._scorer.scorers.values():
        assert [batch for batch in scorer.batches if batch] == [[0, 1, 2]]


def test_what_one_part_cannot_score_has_no_reward(build, scorer, tmp_path):
    model = model_settings(tmp_path)
    lengths = [len(c) for c in ASKED[3].completions]
    assert len(set(lengths)) == SIZE
    meta = {"error_at": lengths[0], "abstain_at": lengths[1]}
    executor = build([part("rm", model), WeightedPart("words", Lengths)], meta=meta)
    group = feed(executor, *all_of(3))[3]
    assert group.outcomes == ("error", "abstain", "score")
    assert group.trained.tolist() == [False, False, True]
    assert executor.metrics.counters["reward/errors"] == 1


def test_another_tokenizers_model_reads_the_text(build, scorer, tmp_path):
    """Of the prompt's text and the completion's, with its own end token behind what has ended."""
    theirs = load_tokenizer(tiny_directory())
    transcript = Transcript(theirs, chat=False, system_prompt=None)
    ended = completion(0, 0)
    cut = completion(0, 1, finish_reason="length")
    gone = completion(0, 2, finish_reason="aborted")
    group = feed(build(transcript=transcript), ended, cut, gone)[0]
    read = []
    for record, end in ((ended, [theirs.eos_token_id]), (cut, [])):
        text = "question 0" + words(record.token_ids.tolist())
        read.append(torch.tensor(theirs.encode(text) + end))
    close_to(group.rewards[:2], transformers_scores(scorer, [asked_of(read)]))


def test_a_completion_that_cannot_be_read_is_an_error_of_its_own(build, scorer, monkeypatch):
    theirs = load_tokenizer(tiny_directory())
    transcript = Transcript(theirs, chat=False, system_prompt=None)
    usual = transcript.ids
    refused = words(completion(0, 1).token_ids.tolist())

    def ids(prompt, text, *, has_ended):
        if text == refused:
            raise ValueError("it spells one")
        return usual(prompt, text, has_ended=has_ended)

    monkeypatch.setattr(transcript, "ids", ids)
    group = feed(build(transcript=transcript), *(completion(0, i) for i in range(SIZE)))[0]
    assert group.outcomes == ("score", "error", "score")


def test_a_chat_template_closes_the_turn(tmp_path):
    theirs = load_tokenizer(tiny_directory())
    theirs.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}={% endfor %}"
    )
    transcript = Transcript(theirs, chat=True, system_prompt="9")
    wanted = theirs.encode("s9=u1+1=a2=", add_special_tokens=False)
    assert transcript.ids("1+1", "2", has_ended=True) == wanted
    assert same_tokens(theirs, load_tokenizer(tiny_directory()))
