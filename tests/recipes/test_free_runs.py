"""The main job without a bound on lag, and a reward that is slower than its generator."""

import json

import pytest

from tests.build.job import finished_job

B = 8  # groups a step
K = 4  # completions a group
STEPS = 30
ON_THEIR_WAY = 2 * B
BEHIND = 4  # versions: one in training, and those that travel
APART = (
    "placement.trainer=[0]",
    "placement.generator=[1]",
    "placement.reward=[2]",
    "placement.reference=[0]",
)


@pytest.mark.slow
def test_a_slow_reward_makes_a_run_slower_and_not_older_and_leaves_no_work_behind(tmp_path):
    """20 ms a completion; the generator would be thousands ahead by the end, all of version 0."""
    job = finished_job(
        *APART,
        "threads=1",
        "loss=tb",
        "buffer=replay",
        "buffer.most_on_policy=1.0",
        f"groups_per_step={B}",
        f"group_size={K}",
        f"max_steps={STEPS}",
        "eval.every=15",
        "eval.num_prompts=20",
        "checkpoint.every=0",
        "generator.max_slots=64",
        "reward.fn=tests.launching:unhurried",
        "reward.num_workers=1",
        run_dir=tmp_path / "run",
        ranks=3,
    )
    rows = job.rows[-STEPS:]
    # Every step has brought two of sixteen groups, and none of one prompt overtakes another's.
    oldest = ON_THEIR_WAY // (B // 4) + BEHIND
    assert max(row["buffer/age_min"] for row in rows) <= oldest < STEPS // 2
    assert "steps older at each of the" not in job.output, "nothing to warn of"
    assert "was given up" not in job.output
    evaluated = [row["step"] for row in job.rows if row.get("eval/reward") is not None]
    assert evaluated == [0, 15, 30]
    ledger = json.loads((job.checkpoint / "controller.rank0.json").read_text())["ledger"]
    trainer = json.loads((job.checkpoint / "trainer.rank0.json").read_text())
    handed = {ticket for ticket, _ in trainer["held"]}
    # What was started for nothing is what was on its way at the last step.
    assert ledger["frontier"] - len(handed) <= ON_THEIR_WAY
    assert len(handed) >= STEPS * B // 4
