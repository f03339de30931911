"""SmolLM2 as a policy, and as the trunk of a reward model that learns what a lexicon of sentiment
prefers: after ten steps against that model the policy is kinder in the eyes of the lexicon.
"""

from __future__ import annotations

import json
import os

import pytest

from tests.launching import ROOT, Job
from tests.sentiment import prompts

SMOLLM2 = os.environ.get("LLAMARL_SMOLLM2", "")
GOLD = "tests.sentiment:gold"
STAGE_S = 1500  # on a machine without matrix units, and busy
NUM_HELD_OUT = 40  # pairs; half of them by chance, with a standard deviation of 8 %
AGREEMENT = 0.7
GAIN = 0.1  # of gold, which goes from -1 to 1


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A file of prompts."""
    file = tmp_path_factory.mktemp("asked") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts()))
    return file


def finished(job: Job) -> list[dict]:
    """The rows of a job that has ended well."""
    with job:
        assert job.wait(STAGE_S) == 0, job.output
        return job.rows


@pytest.mark.slow
@pytest.mark.timeout(3 * STAGE_S)
@pytest.mark.skipif(not SMOLLM2, reason="needs LLAMARL_SMOLLM2 (recipes/fetch_smollm2.py)")
def test_a_policy_pleases_a_model_of_a_lexicon_and_the_lexicon(tmp_path, asked):
    policy = (f"model.path={SMOLLM2}", f"task.path={asked}", "max_new_tokens=24")
    of_prompts = ("task.answer_key=null",)
    pairs = tmp_path / "pairs.jsonl"
    sampled = Job(
        *(*policy, *of_prompts, f"reward.fn={GOLD}", "samples=8", "pairing=best_worst"),
        "eval.num_prompts=0",
        recipe=ROOT / "recipes" / "preferences.py",
        run_dir=pairs,
        directory_key="out",
    )
    finished(sampled)
    rows = pairs.read_text().splitlines(keepends=True)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(rows[:NUM_HELD_OUT]))
    pairs.write_text("".join(rows[NUM_HELD_OUT:]))

    scorer = tmp_path / "scorer"
    learned = Job(
        *(f"model.path={SMOLLM2}", f"task.path={pairs}", f"task.eval_path={held_out}"),
        *("lr=5e-5", "epochs=2", "examples_per_step=16", "eval.every=10"),
        recipe=ROOT / "recipes" / "reward_model.py",
        run_dir=scorer,
        directory_key="out",
        ranks=2,
    )
    assert finished(learned)[-1]["eval/accuracy"] >= AGREEMENT

    trained = Job(
        *("model=hf", *policy, "task=jsonl", *of_prompts),
        *("reward=model", f"reward.path={scorer}"),
        *(f"eval.gold={GOLD}", "eval.reference_key=null"),
        *("groups_per_step=8", "group_size=8", "lr=3e-5", "max_steps=10", "max_lag=0"),
        *("eval.num_prompts=40", "eval.every=10", "model.dtype=bfloat16"),
        *("trainer.compute_dtype=bfloat16", "threads=1"),
        run_dir=tmp_path / "run",
        ranks=2,
    )
    rows = finished(trained)
    assert rows[-1]["eval/reward"] > rows[0]["eval/reward"]
    assert rows[-1]["eval/gold"] >= rows[0]["eval/gold"] + GAIN
