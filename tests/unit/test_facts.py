"""The task of facts: what its gold is worth, by hand, and what its posts promise."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rlhf.facts_data import sloppy_summary, vocabulary
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_tokenizer
from llamarl.tasks.facts import (
    DOES,
    MAX_FACTS,
    MIN_FACTS,
    NUM_EVAL,
    NUM_TRAIN,
    WHAT,
    WHO,
    WORDS_A_FACT,
    facts_of,
    facts_posts,
    gold,
    make_post,
    summary_of,
    worth,
)
from tests.built_tasks import build_task

# Three facts, so that a gold summary has 12 words.
POST = "post: hi all , anna likes tea . also ben sold boats . gus lost keys . so what now ? tl;dr:"

SEEDS = st.integers(0, 2**32)
FACTS = st.lists(
    st.tuples(st.sampled_from(WHO), st.sampled_from(DOES), st.sampled_from(WHAT)),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize(
    "summary, f1, excess_words, format_faults",
    [
        # All three, and in another order.
        (" anna likes tea ; ben sold boats ; gus lost keys .", 1, 0, 0),
        (" gus lost keys ; anna likes tea ; ben sold boats .", 1, 0, 0),
        # One of three: precision 1, recall 1/3.
        (" ben sold boats .", 1 / 2, 0, 0),
        # Two right, one wrong: precision and recall 2/3.
        (" anna likes tea ; ben sold bees ; gus lost keys .", 2 / 3, 0, 0),
        # A right one said twice is not right twice: precision 1/2, recall 1/3.
        (" anna likes tea ; anna likes tea .", 2 / 5, 0, 0),
        # All and one twice: precision 3/4, recall 1; four words too many.
        (" anna likes tea ; ben sold boats ; gus lost keys ; gus lost keys .", 6 / 7, 4, 0),
        # No full stop.
        (" anna likes tea ; ben sold boats ; gus lost keys", 1, 0, 1),
        # Chatter spoils the part that it stands in: 15 words.
        (" so basically , anna likes tea ; ben sold boats ; gus lost keys .", 1, 3, 1),
        # "and" makes one part of two, and both facts count.
        (" anna likes tea and ben sold boats ; gus lost keys .", 1, 0, 1),
        # A full stop between is no mark between facts.
        (" anna likes tea . ben sold boats ; gus lost keys .", 1, 0, 1),
        # An empty part, and nothing behind it.
        (" anna likes tea ; .", 1 / 2, 0, 1),
        ("", 0, 0, 2),
        (" .", 0, 0, 1),
        # Words that are no fact of anybody.
        (" anna likes ben ; tea sold boats .", 0, 0, 2),
    ],
)
def test_gold_by_hand(summary, f1, excess_words, format_faults):
    found = worth(POST, summary)
    assert found.f1 == pytest.approx(f1, rel=1e-12)
    assert (found.excess_words, found.format_faults) == (excess_words, format_faults)
    expected = f1 - 0.02 * excess_words - 0.1 * format_faults
    assert gold(POST, summary, {}) == pytest.approx(expected, rel=1e-12)


def test_gold_refuses_a_prompt_that_tells_nothing():
    with pytest.raises(ValueError, match="tells no fact"):
        gold("12+34=", "46", {"answer": "46"})


@given(SEEDS)
def test_a_post_tells_the_facts_that_its_summary_states(seed):
    post = make_post(random.Random(seed))
    facts = facts_of(post.text)
    assert facts == facts_of(post.summary)
    assert MIN_FACTS <= len(facts) <= MAX_FACTS
    assert len({who for who, _, _ in facts}) == len(facts)
    assert len(post.summary.split()) == WORDS_A_FACT * len(facts)
    assert gold(post.text, post.summary, {}) == 1


@given(SEEDS, FACTS)
def test_only_the_posts_own_facts_said_once_are_worth_1(seed, stated):
    draw = random.Random(seed)
    post = make_post(draw)
    found = gold(post.text, summary_of(stated), {})
    is_whole = sorted(stated) == sorted(facts_of(post.text))
    assert (found == 1) == is_whole
    assert found <= 1
    # All words are in the vocabulary, also those of the sloppy teacher.
    words = f"{post.text}{post.summary}{sloppy_summary(post, draw)}".split()
    assert set(words) <= set(vocabulary())


@pytest.fixture(scope="module")
def posts():
    return facts_posts(0)


def test_the_sloppy_teacher_leaves_room_above(posts):
    train, _ = posts
    draw = random.Random(0)
    summaries = [(post.text, sloppy_summary(post, draw), {}) for post in train[:500]]
    mean = sum(gold(*one) for one in summaries) / len(summaries)
    assert 0.4 < mean < 0.65
    assert max(gold(*one) for one in summaries) == 1


def test_posts_follow_from_the_seed_and_those_held_out_do_not(posts):
    train, held_out = posts
    assert posts == facts_posts(0)
    other_train, other_held_out = facts_posts(4)
    assert other_held_out == held_out and other_train[:100] != train[:100]
    texts = [post.text for post in train + held_out]
    assert len(set(texts)) == len(texts) == NUM_TRAIN + NUM_EVAL


def test_the_embedded_tokenizer_reads_every_word_and_no_post_is_too_long():
    tokenizer = load_tokenizer(tiny_directory())
    ids = tokenizer.encode(" ".join(vocabulary()))
    assert tokenizer.unk_token_id not in ids
    task = build_task("facts", tokenizer, chat=False, max_prompt_tokens=320)
    assert (task.num_train, task.num_eval) == (NUM_TRAIN, NUM_EVAL)
    prompt = task.train_prompt(0)
    assert gold(prompt.text, prompt.meta["answer"], {}) == 1
    assert task.default_reward == "llamarl.tasks.facts:gold"
