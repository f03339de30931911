"""Runs whose sampled distribution is narrower than the softmax: the trainer and the reference score
the same one, so that the ratio is 1 and the KL to the start is 0 until something was learned.
"""

from __future__ import annotations

import json

import pytest

from tests.build.job import finished_job
from tests.launching import SMALL
from tests.padded import TOKENS, padded_directory

RATIO = 1e-4  # float32
KL = 1e-6  # nats, of a model to itself by another path
KL_ARGS = ("loss.kl_coef=0.1", "max_lag=0", "max_steps=2", "metrics.samples=4", "eval.every=0")
REFERENCES = {
    "frozen": ("reference=frozen",),
    "streamed": ("reference=frozen", "reference.stream=true"),
    "sharded": ("reference=sharded",),
}


@pytest.mark.parametrize("reference", list(REFERENCES))
def test_ratio_and_kl_of_a_narrowed_distribution_are_those_of_one_model(reference, tmp_path):
    model = padded_directory(tmp_path / "padded")
    given = ("model=hf", f"model.path={model}", "model.dtype=float32", "lr=1e-3")
    narrow = ("generator.min_new_tokens=3", "temperature=1.5", "max_new_tokens=8")
    more = REFERENCES[reference]
    job = finished_job(*SMALL, *given, *narrow, *more, *KL_ARGS, run_dir=tmp_path / "run")
    rows = job.rows
    assert "12 of its 64 vocabulary rows" in job.output
    trained = [row for row in rows if row.get("ratio/mean") is not None]
    assert trained, "nothing was trained on"
    for row in trained:
        assert row["ratio/mean"] == pytest.approx(1, abs=RATIO)
        assert row["parity/logprob_diff_max"] <= RATIO
    assert abs(trained[0]["kl/ref"]) <= KL
    lengths = []
    for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines():
        for group in json.loads(line)["shown"]:
            for completion in group["completions"]:
                lengths.append(len(completion["ids"]))
                assert max(completion["ids"]) < TOKENS
                assert 2 not in completion["ids"][:3]
    assert lengths and min(lengths) > 3
