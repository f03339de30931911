"""The main job with one ticket that goes on and on: the step of its deadline waits for it, or ends
it.
"""

import pytest

from tests.build.job import finished_job
from tests.launching import RECIPE, SMALL

pytestmark = pytest.mark.slow

LONG = 5  # the ticket that is a straggler
TOKENS = 400  # of each of its completions
SHORT = 4  # tokens of each other completion
GROUPS, SIZE = 4, 2
SLOW = f"""
import dataclasses, runpy, sys, time
from llamarl.inference.engine import Engine
submit, step = Engine.submit, Engine.step
def forced(self, ticket, prompt_ids, params, *, stream=0):
    length = params.max_new_tokens if ticket == {LONG} else {SHORT}
    exactly = dataclasses.replace(params, min_new_tokens=length, max_new_tokens=length)
    submit(self, ticket, prompt_ids, exactly, stream=stream)
def slow(self, chunk):
    time.sleep(0.01)
    return step(self, chunk)
Engine.submit, Engine.step = forced, slow
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_slow(folder, *overrides, ranks=None) -> tuple[list[dict], str]:
    """(rows, output) of the job whose ticket LONG is a straggler."""
    script = folder / "slow.py"
    script.write_text(SLOW)
    sizes = (f"groups_per_step={GROUPS}", f"group_size={SIZE}", f"overcommit={GROUPS}")
    given = (
        *sizes,
        "max_lag=1",
        "max_steps=4",
        f"max_new_tokens={TOKENS}",
        "generator.chunk_tokens=1",
        "eval.every=0",
        "generator.min_new_tokens=1",
        "generator.max_slots=32",
        "checkpoint.every=0",
        "straggler_factor=2",
        *overrides,
    )
    words = (str(RECIPE), *given)
    job = finished_job(*words, run_dir=folder / "run", recipe=script, ranks=ranks)
    return [row for row in job.rows if row["step"]], job.output


@pytest.mark.parametrize("ranks", [None, 2])
def test_at_its_deadline_a_straggler_ends_and_the_rest_of_its_step_is_trained_on(tmp_path, ranks):
    rows, _ = run_slow(tmp_path, "on_deadline=truncate", ranks=ranks)
    (cut,) = [row for row in rows if row["completion/deadline_truncated_fraction"]]
    assert cut["step"] == 2, (
        "started under version 0, its last step is the one that makes version 2"
    )
    assert cut["completion/deadline_truncated_fraction"] == 1 / GROUPS
    assert 0 < cut["tokens/deadline_truncated"] < SIZE * TOKENS
    assert cut["tokens/generated"] == cut["tokens/deadline_truncated"] + (GROUPS - 1) * SIZE * SHORT
    assert cut["tokens/trained"] == (GROUPS - 1) * SIZE * SHORT
    assert max(row["lag/max"] for row in rows) <= 1 and len(rows) == 4


def test_otherwise_its_step_waits_for_it_and_the_log_names_it(tmp_path):
    rows, log = run_slow(tmp_path)
    assert [row["completion/deadline_truncated_fraction"] for row in rows] == [0] * 4
    assert rows[1]["tokens/generated"] == SIZE * TOKENS + (GROUPS - 1) * SIZE * SHORT
    assert rows[1]["time/step_s"] > 0.01 * TOKENS / 2
    assert log.count("stragglers of generator rank 0") >= 1 and f"tickets {LONG} (" in log


def test_a_time_limit_that_nothing_meets_masks_everything_and_the_run_goes_on(tmp_path):
    limit = "generator.max_seconds=1e-6", "generator.chunk_tokens=1", "generator.min_new_tokens=5"
    job = finished_job(*SMALL, "max_lag=1", *limit, run_dir=tmp_path / "run")
    rows = [row for row in job.rows if row["step"]]
    assert [row["completion/deadline_truncated_fraction"] for row in rows] == [1] * len(rows)
    assert all(row["tokens/trained"] == 0 < row["tokens/deadline_truncated"] for row in rows)
