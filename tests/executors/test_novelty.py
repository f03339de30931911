"""Novelty against its formula by the letter, in whatever order completions come, alone and as a
part of a reward.
"""

import itertools
import random
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamarl.models.config import tiny_directory
from llamarl.scoring import novelty as novelty_module
from llamarl.scoring.embedding import EmbedderSettings
from llamarl.scoring.novelty import Novelty
from llamarl.scoring.scorer import Item, score_all, site_alone
from llamarl.scoring.weighted import Weighted, WeightedPart
from llamarl.types import Prompt
from tests.build.job import finished_job
from tests.build.kind_settings import novelty_settings
from tests.launching import COMPLETIONS, SMALL, untimed

CPU = torch.device("cpu")
GROUPS = 3  # a step
PROMPT = Prompt(torch.tensor([1, 2]), "p", {})


def vector_of(text):
    """Any vector, a function of the text."""
    return np.random.default_rng(sum(map(ord, text)) * 31 + len(text)).normal(size=3)


class ByText:
    def embed(self, texts):
        return torch.tensor(np.stack([vector_of(text) for text in texts]), dtype=torch.float32)


def item(text, is_held_out=False, sample=(0, 0)):
    where = None if is_held_out else sample
    return Item(PROMPT, torch.tensor([3]), text, True, is_held_out, where)


def by_text(path):
    return EmbedderSettings(path, False, "float32", 100)


def made(history=100, nearest=None):
    how = novelty_settings(history, nearest)
    novelty = Novelty("new", how, by_text("a"), GROUPS, site_alone(CPU))
    with patch.object(novelty_module, "load_embedder", lambda settings, device: ByText()):
        novelty.start()
    return novelty


def score(novelty, groups, held_out=False, tickets=None, first=0):
    """The scores of groups of texts, by group, which come in this order; of these tickets, or of
    one after another.
    """
    scored = []
    for ticket, texts in zip(tickets or itertools.count(first), groups):
        items = [item(text, held_out, (ticket, i)) for i, text in enumerate(texts)]
        scored.append([outcome.value for outcome in score_all(novelty, items)])
    return scored


def cosine(one, other):
    one, other = vector_of(one), vector_of(other)
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def expected(text, past, nearest):
    if not past:
        return 1.0
    cosines = sorted((cosine(text, other) for other in past), reverse=True)
    kept = cosines[:nearest]
    return 1 - sum(kept) / len(kept)


def numbered(name, count):
    """Return the texts "NAME 0", "NAME 1", and so on."""
    return [f"{name} {i}" for i in range(count)]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 30), st.sampled_from([None, 1, 4]), st.integers(0, 999))
def test_scores_are_those_of_the_formula_whatever_order_a_steps_groups_come_in(
    history, nearest, seed
):
    order = random.Random(seed)
    novelty, past = made(history, nearest), []
    for step in range(3):
        tickets = list(range(step * GROUPS, (step + 1) * GROUPS))
        texts_of = {t: numbered(f"{t}", 2) for t in tickets}
        order.shuffle(tickets)
        # A group that was aborted, or of which nothing has a score, never comes.
        came = tickets[order.randrange(2) :]
        scored = score(novelty, [texts_of[t] for t in came], tickets=came)
        for ticket, values in zip(came, scored):
            wanted = [expected(text, past, nearest) for text in texts_of[ticket]]
            assert values == pytest.approx(wanted, abs=1e-5)
        for ticket in sorted(came):
            past += texts_of[ticket]
        past = past[-history:]


