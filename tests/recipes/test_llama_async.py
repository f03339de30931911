"""The main job as a user starts it: what it writes, that runs agree, and what it says to wrong
input.
"""

import pytest
import torch

from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder, read_config
from llamarl.models.config import tiny_directory
from llamarl.models.hf import load_weights
from tests.build.job import finished_job
from tests.build.model_directory import copy_tiny
from tests.launching import SMALL, STEPS, ForkedJob, untimed
from tests.tolerances import of_logprobs, rounding

NAMES = """
    step policy_version reward/mean reward/std reward/error_rate loss/value grad_norm entropy kl/ref
    ratio/mean ratio/max ratio/capped_fraction lag/mean lag/max tokens/trained tokens/generated
    completion/length_mean completion/truncated_fraction packing/padding_fraction
    time/wall_s time/step_s time/wait_for_data_s generator/tokens_per_s generator/idle_fraction
    trainer/idle_fraction weights/publish_stall_s weights/swap_stall_s weights/bytes
    parity/logprob_diff_max
""".split()
TINY = read_config(tiny_directory())
EXPORTED = of_logprobs(TINY, size=2.0)  # logits, transformers against our decoder
SHARDED = rounding(
    terms=TINY.hidden_size, depth=4 * TINY.num_hidden_layers
)  # loss and norms, two trainer ranks against one
BAD_INPUT = 2


def test_every_row_has_every_name_and_evaluations_are_at_their_steps(synchronous_run):
    rows = synchronous_run.rows
    assert [r["step"] for r in rows] == list(range(STEPS + 1))
    assert [r["step"] for r in rows if r.get("eval/accuracy") is not None] == [0, 2, 4]
    for row in rows[1:]:
        assert not [name for name in NAMES if name not in row]


@pytest.mark.bitwise("a synchronous run has the same bits on one rank and on two")
def test_one_process_and_two_ranks_sample_and_train_on_the_same_bits(runs):
    assert untimed(runs("two_ranks").rows) == untimed(runs("synchronous").rows)


def test_fresh_tokens_agree_between_trainer_and_generator(synchronous_run):
    for row in synchronous_run.rows[1:]:
        if row["tokens/trained"] and row["grad_norm"]:
            assert 0 <= row["parity/logprob_diff_max"] <= 1e-4


def test_lag_stays_within_its_bound(runs):
    lags = [row["lag/max"] for row in runs("asynchronous").rows[1:]]
    assert max(lags) <= 1 and len(lags) == STEPS


BOTH_TRAIN = ("placement.trainer=[0,1]", "placement.generator=[1]", "trainer.replicate=2")


@pytest.mark.parametrize(
    "ranks, placement",
    [(None, ()), pytest.param(2, BOTH_TRAIN, marks=pytest.mark.slow)],
    ids=["one process", "both ranks train"],
)
def test_beside_its_trainer_a_generator_samples_with_the_newest_weights(tmp_path, ranks, placement):
    """Half of a batch is started a step ahead of the others, and nothing is left to chance."""
    counts = ("overcommit=2", "max_lag=2", "eval.every=0", "checkpoint.every=0")
    job = finished_job(*SMALL, *counts, *placement, run_dir=tmp_path / "run", ranks=ranks)
    assert [row["lag/mean"] for row in job.rows] == [0.0] + [0.5] * (STEPS - 1)


def test_a_run_leaves_its_config_and_a_model_that_transformers_loads(runs):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = runs("asynchronous")
    assert "max_lag: 1" in (run.run_dir / "config.yaml").read_text()
    hf = run.checkpoint / "hf"
    assert run.checkpoint.name == f"step_{STEPS}"
    ids = torch.tensor([AutoTokenizer.from_pretrained(hf)("12+34=").input_ids])
    theirs = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)(ids).logits[0]
    decoder = load_weights(build_decoder(read_config(hf)), hf)
    size = ids.numel()
    ours = decoder(ids[0], torch.arange(size), PackedAttention(torch.tensor([0, size])))
    assert torch.allclose(ours, theirs, atol=EXPORTED)
    before = load_weights(build_decoder(TINY), tiny_directory()).tok_embeddings.weight
    assert not torch.equal(before, decoder.tok_embeddings.weight), "it was not trained"


