"""The main job with a replay buffer, with a beta that falls, with a reference that is reset, and
without a bound on lag where a reward is slower than its generator.
"""

import pytest

from llamarl.models.config import read_config, tiny_directory
from tests.build.job import finished_job
from tests.launching import GROUPS, SMALL, STEPS, untimed
from tests.tolerances import of_logprobs

pytestmark = pytest.mark.slow

S, K = 6, 4
SYNCHRONOUS = (
    *SMALL,
    "buffer=replay",
    "max_lag=0",
    f"group_size={S}",
    f"buffer.completions_per_prompt={K}",
    "buffer.sync_period=2",
    "buffer.max_size=60",
)
# One thread: two on cores that others use too wait for each other at the end of every operation.
FREE = (
    *SMALL,
    "threads=1",
    "buffer=replay",
    f"buffer.initial_completions={6 * 4}",
    "overcommit=4",
    "buffer.most_on_policy=0.5",
    "loss.fn=tests.launching:with_beta",
    "loss.beta=1.0",
    "loss.schedules.beta.kind=cut",
    "loss.schedules.beta.final=0.25",
    "loss.schedules.beta.end_step=4",
    "loss.schedules.beta.cut_step=3",
    "max_steps=5",
    "eval.every=0",
    "checkpoint.every=0",
)
KL = 0.5  # of the reward
KL_ROUNDING = of_logprobs(
    read_config(tiny_directory()), size=5.0
)  # nats a token: of a policy to itself, scored in other batches
RESET = (
    *SMALL,
    "reference=reset",
    "reference.reset_every=2",
    "max_lag=0",
    "loss.kl_coef=0.01",
    f"trainer.reward_kl_coef={KL}",
    "lr=1e-3",
    "checkpoint.every=1",
)


def held_in(row):
    """Completions that joined: the different ones and their copies."""
    return row["buffer/size"] + row["buffer/copies"]


def share_of_all_lags(row):
    """Return the sum of the shares of trained tokens that had each lag."""
    return sum(value for name, value in row.items() if name.startswith("lag/tokens/"))


@pytest.fixture(scope="module")
def synchronous_replay(tmp_path_factory):
    return finished_job(*SYNCHRONOUS, run_dir=tmp_path_factory.mktemp("replay") / "run")


def test_each_step_draws_from_all_that_has_joined_and_within_its_bound(synchronous_replay):
    rows = synchronous_replay.rows[1:]
    batch = GROUPS * S
    # Steps 0 and 2 join: one batch, then two more of which the oldest group of nine and a half
    # leaves.
    assert [held_in(row) for row in rows] == [batch, batch, 60, 60]
    assert [row["buffer/hidden"] for row in rows] == [0, batch, 0, batch]
    assert all(share_of_all_lags(row) == pytest.approx(1) for row in rows)
    assert [row["buffer/age_max"] for row in rows] == [0, 1, 2, 3]
    bound = 0 + (60 - S) // batch + 2 - 1
    assert max(row["lag/max"] for row in rows) <= bound == 3
    assert f"at most {bound} steps old" in synchronous_replay.output
    assert any(row["lag/max"] > 0 for row in rows), "nothing was replayed"


@pytest.mark.bitwise("a synchronous run that was resumed is the one that was not")
def test_a_resumed_run_draws_and_trains_as_one_that_was_not_stopped(synchronous_replay, tmp_path):
    """On two ranks and in one process alike."""
    for end in (2, STEPS):
        given = (*SYNCHRONOUS, f"max_steps={end}", "resume=auto")
        job = finished_job(*given, run_dir=tmp_path / "run", ranks=2)
    assert "resumed from step_2" in job.output
    assert untimed(job.rows) == untimed(synchronous_replay.rows)