@pytest.mark.bitwise("a resumed run scores as the run that was not stopped")
@given(step=st.integers(0, 3), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_a_run_that_goes_on_gives_the_same_scores_to_the_bit(step, seed):
    """Also for tickets that were scored before the checkpoint, and are again after it."""
    order = random.Random(seed)
    groups = [numbered(f"{seed} {t}", 3) for t in range(4 * GROUPS)]
    straight, before, after = (made(history=10) for _ in range(3))
    whole = score(straight, groups)
    scored_by_then = step * GROUPS + order.randrange(GROUPS)
    score(before, groups[:scored_by_then])
    state = before.state_dict()
    if state:
        after.load_state_dict(state)
    first = step * GROUPS
    assert score(after, groups[first:], first=first) == whole[first:]


def test_what_another_model_embedded_is_not_compared_with(caplog):
    before = made()
    score(before, [["a"]] * GROUPS)
    after = Novelty("new", novelty_settings(), by_text("b"), GROUPS, site_alone(CPU))
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == {} and "vectors of a" in caplog.text


def test_an_attack_is_compared_once_and_not_its_answers():
    attacks = [item("ask", sample=(0, 0)), item("beg", sample=(0, 1))]
    novelty = made(nearest=1)
    answers = []
    for attack in attacks:
        answers += [replace(item(f"no {i}"), attack=attack) for i in range(2)]
    assert [outcome.value for outcome in score_all(novelty, answers)] == [1.0] * 4
    assert novelty.state_dict()["places"].tolist() == [[0, 0], [0, 1]]
    later = replace(item("no 0"), attack=item("ask", sample=(GROUPS, 0)))
    new = replace(item("no 0"), attack=item("other", sample=(GROUPS, 1)))
    found = [outcome.value for outcome in score_all(novelty, [later, new])]
    closest = max(cosine("other", "ask"), cosine("other", "beg"))
    assert found == pytest.approx([0.0, 1 - closest], abs=1e-5)


def test_held_out_completions_are_scored_and_not_remembered():
    novelty = made()
    for _ in range(3):
        alone = score(novelty, [["a", "b"]] * GROUPS, held_out=True)[0]
        assert alone == pytest.approx([1.0, 1.0], abs=1e-5)
    score(novelty, [["a", "b"], ["c", "d"], ["e", "f"]])
    score(novelty, [["g", "h"]], first=GROUPS)  # of the next step, with which these are remembered
    once = score(novelty, [["a"]], held_out=True)
    assert once[0][0] == pytest.approx(expected("a", list("abcdef"), None), abs=1e-5)
    again = score(novelty, [["a"]], held_out=True)
    assert again[0] == pytest.approx(once[0], abs=1e-5)


def test_a_repeated_completion_is_not_new_and_a_groups_own_distance_is_told():
    novelty = made(nearest=1)
    score(novelty, [["a", "b"], ["c", "d"], ["e", "e"]])
    assert score(novelty, [["b", "new"]], first=GROUPS)[0][0] == pytest.approx(0.0, abs=1e-6)
    for texts, distance in ((["a", "b"], 1 - cosine("a", "b")), (["e", "e"], 0.0)):
        items = [item(text, sample=(GROUPS, i)) for i, text in enumerate(texts)]
        for outcome in score_all(novelty, items):
            assert outcome.columns["diversity/cosine_distance"] == pytest.approx(distance, abs=1e-5)
    for alone in (item("a", sample=(GROUPS, 0)), item("a", is_held_out=True)):
        assert not score_all(novelty, [alone])[0].columns


def test_nothing_is_scored_before_its_batch_is_whole_and_an_empty_batch_is_none():
    novelty = made()
    novelty.submit(0, item("a"))
    novelty.release([])
    assert novelty.poll() == [] and novelty.pending == 0 and not novelty.wait(0.0)
    novelty.submit(1, item("b"))
    novelty.release([0, 1])
    assert novelty.pending == 2 and novelty.wait(0.0)
    assert [key for key, _ in novelty.poll()] == [0, 1]


def test_an_evaluation_goes_before_the_batches_that_wait():
    novelty = made()
    for key in range(3):
        novelty.submit(key, item(f"train {key}"))
        novelty.release([key])
    for key in (3, 4):
        novelty.submit(key, item(f"held out {key}", is_held_out=True))
    novelty.release([3, 4])
    polled = [dict(novelty.poll()) for _ in range(4)]
    assert list(map(list, polled)) == [[3, 4], [0], [1], [2]]


def test_as_a_part_it_weighs_with_the_start_model():
    """The only group of a step of its own: a second one repeats it."""
    embedder = EmbedderSettings(str(tiny_directory()), True, "float32", 1000)
    how = novelty_settings(history=10, nearest=1)
    part = WeightedPart("new", partial(Novelty, "new", how, embedder, 1), weight=0.5)
    scoring = Weighted([part], site_alone(CPU))
    scoring.start()
    texts = ("12+34=46", "7")
    items = [item(text, sample=(0, i)) for i, text in enumerate(texts)]
    assert [outcome.value for outcome in score_all(scoring, items)] == [0.5, 0.5]
    later = [item(text, sample=(1, i)) for i, text in enumerate(texts)]
    outcomes = score_all(scoring, later)
    assert [outcome.value for outcome in outcomes] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert {outcome.achieved for outcome in outcomes} == {0.0}, "novelty alone is no success"
    scoring.close()


@pytest.mark.bitwise("a synchronous run is the same every time")
@pytest.mark.slow
def test_a_synchronous_run_with_novelty_is_the_same_every_time(tmp_path):
    both = "{sum: {kind: function}, new: {kind: novelty, nearest: 2, weight: 0.5}}"
    parts = ("reward=parts", f"reward.parts={both}", "max_lag=0", "max_steps=3", "eval.every=0")
    runs = []
    for name, ranks in {"one": None, "two": 2}.items():
        job = finished_job(*SMALL, *parts, run_dir=tmp_path / name, ranks=ranks)
        runs.append(untimed(job.rows)[-3:])
    assert runs[0] == runs[1]
    # Sums of scores of 0 or 1 alone are whole numbers.
    sums = [(row["reward/mean"] - 0.5) * COMPLETIONS for row in runs[0]]
    assert sums[0] == round(sums[0]), "everything is new at first"
    assert abs(sums[2] - round(sums[2])) > 1e-3
