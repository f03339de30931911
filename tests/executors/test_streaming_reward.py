"""Reward with a stream: completions that are read while they grow have the score of the whole."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executors.reward import Reward
from llamarl.executor import ExecutorGroup
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.weighted import Weighted, WeightedPart
from llamarl.types import EvalCompletion, Group, Stretch
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
from tests.scorers import transformers_scores, write_scorer

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("float32_products")]
LONGEST = 48


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("scorer")


@pytest.fixture(scope="module")
def scorer(path):
    return write_scorer(path)


def streaming(path, *, model=None, parts=None, cache_tokens=8 * LONGEST, **search):
    reproducible = search.pop("reproducible", True)
    stream = StreamSettings(
        piece_tokens=search.get("candidates", [4])[0],
        cache_tokens=cache_tokens,
        longest=LONGEST,
        **search,
    )
    own = model_settings(path, microbatch_tokens=20)
    weighted = [part("model", own, stream=stream), *(parts or [])]
    if model is not None:
        weighted.append(part("again", model, 2.0, stream=stream))
    executor = Reward(
        prompts=[prompt(i) for i in range(len(ASKED))],
        eval_prompts=prompt,
        decode=words,
        group_size=SIZE,
        eval_sets=own_set(len(ASKED)),
        make_scorer=partial(Weighted, weighted),
        first_takes=True,
        reads_ahead=True,
        reproducible=reproducible,
    )
    group = ExecutorGroup("reward", (0,), 0, torch.device("cpu"))
    inputs = [(record, FakeReceiver()) for record in executor.consumes]
    executor.attach(group, inputs, [(Group, FakeSender())], FakeControl(), FakeMetrics())
    executor.setup()
    return executor


def stretch(ticket, sample, begin, end=None, *, has_ended=False):
    ids = ASKED[ticket].completions[sample][begin:end]
    return Stretch(ticket, sample, begin, ids, has_ended)


def longest_sample(ticket):
    sizes = [ids.numel() for ids in ASKED[ticket].completions]
    return sizes.index(max(sizes)), max(sizes)


def test_what_is_sampled_is_read_before_it_ends(path, scorer):
    executor = streaming(path)
    sample, size = longest_sample(0)
    executor.inputs.of(Stretch).records.append(stretch(0, sample, 0, size - 1))
    assert executor.step() and executor.metrics.spans == ["read ahead"]
    while executor.step():
        pass
    assert executor.waiting_for() is None  # nobody owes it what was only begun
    group = feed(executor, *all_of(0))[0]
    close_to(group.rewards, transformers_scores(scorer, [ASKED[0]]))
    early = executor.metrics.means["reward/prefilled_early"]
    assert early[:sample] + early[sample + 1 :] == [0] * (SIZE - 1) and early[sample] > 0.5
    assert len(executor.metrics.means["reward/tail_s"]) == SIZE
    assert executor.metrics.means["reward/piece_tokens"] == [4] * SIZE
    assert executor.metrics.spans[-1] == "read to the end"
    whole = sum(ASKED[0].prompt_ids.numel() + c.numel() for c in ASKED[0].completions)
    assert executor.metrics.sums["reward/model/tokens"] <= whole
    executor.teardown()


@st.composite
def heard(draw):
    """Stretches and completions of two tickets in any order: twice, late, with gaps, or never."""
    records = []
    for ticket in (1, 3):
        for sample, ids in enumerate(ASKED[ticket].completions):
            cut = draw(st.integers(0, ids.numel()))
            for begin, end in ((0, cut), (cut, None)):
                times = draw(st.sampled_from([0, 1, 1, 2]))
                records += [stretch(ticket, sample, begin, end, has_ended=end is None)] * times
            records.append(completion(ticket, sample))
    return draw(st.permutations(records))


@pytest.mark.bitwise("streamed scores are those of the whole")
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(heard(), st.sampled_from([LONGEST, 3 * LONGEST, 9 * LONGEST]))
def test_scores_have_the_same_bits_whatever_was_heard_before(path, scorer, records, cache_tokens):
    executor = streaming(path, cache_tokens=cache_tokens)
    unheard = feed(streaming(path), *all_of(1), *all_of(3))
    for record in records:
        executor.inputs.of(type(record)).records.append(record)
        executor.step()
    groups = feed(executor)
    for ticket in (1, 3):
        assert torch.equal(groups[ticket].rewards, unheard[ticket].rewards)
    assert executor.metrics.counters["reward/scored"] == 2 * SIZE


def test_a_full_cache_drops_what_was_read_least_and_scores_the_same(path, scorer):
    executor = streaming(path, cache_tokens=LONGEST)
    sample, size = longest_sample(2)
    executor.inputs.of(Stretch).records.append(stretch(2, sample, 0, size - 1))
    executor.step()
    feed(executor, *all_of(0))
    groups = feed(executor, *all_of(2))
    for ticket in (0, 2):
        close_to(groups[ticket].rewards, transformers_scores(scorer, [ASKED[ticket]]))
    assert executor.metrics.sums["reward/evictions"] == 1


def test_an_aborted_completion_is_read_no_further(path, scorer):
    executor = streaming(path)
    sample, size = longest_sample(0)
    executor.inputs.of(Stretch).records.append(stretch(0, sample, 0, size - 1))
    executor.step()
    gone = completion(0, sample, finish_reason="aborted")
    group = feed(executor, gone, *[c for c in all_of(0) if c.sample_index != sample])[0]
    assert (~group.trained).nonzero().tolist() == [[sample]]
    ahead = executor._scorer.scorers["model"]._growing.ahead
    assert sum(growing.num_known for growing in ahead.caches) == 0
    # Its last stretch comes late.
    executor.inputs.of(Stretch).records.append(stretch(0, sample, 0))
    executor.step()
    assert sum(growing.num_known for growing in ahead.caches) == 0


def test_held_out_answers_are_scored_whole(path, scorer):
    executor = streaming(path)
    executor.inputs.of(EvalCompletion).records.extend(answer(i) for i in range(len(ASKED)))
    feed(executor, *all_of(2))
    ((_, values),) = executor.metrics.reports
    wanted = transformers_scores(scorer, ASKED)[::SIZE].mean()
    close_to(torch.tensor(values["eval/reward"]), wanted)
    assert len(executor.metrics.means["reward/prefilled_early"]) == SIZE


def test_each_model_streams_and_others_are_weighed_beside_it(path, scorer):
    model = model_settings(path)
    executor = streaming(path, model=model, parts=[WeightedPart("words", Lengths, -0.5)])
    sample, size = longest_sample(3)
    executor.inputs.of(Stretch).records.append(stretch(3, sample, 0, size - 1))
    executor.step()
    group = feed(executor, *all_of(3))[3]
    lengths = torch.tensor([float(len(c)) for c in ASKED[3].completions])
    close_to((group.rewards + 0.5 * lengths) / 3, transformers_scores(scorer, [ASKED[3]]))
    assert len(executor.metrics.means["reward/tail_s"]) == 2 * SIZE


def searching(path):
    executor = streaming(path, reproducible=False, candidates=(2, 5), a_step=SIZE)
    return executor, executor._scorer.scorers["model"]._growing


def test_the_size_of_pieces_is_searched_step_by_step_and_goes_on_from_a_checkpoint(path, scorer):
    executor, queue = searching(path)
    seen = []
    for ticket in (0, 1, 2, 3):
        seen.append(queue.piece_tokens)
        group = feed(executor, *all_of(ticket))[ticket]
        close_to(group.rewards, transformers_scores(scorer, [ASKED[ticket]]))
    assert seen + [queue.piece_tokens] == [2, 2, 2, 2, 5]  # the first step is not timed
    assert executor.metrics.means["reward/piece_tokens"] == [2] * 4 * SIZE
    resumed, other = searching(path)
    assert other.piece_tokens == 2
    resumed.load_state_dict([executor.state_dict(), {}])
    assert other.piece_tokens == 5 and resumed.state_dict() == executor.state_dict()
    feed(resumed, *all_of(0))
    assert resumed.metrics.means["reward/piece_tokens"] == [5] * SIZE
    assert streaming(path).state_dict() == {}