@pytest.mark.parametrize("ranks", [None, 3])
def test_without_a_bound_every_group_is_handed_over_once_and_beta_falls(tmp_path, ranks):
    job = finished_job(*FREE, run_dir=tmp_path / "run", ranks=ranks)
    rows = job.rows[-5:]
    assert [row["loss/beta"] for row in rows] == pytest.approx([1.0, 0.8125, 0.625, 0.25, 0.25])
    assert held_in(rows[0]) >= 6 * 4 and rows[0]["lag/max"] == 0
    assert all(row["lag/max"] <= row["step"] - 1 for row in rows)
    assert "max_lag none, at most 8 groups on their way, replay of the newest" in job.output
    ledger, trainer = job.part("controller")["ledger"], job.part("trainer")
    handed = [ticket for ticket, _ in trainer["held"]]
    all_tickets = sorted(handed + ledger["again"] + trainer["buffered"])
    assert all_tickets == list(range(ledger["frontier"]))


@pytest.fixture(scope="module")
def reset_run(tmp_path_factory):
    return finished_job(*RESET, run_dir=tmp_path_factory.mktemp("reset") / "run")


@pytest.mark.machine
def test_a_reference_is_reset_every_so_many_steps(reset_run):
    rows = reset_run.rows[1:]
    assert [row["reference/version"] for row in rows] == [0, 0, 2, 2]
    # The reference and the trainer score in batches of other shapes, so that a KL of 0 has its
    # roundings.
    assert [abs(row["kl/ref"]) > KL_ROUNDING for row in rows] == [False, True, False, True], (
        "the policy is its own reference right after a reset"
    )
    taken_off = [row["reward/mean"] - row["reward/shaped_mean"] for row in rows]
    assert [abs(off) > 1e-3 for off in taken_off] == [False, True, False, True], (
        "the reward's KL is to the same reference"
    )


@pytest.mark.bitwise("a synchronous run that was resumed is the one that was not")
def test_a_resumed_run_has_the_reference_of_one_that_was_not_stopped(reset_run, tmp_path):
    for end in (2, 3, STEPS):  # at a reset, after it, and to the end
        given = (*RESET, f"max_steps={end}", "resume=auto")
        job = finished_job(*given, run_dir=tmp_path / "run", ranks=2)
    assert untimed(job.rows)[-1] == untimed(reset_run.rows)[-1]


REPLAYED = (
    "buffer.completions_per_prompt=4",
    "buffer.initial_completions=40",
    "overcommit=4",
)
REDUCED = (
    "model=tiny",
    "task=addition",
    "task.max_prompt_tokens=64",
    "max_new_tokens=6",
    "max_steps=3",
    "groups_per_step=8",
    "group_size=5",
    "lr=3e-5",
    "threads=1",
    "eval.every=0",
    "checkpoint.every=0",
    "generator.max_slots=64",
)
BETA_FALLS = "loss.schedules.beta.end_step=2"


@pytest.mark.parametrize("name", ["tba_red_team_gpt2", "tba_red_team_llama"])
def test_a_published_attack_runs_at_a_smaller_size(name, tmp_path):
    """Without a victim: its temperatures, its target, and a buffer that grows no more."""
    attack = (
        *REPLAYED,
        "buffer.grow_until=1",
        "buffer.sync_period=1",
        "reward=function",
        "eval.embedder=null",
        "loss.schedules.log_reward_temperature.end_step=2",
        "trainer.parity_tolerance=1e-3",  # which fresh tokens, were they compared, would exceed
    )
    job = finished_job(f"+experiment={name}", *REDUCED, *attack, run_dir=tmp_path / "run")
    rows = job.rows[-3:]
    assert [row["loss/log_reward_temperature"] for row in rows] == [2.0, 1.5, 1.0]
    assert all(row["grad_norm"] > 0 for row in rows)
    assert held_in(rows[1]) == held_in(rows[2])
    apart = max(row.get("parity/logprob_diff_max") or 0 for row in rows)
    assert apart > 0.01, "sampled at another temperature than it is scored at"


