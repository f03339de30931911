"""What is packed to be scored, on one rank and for many."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llamarl.executor import ExecutorGroup
from llamarl.scoring.sharded import (
    ScoreRequest,
    ShardedScorer,
    from_message,
    pack_scored,
    to_message,
)
from tests.build.kind_settings import model_settings
from tests.scorers import SCORES, asked_for, transformers_scores, write_scorer

pytestmark = pytest.mark.machine
ALONE = ExecutorGroup("reward", (0,), 0, torch.device("cpu"))


@st.composite
def asked(draw):
    prompt = draw(st.lists(st.integers(0, 9), max_size=6))
    least = 0 if prompt else 1
    tokens = st.lists(st.integers(0, 9), min_size=least, max_size=9)
    completions = draw(st.lists(tokens, min_size=1, max_size=5))
    return ScoreRequest(
        torch.tensor(prompt, dtype=torch.int64),
        tuple(torch.tensor(c, dtype=torch.int64) for c in completions),
    )


def sequence_at(batch, row: int) -> list[int]:
    """The tokens that the one at a row sees, and itself."""
    segment = int((batch.cu_seqlens <= row).sum()) - 1
    own = batch.input_ids[int(batch.cu_seqlens[segment]) : row + 1].tolist()
    parent = int(batch.parents[segment])
    if parent < 0:
        return own
    assert batch.parents[parent] == -1
    start, end = batch.cu_seqlens[parent], batch.cu_seqlens[parent + 1]
    return batch.input_ids[start:end].tolist() + own


@given(st.lists(asked(), min_size=1, max_size=6), st.integers(1, 40))
def test_each_sequence_is_packed_once_whole_and_with_its_last_token(everything, budget):
    batches = pack_scored(everything, budget_tokens=budget)
    found = {}
    for batch in batches:
        assert int(batch.cu_seqlens[-1]) == batch.input_ids.numel() == batch.positions.numel()
        for row, place in zip(batch.rows.tolist(), batch.places.tolist()):
            assert place not in found
            found[place] = sequence_at(batch, row)
            assert int(batch.positions[row]) == len(found[place]) - 1
        is_one = len(batch.rows) == 1
        assert is_one or batch.input_ids.numel() <= budget
    wanted = []
    for one in everything:
        wanted += [one.prompt_ids.tolist() + c.tolist() for c in one.completions]
    assert [found[place] for place in range(len(wanted))] == wanted


@given(st.lists(asked(), max_size=6))
def test_what_is_asked_travels_as_numbers(everything):
    arrived = from_message(to_message(everything))
    assert len(arrived) == len(everything)
    for here, there in zip(everything, arrived):
        assert torch.equal(here.prompt_ids, there.prompt_ids)
        assert list(map(torch.Tensor.tolist, here.completions)) == list(
            map(torch.Tensor.tolist, there.completions)
        )


def test_a_prompt_is_computed_once_for_all_its_completions():
    prompt = torch.arange(10)
    (batch,) = pack_scored([ScoreRequest(prompt, (prompt[:2], prompt[:3]))], budget_tokens=15)
    assert batch.input_ids.numel() == 15
    assert len(pack_scored([ScoreRequest(prompt, (prompt[:2], prompt[:3]))], budget_tokens=14)) == 2


def test_a_sequence_without_tokens_is_refused():
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="without tokens"):
        ScoreRequest(none, (none,))


@pytest.mark.usefixtures("float32_products")
@pytest.mark.parametrize("budget", [1, 40, 100_000])
def test_scores_are_those_of_transformers_whatever_is_packed_together(tmp_path, budget):
    theirs = write_scorer(tmp_path, labels=("bad", "good"))
    questions = asked_for(5, 4)
    for label in (0, 1):
        chosen = model_settings(tmp_path, label=("bad", "good")[label], microbatch_tokens=budget)
        ours = ShardedScorer(chosen, ALONE).scores(questions)
        wanted = transformers_scores(theirs, questions, label)
        assert wanted.std() > 0.1
        torch.testing.assert_close(ours, wanted, rtol=0, atol=SCORES)
