"""Distillation as a user runs it: a mixture with a teacher for each part and no rewards, a resumed
run with another teacher, adapters, old data and several ranks.
"""

import math

import pytest
from safetensors.torch import load_file, save_file

from tests.build.job import finished_job
from tests.build.model_directory import copy_tiny
from tests.build.rows import write_rows
from tests.launching import SMALL, untimed

BAD_INPUT = 2
STEPS = 6
KL = "loss/teacher_kl"


def write_teacher(path, sharper):
    """The embedded model with larger logits: its distributions are sharper."""
    copy_tiny(path)
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"] *= sharper
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Of a mixture of few additions without answers, so that steps are of the same prompts: three
    with a sharp teacher, and one with the model that training starts from.
    """
    folder = tmp_path_factory.mktemp("given")
    parts = {}
    for part, numbers in {"sums": (21, 35, 58), "mine": (43,)}.items():
        file = folder / f"{part}.jsonl"
        write_rows(file, *({"prompt": f"{n}+{n + 1}="} for n in numbers))
        held = f"eval_path: {file}, weight: {len(numbers)}"
        parts[part] = f"{{kind: jsonl, path: {file}, prompt_key: prompt, answer_key: null, {held}}}"
    teachers = {
        "sums": write_teacher(folder / "sharp", 3.0),
        "mine": write_teacher(folder / "start", 1.0),
    }
    return [
        *SMALL,
        "loss=distill",
        "task=mixture",
        f"task.parts={{sums: {parts['sums']}, mine: {parts['mine']}}}",
        *(f"reference.teachers.{part}={path}" for part, path in teachers.items()),
        *("reward.fn=rewards:zero", "max_new_tokens=6", "lr=3e-5", f"max_steps={STEPS}"),
        *("groups_per_step=8", "group_size=8", "eval.every=0"),
    ]


@pytest.fixture(scope="module")
def run(words, tmp_path_factory):
    """A synchronous run in one process."""
    return finished_job(*words, "max_lag=0", run_dir=tmp_path_factory.mktemp("run") / "run")


def test_a_student_comes_nearer_to_the_teachers_of_its_parts_without_a_reward(run):
    rows = run.rows
    assert all(row["reward/mean"] == 0 and row["tokens/trained"] > 0 for row in rows)
    kl = [row[KL] for row in rows]
    assert sum(kl[-2:]) < 0.5 * sum(kl[:2])
    assert min(kl[:2]) > 0.1


def test_another_teacher_is_another_run(run, words, launch_here, tmp_path):
    other = write_teacher(tmp_path / "other", 2.0)
    given = [f"reference.teachers.sums={other}", f"run_dir={run.run_dir}", "max_lag=0"]
    code, said = launch_here(*words, *given, "resume=auto", f"max_steps={STEPS + 1}")
    assert code == BAD_INPUT
    assert f"another model, reference.teachers.sums={other}" in said.err
    assert "other weights" in said.err


@pytest.mark.slow
@pytest.mark.bitwise("a synchronous run of one process and one of two")
def test_on_two_ranks_it_is_the_same_run(run, words, tmp_path):
    both = finished_job(*words, "max_lag=0", run_dir=tmp_path / "run", ranks=2)
    assert untimed(both.rows) == untimed(run.rows)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_learn_from_a_teacher_on_old_data(words, tmp_path, ranks):
    old = ("max_lag=4", "overcommit=32", "trainer.lora.rank=4", "max_steps=12")
    rows = finished_job(*words, *old, run_dir=tmp_path / "run", ranks=ranks).rows
    assert max(row["lag/max"] for row in rows) >= ranks
    assert all(math.isfinite(row[KL]) for row in rows)
    assert rows[-1]["ratio/max"] > 1 and rows[-1]["kl/ref"] != rows[0]["kl/ref"]
