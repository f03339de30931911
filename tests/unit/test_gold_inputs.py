"""Gold scorers and base models that cannot be used: told before anything starts, by key."""

import shutil

import pytest

from llamarl.launch.checks import check_inputs
from llamarl.models.config import tiny_directory
from tests.random_models import swap_tokens
from tests.scorers import write_scorer
from tests.unit.refusals import complaint, job, refusal


@pytest.mark.parametrize("key", ["eval.gold=module:function", f"eval.base={tiny_directory()}"])
@pytest.mark.parametrize("never", ["eval.every=0"])
def test_what_would_judge_nothing_is_said(key, never):
    said = complaint(key, never)
    assert "nothing is evaluated; eval.every=10 eval.num_prompts=500, or eval." in said


def test_a_gold_model_of_several_labels_needs_one(tmp_path):
    write_scorer(tmp_path / "gold", labels=("toxic", "fine"))
    gold = f"eval.gold={tmp_path}/gold"
    said = refusal(gold)
    assert said.startswith("eval.gold_label=null: ") and "toxic, fine" in said
    check_inputs(job(gold, "eval.gold_label=fine").inputs)


def test_a_scorer_with_a_short_context_is_refused(tmp_path):
    write_scorer(tmp_path / "gold", max_position_embeddings=20)
    assert f"eval.gold={tmp_path}/gold: its context is 20" in refusal(f"eval.gold={tmp_path}/gold")


def test_a_base_of_other_tokens_has_no_perplexity_of_the_policys(tmp_path):
    base = shutil.copytree(tiny_directory(), tmp_path / "base")
    swap_tokens(base)
    assert f"eval.base={base}: its vocabulary is not that of the policy" in refusal(
        f"eval.base={base}"
    )


def test_rows_without_a_text_under_the_key_are_named_and_may_have_none():
    gold = "eval.gold=my_module:gold"
    said = refusal(gold, "eval.reference_key=summary")
    assert said.startswith("eval.reference_key=summary: held-out row 0 (") and "answer" in said
    check_inputs(job(gold, "eval.reference_key=null").inputs)
