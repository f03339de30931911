"""Reward with models alone, with fakes on both sides and a small random scorer; with a stream,
completions that are read while they grow have the score of the whole.
"""

from functools import cache, partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executors.reward import Reward
from llamarl.comm.together import RankCalls
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.scoring.ahead import StreamSettings
from llamarl.scoring.model import ModelScorer, asked_of
from llamarl.scoring.sharded import Transcript, same_tokens
from llamarl.scoring.weighted import Weighted, WeightedPart
from llamarl.types import Group, Outcome, Prompt, Stretch
from tests.build.completion import build_completion
from tests.build.eval_completion import build_eval_completion
from tests.build.kind_settings import model_settings
from tests.evaluated import own_set
from tests.executors.fakes import FakeScorer, give, seat
from tests.scorers import SCORES, asked_for, spoil_head, transformers_scores, write_scorer

pytestmark = [pytest.mark.machine, pytest.mark.usefixtures("float32_products")]

SIZE = 3
ASKED = asked_for(4, SIZE)  # of ticket i, and of held-out prompt i
LONGEST = 48


class NumWords(FakeScorer):
    """The number of words of a completion; an error or an abstention where the prompt says so."""

    def outcome(self, item):
        words = len(item.text.split(","))
        if words == item.prompt.meta.get("error_at"):
            return Outcome.error("cannot count")
        if words == item.prompt.meta.get("abstain_at"):
            return Outcome.abstain("does not care to")
        return Outcome.score(float(words))

    def wait(self, timeout_s):
        return bool(self.known)


def completion(ticket, sample, *, finish_reason="stop"):
    asked = ASKED[ticket]
    ids = asked.completions[sample].tolist()
    prompt = asked.prompt_ids.tolist()
    return build_completion(ticket, sample, ids, prompt=prompt, finish_reason=finish_reason)


def all_of(*tickets):
    made = []
    for ticket in tickets:
        made += [completion(ticket, sample) for sample in range(SIZE)]
    return made


def held_out_answers():
    """The first completion of each, as a held-out prompt's."""
    firsts = [asked.completions[0].tolist() for asked in ASKED]
    return [build_eval_completion(i, 0, ids, version=5) for i, ids in enumerate(firsts)]


def words(ids):
    return ",".join(map(str, ids))


def num_words(ticket):
    return torch.tensor([float(len(c)) for c in ASKED[ticket].completions])


def part(name, settings, weight=1.0, **options):
    return WeightedPart(name, partial(ModelScorer, name, settings, **options), weight)


def reward_of(parts, *, meta=None, **options):
    prompts = [
        Prompt(asked.prompt_ids, f"question {i}", meta or {}) for i, asked in enumerate(ASKED)
    ]
    return Reward(
        prompts=prompts,
        eval_prompts=prompts.__getitem__,
        decode=words,
        group_size=SIZE,
        eval_sets=own_set(len(ASKED)),
        make_scorer=partial(Weighted, parts),
        first_takes=True,
        **options,
    )


def feed(executor, *records):
    give(executor, *records)
    while executor.step():
        pass
    return {group.ticket: group for group in executor.outputs.of(Group).records}


def assert_scores(rewards, model, *tickets):
    wanted = transformers_scores(model, [ASKED[ticket] for ticket in tickets])
    torch.testing.assert_close(rewards, wanted, rtol=0, atol=SCORES)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("scorer")


@pytest.fixture(scope="module")
def scorer(path):
    """Transformers' model; its directory is `path`."""
    return write_scorer(path)


@pytest.fixture
def build(path, scorer):
    def build(parts=None, *, meta=None, reproducible=False, transcript=None, at=path, **changes):
        model = model_settings(at, **changes)
        parts = parts or [part("model", model, transcript=transcript)]
        return seat(reward_of(parts, meta=meta, reproducible=reproducible))

    return build


def test_a_reward_without_its_model_ends_without_waiting_for_other_ranks(path, monkeypatch):
    def load(scorer):
        raise ValueError("no such model")

    monkeypatch.setattr(Weighted, "load", load)
    monkeypatch.setattr(RankCalls, "leave", lambda ranks: pytest.fail("waits for other ranks"))
    executor = reward_of([part("model", model_settings(path))])
    with pytest.raises(ValueError, match="no such model"):
        seat(executor)
    executor.teardown()