@pytest.mark.parametrize(
    "name, overrides, betas",
    [
        (
            "tba_table2",
            (*REPLAYED, BETA_FALLS, "trainer.warmup_steps=1", "trainer.decay_steps=1"),
            [0.012, 0.008, 0.004],
        ),
        (
            "tba_table3",
            (*REPLAYED, BETA_FALLS, "loss.schedules.beta.cut_step=1", "reward=function"),
            [1.0, 0.05, 0.05],
        ),
        ("tba_table4", ("reference.reset_every=1", "max_lag=0"), None),
    ],
)
def test_a_published_setting_runs_at_a_smaller_size(name, overrides, betas, tmp_path):
    job = finished_job(f"+experiment={name}", *REDUCED, *overrides, run_dir=tmp_path / "run")
    rows = job.rows[-3:]
    assert all(row["grad_norm"] > 0 for row in rows)
    if betas is None:
        assert [row["reference/version"] for row in rows] == [0, 1, 2]
        assert [row["tba/log_ratio"] for row in rows] == pytest.approx([0, 0, 0], abs=1e-4), (
            "the policy is its own reference"
        )
    else:
        assert [row["loss/beta"] for row in rows] == pytest.approx(betas)
        assert rows[0]["tb/log_ratio"] == pytest.approx(0, abs=1e-4)
        assert rows[-1]["kl/ref"] > 1e-6, "which has no sign, as a mean of log ratios has"


def test_ppo_with_a_value_head_trains_on_what_is_replayed_in_minibatches(tmp_path):
    ppo = ("loss=ppo", "trainer.advantages=gae", "eval.every=0", "checkpoint.every=2")
    twice = ("trainer.minibatches_per_step=2", "trainer.updates_per_batch=2", "resume=auto")
    for end in (2, STEPS):
        given = (*SYNCHRONOUS, *ppo, *twice, f"max_steps={end}")
        job = finished_job(*given, run_dir=tmp_path / "run")
    assert "no value head" not in job.output and "resumed from step_2" in job.output
    rows = job.rows[-STEPS:]
    assert max(row["lag/max"] for row in rows) > 0
    assert all(row["value/grad_norm"] > 0 for row in rows)
    assert all(share_of_all_lags(row) == pytest.approx(1) for row in rows)
    assert [held_in(row) for row in rows] == [24, 24, 60, 60]


# --- a reward that is slower than its generator ---

B = 8  # groups a step
LONG_RUN = 30  # steps
ON_THEIR_WAY = 2 * B
BEHIND = 4  # versions: one in training, and those that travel
APART = (
    "placement.trainer=[0]",
    "placement.generator=[1]",
    "placement.reward=[2]",
    "placement.reference=[0]",
    "reward.num_workers=1",
    "reward.fn=tests.launching:unhurried",
)


def test_a_slow_reward_makes_a_run_slower_and_not_older_and_leaves_no_work_behind(tmp_path):
    """20 ms a completion; the generator would be thousands ahead by the end, all of version 0."""
    job = finished_job(
        *APART,
        "threads=1",
        "loss=tb",
        "buffer=replay",
        "buffer.most_on_policy=1.0",
        f"groups_per_step={B}",
        "group_size=4",
        f"max_steps={LONG_RUN}",
        "eval.every=15",
        "eval.num_prompts=20",
        "checkpoint.every=0",
        "generator.max_slots=64",
        run_dir=tmp_path / "run",
        ranks=3,
    )
    rows = job.rows[-LONG_RUN:]
    # Every step has brought two of sixteen groups, and none of one prompt overtakes another's.
    oldest = ON_THEIR_WAY // (B // 4) + BEHIND
    assert max(row["buffer/age_min"] for row in rows) <= oldest < LONG_RUN // 2
    assert "steps older at each of the" not in job.output, "nothing to warn of"
    assert "was given up" not in job.output
    evaluated = [row["step"] for row in job.rows if row.get("eval/reward") is not None]
    assert evaluated == [0, 15, 30]
    handed = {ticket for ticket, _ in job.part("trainer")["held"]}
    # What was started for nothing is what was on its way at the last step.
    assert job.part("controller")["ledger"]["frontier"] - len(handed) <= ON_THEIR_WAY
    assert len(handed) >= LONG_RUN * B // 4
