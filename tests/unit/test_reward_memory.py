"""What a reward may hold of the machine's memory: what is resident counts, not what is mapped; and
an error of memory says so however it came about.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from llamarl.errors import RewardError
from llamarl.scoring.pool import RewardPool
from llamarl.workers.memory_limit import Note, Watch, too_much, write_note
from tests.build.user_module import write_modules
from tests.launching import ROOT

MB = 1 << 20
DEADLINE_S = 60.0  # for waits that must end; never reached unless something is broken
LIMIT_MB = 256
USER_MODULE = """
import mmap, os, subprocess, sys

if "MAPPED_GB" in os.environ:
    size = int(os.environ["MAPPED_GB"]) << 30
    MAP_NORESERVE = 0x4000  # so that a machine of less memory maps it too
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    mapped = mmap.mmap(-1, size, flags=flags)
    mapped[size // 2] = 1


def fill(mb):
    return b"x" * (mb << 20)


kept = fill(int(os.environ.get("AT_IMPORT_MB", 0)))


def score(prompt, completion, meta):
    what, _, argument = completion.partition(" ")
    if what == "fill":
        return float(len(fill(int(argument))) >> 20)
    if what == "child":
        code = "import time; x = b'x' * (%s << 20); time.sleep(1000)" % argument
        subprocess.run([sys.executable, "-c", code])
    if what == "refused":
        return float(len(bytearray(1 << 60)))
    if what == "words":
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")
    return 1.0
"""

WITH_TORCH = """
import torch
def score(prompt, completion, meta):
    return torch.tensor([1.0, 2.0]).sum().item()
"""
KILLED = "out of memory: the worker and what it started held some "
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what is held")


@pytest.fixture(autouse=True)
def user_directory(tmp_path, monkeypatch):
    write_modules(tmp_path, monkeypatch, my_rewards=USER_MODULE, with_torch=WITH_TORCH)


def outcomes_of(*completions, memory_mb=LIMIT_MB, **options):
    options = {"timeout_s": DEADLINE_S} | options
    with RewardPool("my_rewards:score", memory_mb=memory_mb, **options) as pool:
        return pool.score([("", completion, {}) for completion in completions])


# --- A reward ---


@on_linux
def test_what_is_mapped_and_not_touched_does_not_count(monkeypatch):
    monkeypatch.setenv("MAPPED_GB", "6")
    (outcome,) = outcomes_of("value", memory_mb=64)
    assert (outcome.kind, outcome.value) == ("score", 1.0)


def test_a_module_that_imports_torch_scores_within_the_usual_limit():
    with RewardPool("with_torch:score", memory_mb=2048, timeout_s=DEADLINE_S) as pool:
        (outcome,) = pool.score([("", "", {})])
    assert outcome.value == 3.0, outcome.reason


@on_linux
@pytest.mark.parametrize("what", ["fill 700", "child 700"])
def test_what_fills_more_than_the_limit_is_ended_and_costs_one_item(what):
    outcomes = outcomes_of("value", what, "value", "fill 64")
    assert [outcome.kind for outcome in outcomes] == ["score", "error", "score", "score"]
    assert outcomes[1].reason.startswith(KILLED)
    assert f"reward.memory_mb={LIMIT_MB} (raise it" in outcomes[1].reason


@on_linux
def test_an_import_that_fills_more_than_the_limit_ends_the_start(monkeypatch):
    monkeypatch.setenv("AT_IMPORT_MB", "700")
    with pytest.raises(RewardError, match=KILLED + r".*reward\.memory_mb=256 .*3 times in a row"):
        outcomes_of("value")


def test_memory_that_the_machine_refuses_is_an_error_of_memory():
    *refused, other = outcomes_of("refused", "words", "value")
    assert other.kind == "score"
    for outcome, said in zip(refused, ("MemoryError", "DefaultCPUAll"), strict=True):
        assert outcome.kind == "error"
        assert outcome.reason.startswith("out of memory: ") and said in outcome.reason
        assert "the machine refused it, not the limit memory_mb" in outcome.reason


@on_linux
def test_a_limit_that_is_no_setting_is_not_said_to_be_one():
    outcomes = outcomes_of("value", "fill 700", fn_key="eval.gold")
    assert outcomes[1].reason.endswith(f"more than memory_mb={LIMIT_MB}")


# --- A look ---


def process_that(code):
    """A Python that has run `code` and waits for the end of its input."""
    program = f"import sys\n{code}\nprint('ready', flush=True)\nsys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def note():
    made = Note()
    yield made
    made.hand_over()
    made.close()


def is_too_much(process, limit_mb, note):
    """Whether one of two looks finds too much."""
    watch = Watch(process.pid, limit_mb * MB, note.writer)
    with process:
        try:
            for _ in range(2):
                time.sleep(watch.wait_s())
                if watch.is_too_much():
                    return True
            return False
        finally:
            process.kill()


@on_linux
@pytest.mark.parametrize("limit_mb, expected", [(300, True), (500, False)])
def test_a_look_adds_up_a_process_and_its_descendants(note, limit_mb, expected):
    held = "import subprocess, sys\nheld = b'x' * (200 << 20)\n"
    grandchild = f"{held}print('ready', flush=True)\nsys.stdin.read()"
    child = (
        f"{held}child = subprocess.Popen([sys.executable, '-c', {grandchild!r}], "
        "stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "assert child.stdout.readline()"
    )
    assert is_too_much(process_that(child), limit_mb, note) is expected
    most = note.read()
    assert 400 * MB < most < 500 * MB if expected else most is None


@on_linux
@pytest.mark.parametrize("limit_mb, expected", [(280, True), (500, False)])
def test_what_forked_children_share_counts_once(note, limit_mb, expected):
    # Five processes of 300 MiB each, by their sums 1,500: but the pages are the same.
    forking = """
import os
held = b"x" * (300 << 20)
for _ in range(4):
    ready, told = os.pipe()
    if not os.fork():
        os.write(told, b".")
        sys.stdin.read()
        os._exit(0)
    os.read(ready, 1)
"""
    assert is_too_much(process_that(forking), limit_mb, note) is expected


@on_linux
def test_a_process_that_is_being_started_has_no_memory_of_its_own(note, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    # The child opens its input before it becomes another program, and waits there for a writer.
    starting = f"""
import os
held = b"x" * (200 << 20)
files = [(os.POSIX_SPAWN_OPEN, 0, {str(tmp_path / "fifo")!r}, os.O_RDONLY, 0)]
print("ready", flush=True)
os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ, file_actions=files)
"""
    process = process_that(starting)
    until = time.monotonic() + DEADLINE_S
    children = []
    while not children and time.monotonic() < until:
        time.sleep(0.01)
        children = psutil.Process(process.pid).children()
    try:
        assert len(children) == 1
        assert not is_too_much(process, 300, note)
    finally:
        for child in children:
            child.kill()


@on_linux
def test_the_next_look_comes_the_sooner_the_less_is_left(note):
    process = process_that("held = b'x' * (100 << 20)")
    with process:
        near = Watch(process.pid, 200 * MB, note.writer)
        far = Watch(process.pid, 5000 * MB, note.writer)
        assert not near.is_too_much() and not far.is_too_much()
        assert near.wait_s() < far.wait_s()
        process.kill()


@on_linux
@pytest.mark.parametrize("way", ["dies", "frees"])
def test_what_no_look_saw_is_known_by_the_peak(note, way):
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from llamarl.workers.memory_limit import Watch, peak_bytes, write_note
worker = os.fork()
if not worker:
    held = b"x" * (200 << 20)
    if {way!r} == "dies":
        os.kill(os.getpid(), 9)
    del held
    write_note({note.writer}, peak_bytes())
    os._exit(0)
watch = Watch(worker, 100 << 20, {note.writer})
os.waitpid(worker, 0)
if {way!r} == "dies":
    watch.check_peak()
"""
    subprocess.run([sys.executable, "-c", code], pass_fds=[note.writer], check=True, timeout=120)
    assert 200 * MB < note.read() < 300 * MB


def test_a_note_is_read_once_and_is_none_where_nothing_was_written(note):
    assert note.read() is None
    write_note(note.writer, 7)
    assert note.read() == 7 and note.read() is None


def test_failures_of_one_kind_have_one_text():
    # 560 and 600 MiB are some 600, 601 some 700.
    texts = [too_much(held * MB, 512, "reward.") for held in (560, 600, 601)]
    assert texts[0] == texts[1] != texts[2]
    assert "some 600 MiB, more than reward.memory_mb=512 (raise it" in texts[0]
