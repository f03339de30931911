"""The ranks of one host: their environment, their ends, and the end of what started them."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from llamarl.workers import ranks as module
from llamarl.workers.ranks import Ranks, stopping

WAIT_S = 30  # longer than any of these programs takes on a busy machine
RANK = "import os, sys, time, signal\nrank = int(os.environ.get('RANK', 0))\n"


@pytest.fixture
def started():
    """started(program, num): the ranks of a program, which are killed at the end."""
    made = []

    def start(program, num=2, **given):
        source = RANK + textwrap.dedent(program)
        ranks = Ranks([], num=num, program=(sys.executable, "-c", source), **given)
        made.append(ranks)
        return ranks

    yield start
    for ranks in made:
        ranks._send(signal.SIGKILL)


def until(holds):
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_each_rank_knows_its_place_and_prints_to_whoever_asked(started, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    lines = []
    names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    said = f"print(rank, *(os.environ.get(name) for name in {names}), len(os.environ.get"
    said += "('LLAMARL_STORE_FD', '')) > 0, 'TORCHELASTIC_USE_AGENT_STORE' in os.environ)"
    assert started(said, show=lines.append).wait() == 0
    assert sorted(lines) == ["0 0 2 2 127.0.0.1 True False", "1 1 2 2 127.0.0.1 False False"]
    lines.clear()
    assert started(said, num=1, show=lines.append).wait() == 0
    assert lines == ["0 None None None None False False"]


def test_the_first_rank_gets_a_socket_that_listens_on_the_loopback_alone(started):
    program = """
    import socket
    listener = socket.socket(fileno=int(os.environ["LLAMARL_STORE_FD"])) if rank == 0 else None
    if listener:
        assert listener.getsockname() == ("127.0.0.1", int(os.environ["MASTER_PORT"]))
        assert listener.accept()[0].recv(5) == b"hello"
    else:
        there = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        socket.create_connection(there, timeout=20).sendall(b"hello")
    """
    assert started(program).wait() == 0


@pytest.mark.parametrize(
    "end, code, said",
    [
        ("sys.exit(2)", 2, ""),
        (
            "os.kill(os.getpid(), 9)",
            137,
            "rank 1 was ended by SIGKILL; was there too little memory?",
        ),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(started, capfd, end, code, said):
    ranks = started(f"(lambda: {end})() if rank else time.sleep(0.2)")
    assert ranks.wait() == code
    assert said in capfd.readouterr().err


def test_ranks_that_do_not_end_after_a_failure_are_told_and_then_killed(
    started, monkeypatch, capfd
):
    for name, seconds in {"TOLD_S": 0.1, "ALONE_S": 0.2, "KILL_S": 0.2}.items():
        monkeypatch.setattr(module, name, seconds)
    program = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); sys.exit(3) if rank else time.sleep(99)"
    )
    assert started(program).wait() == 3
    said = capfd.readouterr().err
    assert "rank 1 has failed, and rank 0 has not ended yet" in said
    assert "SIGTERM" in said and "SIGKILL" in said


def test_one_stop_waits_for_an_orderly_end_and_a_second_kills_with_what_was_started(
    started, tmp_path, capfd
):
    orderly = f"""
    import subprocess
    child = subprocess.Popen(["sleep", "99"])
    def end(*_):
        open(r"{tmp_path}/told" + str(rank), "w").close()
    signal.signal(signal.SIGTERM, end)
    open(r"{tmp_path}/child" + str(rank), "w").write(str(child.pid))
    while True:
        time.sleep(99)
    """
    ranks = started(orderly)
    children = [tmp_path / f"child{rank}" for rank in (0, 1)]
    until(lambda: all(file.exists() and file.read_text() for file in children))
    with stopping(ranks):
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: all((tmp_path / f"told{rank}").exists() for rank in (0, 1)))
        assert ranks.living == [0, 1]
        os.kill(os.getpid(), signal.SIGINT)
        assert ranks.wait() == 137
    said = capfd.readouterr().err
    assert "with a checkpoint" in said and "at once" in said and "memory" not in said
    pids = [int(file.read_text()) for file in children]
    until(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ranks_end_in_order_once_what_started_them_is_killed(tmp_path):
    rank = f"""
    import os, signal, sys, time
    from llamarl.workers.ranks import hold_lifeline
    def end(*_):
        open(r"{tmp_path}/ended", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    hold_lifeline()
    open(r"{tmp_path}/ready", "w").close()
    time.sleep(99)
    """
    launcher = f"""
    import sys
    from llamarl.workers.ranks import Ranks
    Ranks([], program=(sys.executable, "-c", {textwrap.dedent(rank)!r})).wait()
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(launcher)])
    until(lambda: (tmp_path / "ready").exists())
    process.kill()
    process.wait(WAIT_S)
    until(lambda: (tmp_path / "ended").exists())
