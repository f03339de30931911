"""Runs that a judge rewards, from the command line to the rows of metrics."""

import pytest

from tests.judge_server import HANG_UP, NO_REPLY, JudgeServer, Reply, longer
from tests.launching import ForkedJob

BAD_INPUT = 2  # the exit code
KEY = "sk-a-secret-that-must-not-be-seen"


def judged_by(server):
    address = (f"reward.url={server.url}", "reward.api_key_env=JUDGE_KEY")
    return ("reward=judge", *address, "reward.model=wise")


def run_judged_by(server, folder, *overrides):
    """The job, which has ended, and its exit code."""
    small = ("eval.every=0", "groups_per_step=8", "group_size=4")
    given = (*judged_by(server), *small, *overrides)
    job = ForkedJob(*given, run_dir=folder / "run", env={"JUDGE_KEY": KEY})
    with job:
        return job, job.wait()


@pytest.mark.slow
def test_a_run_learns_from_a_judge_and_writes_no_key(tmp_path):
    with JudgeServer(longer) as server:
        asked = ("reward.ask=group", "max_steps=2", "max_lag=0")
        job, code = run_judged_by(server, tmp_path, *asked)
    assert code == 0, job.output
    assert len(job.rows) == 2
    for row in job.rows:
        assert row["reward/mean"] == pytest.approx(0.5)  # of each pair one point is given
        assert row["reward/std"] > 0 and row["reward/error_rate"] == 0
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    files = [file for file in job.run_dir.rglob("*") if file.is_file()]
    assert files and not any(KEY.encode() in file.read_bytes() for file in files)
    assert KEY not in job.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "reply, said",
    [
        ("lovely", 'judge nonsense: no "Score: N" in the reply: lovely'),
        (NO_REPLY, "judge slow: no reply in reward.timeout_s=5"),
        (HANG_UP, "judge down: "),
    ],
    ids=["nonsense", "slow", "down"],
)
def test_a_judge_who_is_of_no_use_ends_the_run(tmp_path, reply, said):
    impatient = ("reward.timeout_s=5", "reward.max_retries=0", "reward.max_parallel=64")
    with JudgeServer(lambda question: reply) as server:
        job, code = run_judged_by(server, tmp_path, *impatient, "max_steps=50")
    assert code == 1, job.output
    assert "above reward.max_error_rate=0.1" in job.output and said in job.output
    assert "Traceback" not in job.output


def test_a_judge_among_other_parts_is_named_by_its_own_keys(launch_here, tmp_path):
    reply = Reply(status=401, body=b"who?")
    with JudgeServer(lambda question: "", probe_reply=reply) as server:
        taste = {"kind": "judge", "url": server.url, "model": "wise"}
        parts = [f"reward.parts.taste.{name}={value}" for name, value in taste.items()]
        rules = "reward.parts.rules.kind=function"
        code, said = launch_here("reward=parts", rules, *parts, f"run_dir={tmp_path}/run")
    assert code == BAD_INPUT
    assert f"reward.parts.taste.url={server.url}: judge refused: HTTP 401" in said.err
    assert "reward.parts.taste.api_key_env names the variable" in said.err


def test_a_judge_who_refuses_is_bad_input(launch_here, monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    reply = Reply(status=401, body=f"unknown key {KEY}".encode())
    with JudgeServer(lambda question: "", probe_reply=reply) as server:
        code, said = launch_here(*judged_by(server), f"run_dir={tmp_path}/run")
    assert code == BAD_INPUT and not (tmp_path / "run").exists()
    assert f"reward.url={server.url}: judge refused: HTTP 401" in said.err
    assert KEY not in said.out + said.err