def test_rewards_are_the_models_scores_of_the_sampled_tokens(build, scorer):
    executor = build()
    first, second = all_of(0), all_of(2)
    assert feed(executor, first[2], second[0], first[0]) == {}
    assert executor.waiting_for().startswith("data: 2 groups are begun; ticket 0 lacks 1")
    groups = feed(executor, first[1], *second[1:])
    for ticket, group in groups.items():
        assert_scores(group.rewards, scorer, ticket)
        assert column(group, "model") == group.rewards.tolist()
    assert sorted(groups) == [0, 2] and executor.waiting_for() is None
    assert executor.metrics.counters["reward/scored"] == 2 * SIZE
    assert len(executor.metrics.means["reward/tail_s"]) == 2 * SIZE
    assert executor.metrics.sums["reward/model/tokens"] >= 6
    executor.teardown()


def test_a_score_is_shifted_and_scaled(build, scorer):
    group = feed(build(scale=-2.0, shift=0.5), *all_of(1))[1]
    assert_scores(0.5 - group.rewards / 2, scorer, 1)


def test_an_aborted_completion_is_masked_and_holds_up_nobody(build, scorer):
    group = feed(build(), *all_of(0)[:2], completion(0, 2, finish_reason="aborted"))[0]
    assert group.outcomes == ("score", "score", "abstain")
    assert group.trained.tolist() == [True, True, False]
    wanted = transformers_scores(scorer, [ASKED[0]])[:2]
    torch.testing.assert_close(group.rewards[:2], wanted, rtol=0, atol=SCORES)


def test_a_score_that_is_not_finite_is_an_error(build, tmp_path):
    write_scorer(tmp_path)
    spoil_head(tmp_path)
    executor = build(at=tmp_path)
    group = feed(executor, *all_of(0))[0]
    assert group.outcomes == ("error",) * SIZE and not group.trained.any()
    assert executor.metrics.counters["reward/errors"] == SIZE
    assert not any(group.columns)


def test_what_is_too_long_for_the_scorer_is_an_error(build, tmp_path):
    sizes = [ASKED[0].prompt_ids.numel() + c.numel() for c in ASKED[0].completions]
    write_scorer(tmp_path, max_position_embeddings=max(sizes) - 1)
    group = feed(build(at=tmp_path), *all_of(0))[0]
    assert [o == "error" for o in group.outcomes] == [size == max(sizes) for size in sizes]


@pytest.mark.bitwise("a reproducible reward scores alike in any order")
def test_a_reproducible_reward_has_the_same_bits_in_any_order(build):
    in_turn = all_of(*range(4))
    alone = feed(build(reproducible=True), *in_turn)
    mixed = feed(build(reproducible=True), *reversed(in_turn))
    for ticket, group in alone.items():
        assert torch.equal(group.rewards, mixed[ticket].rewards)


def column(group, part):
    """What a part gave each completion of a group."""
    return [columns[f"reward/{part}/mean"] for columns in group.columns]


def test_parts_are_weighed_and_added(build, scorer, path):
    model = model_settings(path)
    counted = WeightedPart("words", NumWords, -0.5)
    executor = build([part("rm", model, 2.0), counted, part("again", model, 1.0)])
    group = feed(executor, *all_of(3))[3]
    assert_scores((group.rewards + 0.5 * num_words(3)) / 3, scorer, 3)
    assert list(executor.metrics.means) == ["reward/tail_s"]
    assert column(group, "words") == num_words(3).tolist()
    assert column(group, "rm") == pytest.approx(column(group, "again"), rel=0, abs=SCORES)


def test_sources_without_a_model_are_weighed_too_and_hear_of_whole_groups(build):
    """One of them may have scored everything before the group is whole."""
    executor = build([WeightedPart("words", NumWords, 0.5), WeightedPart("again", NumWords, 2.0)])
    feed(executor, *all_of(3)[:1])
    group = feed(executor, *all_of(3)[1:])[3]
    assert torch.equal(group.rewards, 2.5 * num_words(3))
    for source in executor._scorer.scorers.values():
        assert [batch for batch in source.released if batch] == [[0, 1, 2]]


