"""A synthetic TL;DR whose judge is a program: posts of facts among chatter, to be summarised.

    post: hi all , anna likes tea . long story . also ben sold boats . tl;dr:
     anna likes tea ; ben sold boats .

A fact is three words: who, what is done, and to what. The gold summary of a post states each of its
facts once, in order, with ";" between and "." at the end. What a summary is worth is `gold`, which
is exact: it reads the facts of the post and of the summary, so it needs no reference.

Imports no torch: `gold` runs in reward workers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

NUM_TRAIN = 20_000  # posts before they repeat
NUM_EVAL = 500  # held out, the same whatever the seed
MIN_FACTS, MAX_FACTS = 3, 5

WHO = ("anna", "ben", "carl", "dora", "emil", "fay", "gus", "hana", "ivan", "jill", "kurt", "lena")
DOES = ("likes", "lost", "found", "sold", "wants", "fears")
WHAT = (
    *("tea", "boats", "cats", "maps", "rain", "shoes", "books", "bikes"),
    *("trains", "plums", "keys", "songs", "snow", "hats", "lamps", "bees"),
)
GREETINGS = ("hi all ,", "hello ,", "throwaway ,", "sorry for the wall of text .", "")
LEADS = ("", "", "", "also", "by the way ,", "it turns out", "i think")
CHATTER = ("long story .", "no idea why .", "it is a mess .", "so what now ?")

WORDS_A_FACT = 4  # of a gold summary: three, and the mark behind them
EXCESS_WORD = 0.02  # what gold takes off for each word beyond these
FORMAT_FAULT = 0.1  # and for each fault of format

Fact = tuple[str, str, str]  # who, does, what


@dataclass(frozen=True, slots=True)
class Post:
    """A prompt, with its gold summary."""

    text: str
    summary: str


@dataclass(frozen=True, slots=True)
class Worth:
    """The counts that gold is made of."""

    f1: float  # of the facts, 0 to 1
    excess_words: int
    format_faults: int

    @property
    def gold(self) -> float:
        """The score: at most 1; below 0 for a summary that states no fact."""
        return self.f1 - EXCESS_WORD * self.excess_words - FORMAT_FAULT * self.format_faults


def gold(prompt: str, completion_text: str, meta: dict) -> float:
    """Score a summary, at most 1: the F1 of its facts, less 0.02 for each word over four a fact of
    the post, less 0.1 for each fault of format. It is the task's reward function.
    """
    return worth(prompt, completion_text).gold


def worth(post: str, summary: str) -> Worth:
    """Count what a summary's score is made of.

    F1: harmonic mean of precision and recall, 2 right / (stated + told), where `told` counts the
    post's facts, `stated` those of the summary, repeated and wrong ones too, and `right` the facts
    of the post that the summary states at least once.

    A fault of format is a part between two ";" that is not a fact and nothing else, and an end
    without ".". ValueError for a post without facts.
    """
    told = set(facts_of(post))
    if not told:
        raise ValueError(f"no post of the task facts: {post[:60]!r} tells no fact")
    stated = facts_of(summary)
    right = told & set(stated)
    words = summary.split()
    has_end = words[-1:] == ["."]
    body = words[:-1] if has_end else words
    parts = " ".join(body).split(";")
    bad_parts = sum(not is_fact(part.split()) for part in parts)
    return Worth(
        f1=2 * len(right) / (len(stated) + len(told)),
        excess_words=max(0, len(words) - WORDS_A_FACT * len(told)),
        format_faults=bad_parts + (not has_end),
    )


def facts_of(text: str) -> list[Fact]:
    """Return all facts that a text states, in order, repeated ones too."""
    words = text.split()
    triples = zip(words, words[1:], words[2:])
    return [triple for triple in triples if is_fact(triple)]


def is_fact(words: list[str] | Fact) -> bool:
    """Whether these words are a fact and nothing else."""
    if len(words) != 3:
        return False
    who, does, what = words
    return who in WHO and does in DOES and what in WHAT


def summary_of(facts: list[Fact]) -> str:
    """Write the gold summary of facts. It begins with a space, as what follows a prompt does."""
    return " " + " ; ".join(" ".join(fact) for fact in facts) + " ."


def make_post(draw: random.Random) -> Post:
    """Draw a post of MIN_FACTS to MAX_FACTS facts, each about somebody else."""
    names = draw.sample(WHO, draw.randint(MIN_FACTS, MAX_FACTS))
    facts = [(who, draw.choice(DOES), draw.choice(WHAT)) for who in names]
    parts = ["post:", draw.choice(GREETINGS)]
    for fact in facts:
        parts += [draw.choice(LEADS), *fact, "."]
        if draw.random() < 0.25:
            parts.append(draw.choice(CHATTER))
    parts.append("tl;dr:")
    text = " ".join(part for part in parts if part)
    return Post(text, summary_of(facts))


def facts_posts(seed: int) -> tuple[list[Post], list[Post]]:
    """Draw (training, held out) posts: NUM_TRAIN by the seed and NUM_EVAL that never change, all
    different.
    """
    seen: set[str] = set()
    held_out = _different(random.Random("facts, held out"), NUM_EVAL, seen)
    train = _different(random.Random(f"facts, training {seed}"), NUM_TRAIN, seen)
    return train, held_out


def _different(draw: random.Random, count: int, seen: set[str]) -> list[Post]:
    """Draw `count` posts that are not in `seen`, and add them to it."""
    posts: list[Post] = []
    while len(posts) < count:
        post = make_post(draw)
        if post.text not in seen:
            seen.add(post.text)
            posts.append(post)
    return posts