def test_a_malformed_line_of_data_is_named(launch_here, tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n')
    given = ("task=jsonl", f"task.path={data}", "max_new_tokens=6")
    code, output = launch_here(*given, f"run_dir={tmp_path / 'run'}")
    assert code == BAD_INPUT and f"{data}:2" in output.err


def test_truncated_weights_are_named(launch_here, tmp_path):
    model = copy_tiny(tmp_path / "model")
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    code, output = launch_here(f"model.path={model}", f"run_dir={tmp_path / 'run'}")
    assert code == BAD_INPUT and "model.safetensors" in output.err


def test_a_dry_run_shows_the_plan_scores_samples_and_writes_nothing(launch_here, tmp_path):
    code, output = launch_here("+dry_run=true", f"run_dir={tmp_path / 'run'}")
    assert code == 0, output.err
    assert "rank 0   trainer, generator, reward, 0." in output.out
    assert output.out.count("\nsample ") == 3 and "bytes a sync" in output.out
    assert not (tmp_path / "run").exists()


def assert_alike(row, want, exact=(), rounded=()):
    """Two rows of metrics with the same values of some columns, and of others but for rounding."""
    for name in ("reward/mean", "tokens/trained", *exact):
        assert row[name] == want[name], name
    for name in ("loss/value", "grad_norm", *rounded):
        assert row[name] == pytest.approx(want[name], abs=SHARDED, rel=SHARDED), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, placement",
    [
        (4, ("placement.trainer=[0,1]", "placement.generator=[2]", "placement.reward=[3]")),
        (3, ("placement.trainer=[0]", "placement.generator=[1,2]", "placement.reward=[2]")),
    ],
)
def test_any_placement_trains_alike(synchronous_run, tmp_path, ranks, placement):
    job = finished_job(*SMALL, "max_lag=0", *placement, run_dir=tmp_path / "run", ranks=ranks)
    rows, want = job.rows, synchronous_run.rows
    assert [r["step"] for r in rows] == [r["step"] for r in want]
    assert rows[0]["eval/accuracy"] == want[0]["eval/accuracy"]
    assert_alike(rows[1], want[1], exact=["lag/max"])


@pytest.mark.slow
@pytest.mark.parametrize("eps, is_gradient", [(1e-8, True), (1e3, False)])
def test_a_step_that_changed_nothing_ends_a_run_where_there_was_a_gradient(
    tmp_path, eps, is_gradient
):
    """One below the optimizer's eps is rounding: how a sum of nothing rounds must end no run."""
    too_small = ("lr=1e-30", "max_lag=0", "eval.every=0", f"trainer.eps={eps}")
    with ForkedJob(*SMALL, *too_small, "max_steps=2", run_dir=tmp_path / "run") as job:
        code = job.wait()
    assert (code != 0) == is_gradient, job.output
    assert ("the step changed nothing the generator can see" in job.output) == is_gradient


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["trainer.replicate=2", "trainer.tensor_parallel=2"])
def test_replicas_and_tensor_parallel_trainers_train_as_one_rank_does(
    synchronous_run, tmp_path, topology
):
    five = ("placement.trainer=[0,1,2,3]", "placement.generator=[4]")
    five += ("max_lag=0", "max_steps=3", "eval.every=0")
    rows = finished_job(*SMALL, *five, topology, run_dir=tmp_path / "run", ranks=5).rows
    want = synchronous_run.rows
    assert [r["step"] for r in rows] == [1, 2, 3]
    # Later ones are of policies that rounding has moved; tests/ranks/test_topologies.py has those.
    exact, rounded = ("tokens/generated", "lag/max"), ("entropy", "ratio/mean")
    assert_alike(rows[0], want[1], exact, rounded)


def known(name, rows):
    """The values of a column that has some."""
    return [row[name] for row in rows if row.get(name) is not None]


@pytest.mark.slow
def test_scales_of_rows_that_trainer_ranks_share_are_those_of_whole_rows(tmp_path):
    """With int8, a scale of a part of a row would sample other tokens."""
    common = ("generator.quantize=int8", "max_lag=0", "max_steps=2", "eval.every=0")
    want = finished_job(*SMALL, *common, run_dir=tmp_path / "one").rows
    three = ("placement.trainer=[0,1]", "placement.generator=[2]", "trainer.tensor_parallel=2")
    rows = finished_job(*SMALL, *common, *three, run_dir=tmp_path / "run", ranks=3).rows
    assert len(rows) == len(want)
    assert_alike(rows[0], want[0], exact=["tokens/generated"])
    # Of each version, in the row of the step that it sampled.
    divergence = known("weights/quantization_kl", rows)
    expected = known("weights/quantization_kl", want)
    assert max(divergence) > 0
    for value in divergence:
        assert min(expected) - SHARDED <= value <= max(expected) + SHARDED


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1])
def test_two_ranks_that_share_the_generators_model_train_as_one_does(
    synchronous_run, tmp_path, lag
):
    three = (
        f"max_lag={lag}",
        "placement.generator=[1,2]",
        "generator.tensor_parallel=2",
        "max_steps=3",
        "eval.every=3",
    )
    job = finished_job(*SMALL, *three, run_dir=tmp_path / "run", ranks=3)
    rows, want = job.rows, synchronous_run.rows
    assert "generator 1,2 (tensor parallel 2)" in job.output
    assert [r["step"] for r in rows] == [0, 1, 2, 3] and rows[1]["grad_norm"] > 0
    assert [r["step"] for r in rows if r.get("eval/accuracy") is not None] == [0, 3]
    fresh = known("parity/logprob_diff_max", rows[1:])
    assert fresh and max(fresh) <= 1e-4
    if lag == 0:
        assert rows[0]["eval/accuracy"] == want[0]["eval/accuracy"]
        assert_alike(rows[1], want[1], exact=["tokens/generated", "lag/max"])