def test_what_one_part_cannot_score_has_no_reward(build, path):
    lengths = num_words(3).tolist()
    assert len(set(lengths)) == SIZE
    meta = {"error_at": lengths[0], "abstain_at": lengths[1]}
    parts = [part("rm", model_settings(path)), WeightedPart("words", NumWords)]
    executor = build(parts, meta=meta)
    group = feed(executor, *all_of(3))[3]
    assert group.outcomes == ("error", "abstain", "score")
    assert group.trained.tolist() == [False, False, True]
    assert executor.metrics.counters["reward/errors"] == 1


# --- Of another tokenizer ---


@pytest.fixture
def theirs():
    return load_tokenizer(tiny_directory())


@pytest.fixture
def transcript(theirs):
    return Transcript(theirs, chat=False, system_prompt=None)


def test_another_tokenizers_model_reads_the_text(build, scorer, theirs, transcript):
    """Of the prompt's text and the completion's, with its own end token behind what has ended."""
    ended = completion(0, 0)
    cut = completion(0, 1, finish_reason="length")
    gone = completion(0, 2, finish_reason="aborted")
    group = feed(build(transcript=transcript), ended, cut, gone)[0]
    read = []
    for record, end in ((ended, [theirs.eos_token_id]), (cut, [])):
        text = "question 0" + words(record.token_ids.tolist())
        read.append(torch.tensor(theirs.encode(text) + end))
    wanted = transformers_scores(scorer, [asked_of(read)])
    torch.testing.assert_close(group.rewards[:2], wanted, rtol=0, atol=SCORES)


def test_a_completion_that_cannot_be_read_is_an_error_of_its_own(build, transcript, monkeypatch):
    usual = transcript.ids
    refused = words(completion(0, 1).token_ids.tolist())

    def ids(prompt, text, *, has_ended):
        if text == refused:
            raise ValueError("it spells one")
        return usual(prompt, text, has_ended=has_ended)

    monkeypatch.setattr(transcript, "ids", ids)
    group = feed(build(transcript=transcript), *all_of(0))[0]
    assert group.outcomes == ("score", "error", "score")


def test_a_chat_template_closes_the_turn(theirs):
    theirs.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}={% endfor %}"
    )
    transcript = Transcript(theirs, chat=True, system_prompt="9")
    wanted = theirs.encode("s9=u1+1=a2=", add_special_tokens=False)
    assert transcript.ids("1+1", "2", has_ended=True) == wanted
    assert same_tokens(theirs, load_tokenizer(tiny_directory()))


# --- With a stream: completions are read while they grow ---


def streaming(path, *, model=None, parts=(), cache_tokens=8 * LONGEST, pieces=4, **search):
    reproducible = search.pop("reproducible", True)
    stream = StreamSettings(
        piece_tokens=pieces, cache_tokens=cache_tokens, longest=LONGEST, **search
    )
    own = model_settings(path, microbatch_tokens=20)
    weighted = [part("model", own, stream=stream), *parts]
    if model is not None:
        weighted.append(part("again", model, 2.0, stream=stream))
    return seat(reward_of(weighted, reads_ahead=True, reproducible=reproducible))


def stretch(ticket, sample, begin, end=None, *, has_ended=False):
    ids = ASKED[ticket].completions[sample][begin:end]
    return Stretch(ticket, sample, begin, ids, has_ended)


def hear_most_of(executor, ticket):
    """Hear all but the last token of the ticket's longest completion; return which that is."""
    sizes = [ids.numel() for ids in ASKED[ticket].completions]
    sample = sizes.index(max(sizes))
    give(executor, stretch(ticket, sample, 0, max(sizes) - 1))
    assert executor.step() and executor.metrics.spans[-1] == "read ahead"
    return sample


def test_what_is_sampled_is_read_before_it_ends(path, scorer):
    executor = streaming(path)
    sample = hear_most_of(executor, 0)
    while executor.step():
        pass
    assert executor.waiting_for() is None  # nobody owes it what was only begun
    group = feed(executor, *all_of(0))[0]
    assert_scores(group.rewards, scorer, 0)
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


