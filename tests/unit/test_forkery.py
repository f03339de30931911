"""A forked job is to its test what a started one is: arguments, environment, output and end."""

import signal

import psutil
import pytest

from tests.launching import ForkedJob

SAYS = """
import os, sys
if "COLOURED" in os.environ:
    import colours
print("given", sys.argv[1:], os.environ["COLOUR"], "PATH" in os.environ)
print("rank", os.environ.get("RANK"), "of", os.environ.get("WORLD_SIZE"), file=sys.stderr)
"""
FAILS = """
sys.exit(3)
"""
FAILS_ON_ONE = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("no more")
time.sleep(600)
"""
WAITS = """
import os, signal, sys, time
def end(*_):
    print("asked to stop", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
print("waits", flush=True)
time.sleep(600)
"""
IS_DEAF = WAITS.replace("os._exit(0)", "pass")
MEETS = """
import os
from datetime import timedelta
from torch.distributed import TCPStore
port = int(os.environ["MASTER_PORT"])
store = TCPStore(os.environ["MASTER_ADDR"], port, timeout=timedelta(seconds=60))
mine, other = (os.environ["RANK"], "1") if os.environ["RANK"] == "0" else ("1", "0")
store.set(mine, f"from {mine}")
print(f"heard {store.get(other).decode()}", flush=True)
"""
# The first rank that fails ends the others, so none may fail before all have spoken.
FAILS_WHEN_ALL_HAVE_SPOKEN = MEETS + FAILS


@pytest.fixture
def job_of(tmp_path):
    """job_of(program, ...): a ForkedJob of this text."""

    def make(program: str, *overrides: str, **more) -> ForkedJob:
        file = tmp_path / "program.py"
        file.write_text(program)
        return ForkedJob(*overrides, run_dir=tmp_path / "run", recipe=file, **more)

    return make


def test_arguments_and_environment_come_and_output_and_code_go(job_of, monkeypatch, tmp_path):
    monkeypatch.setenv("COLOUR", "red")
    monkeypatch.delenv("PATH")  # which the process to fork from has
    with job_of(SAYS + FAILS, "lr=1") as job:
        assert job.wait() == 3
    assert f"given ['lr=1', 'run_dir={tmp_path / 'run'}'] red False" in job.output
    assert "rank None of None" in job.output
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "colours.py").write_text("print('imported')")
    env = {"COLOUR": "blue", "COLOURED": "yes", "PYTHONPATH": str(tmp_path / "modules")}
    with job_of(SAYS + FAILS_WHEN_ALL_HAVE_SPOKEN, env=env, ranks=2) as job:
        assert job.wait() == 1, "as torchrun says it"
    assert "blue False" in job.output and job.output.count("imported") == 2
    assert "rank 0 of 2" in job.output and "rank 1 of 2" in job.output
    assert "heard from 0" in job.output and "heard from 1" in job.output


def test_a_rank_that_fails_ends_the_others(job_of):
    with job_of(FAILS_ON_ONE, ranks=3) as job:
        assert job.wait() == 1
        assert "ValueError: no more" in job.output
        assert not [pid for pid in job.rank_pids().values() if psutil.pid_exists(pid)]


def test_a_stop_is_sigterm_to_all_ranks(job_of):
    with job_of(WAITS, ranks=2) as job:
        job.until(lambda: job.output.count("waits") == 2, "both ranks")
        assert job.process.poll() is None
        job.stop()
        assert job.wait() == 0
    assert job.output.count("asked to stop") == 2


def test_a_killed_process_has_the_signals_number(job_of):
    with job_of(WAITS) as job:
        job.until(lambda: "waits" in job.output, "the process")
        psutil.Process(job.rank_pids()[0]).kill()
        assert job.wait() == -signal.SIGKILL


def test_leaving_a_job_kills_it(job_of):
    with job_of(IS_DEAF, ranks=2) as job:
        job.until(lambda: job.output.count("waits") == 2, "both ranks")
        job.stop()
        job.until(lambda: job.output.count("asked to stop") == 2, "both ranks")
    assert not [pid for pid in job.rank_pids().values() if psutil.pid_exists(pid)]