@cache
def unheard(path):
    return feed(streaming(path), *all_of(1, 3))


@pytest.mark.bitwise("streamed scores are those of the whole")
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=heard(), cache_tokens=st.sampled_from([LONGEST, 3 * LONGEST, 9 * LONGEST]))
def test_scores_have_the_same_bits_whatever_was_heard_before(path, scorer, records, cache_tokens):
    executor = streaming(path, cache_tokens=cache_tokens)
    for record in records:
        give(executor, record)
        executor.step()
    groups = feed(executor)
    for ticket, group in unheard(path).items():
        assert torch.equal(groups[ticket].rewards, group.rewards)
    assert executor.metrics.counters["reward/scored"] == 2 * SIZE


def test_a_full_cache_drops_what_was_read_least_and_scores_the_same(path, scorer):
    executor = streaming(path, cache_tokens=LONGEST)
    hear_most_of(executor, 2)
    feed(executor, *all_of(0))
    for ticket, group in feed(executor, *all_of(2)).items():
        assert_scores(group.rewards, scorer, ticket)
    assert executor.metrics.sums["reward/evictions"] == 1


def test_an_aborted_completion_is_read_no_further(path, scorer):
    executor = streaming(path)
    sample = hear_most_of(executor, 0)
    gone = completion(0, sample, finish_reason="aborted")
    group = feed(executor, gone, *[c for c in all_of(0) if c.sample_index != sample])[0]
    assert (~group.trained).nonzero().tolist() == [[sample]]
    ahead = executor._scorer.scorers["model"]._growing.ahead
    assert sum(growing.num_known for growing in ahead.caches) == 0
    give(executor, stretch(0, sample, 0))  # its last stretch comes late
    executor.step()
    assert sum(growing.num_known for growing in ahead.caches) == 0


@pytest.mark.parametrize("reads_ahead", [True, False])
def test_held_out_answers_are_scored_whole_by_the_same_model(build, path, scorer, reads_ahead):
    executor = streaming(path) if reads_ahead else build()
    assert feed(executor, *held_out_answers()) == {}
    ((version, values),) = executor.metrics.reports
    wanted = transformers_scores(scorer, ASKED)[::SIZE].mean()
    assert version == 5 and values["eval/reward"] == pytest.approx(float(wanted), abs=SCORES)
    assert not executor.metrics.means  # they are no part of what is trained on


def test_each_model_streams_and_others_are_weighed_beside_it(path, scorer):
    counted = WeightedPart("words", NumWords, -0.5)
    executor = streaming(path, model=model_settings(path), parts=[counted])
    hear_most_of(executor, 3)
    group = feed(executor, *all_of(3))[3]
    assert_scores((group.rewards + 0.5 * num_words(3)) / 3, scorer, 3)
    assert len(executor.metrics.means["reward/tail_s"]) == 2 * SIZE


def searching(path):
    executor = streaming(path, reproducible=False, pieces=2, candidates=(2, 5), a_step=SIZE)
    return executor, executor._scorer.scorers["model"]._growing


def test_the_size_of_pieces_is_searched_step_by_step_and_goes_on_from_a_checkpoint(path, scorer):
    executor, queue = searching(path)
    seen = []
    for ticket in (0, 1, 2, 3):
        seen.append(queue.ahead.piece_tokens)
        assert_scores(feed(executor, *all_of(ticket))[ticket].rewards, scorer, ticket)
    assert seen + [queue.ahead.piece_tokens] == [2, 2, 2, 2, 5]  # the first step is not timed
    assert executor.metrics.means["reward/piece_tokens"] == [2] * 4 * SIZE
    resumed, other = searching(path)
    assert other.ahead.piece_tokens == 2
    resumed.load_state_dict([executor.state_dict(), {}])
    assert other.ahead.piece_tokens == 5 and resumed.state_dict() == executor.state_dict()
    feed(resumed, *all_of(0))
    assert resumed.metrics.means["reward/piece_tokens"] == [5] * SIZE
    assert streaming(path).state_dict() == {}
