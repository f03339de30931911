"""A host that is lost in mid-run, or the wire to it, ends the run with an error that says what was
lost, on both sides; the run goes on from there, or has a whole checkpoint to go on from.
"""

import functools

import pytest

from llamarl.checkpoint.checkpointer import verify
from tests.build.job import finished_job
from tests.launching import SMALL, Job, untimed
from tests.two_hosts import agents

SILENT_S = 5
GONE_S = 120.0  # SILENT_S three times, for a silent store, and what ending takes under load
PATIENCE = (f"heartbeat_timeout_s={SILENT_S}", "timeout_s=60")
RUN = (
    *SMALL,
    "max_lag=0",
    "eval.every=0",
    "max_steps=16",
    "checkpoint.every=4",
    "reward.fn=tests.launching:unhurried",
)
APART = ()  # the trainer on the first host, which has the store too; generator and reward there
SHARDED = ("placement.trainer=[0,1]", "placement.generator=[1]", "placement.reward=[1]")
TURNED = ("placement.trainer=[1]", "placement.generator=[0]", "placement.reward=[0]")
OF_SILENCE = "has not been heard of for"
OF_STORE = "the control store is gone"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """uninterrupted(*overrides): the rows of the run that nothing befalls, on one host."""

    @functools.cache
    def rows(*overrides: str) -> list[dict]:
        run_dir = tmp_path_factory.mktemp("one") / "run"
        given = (*RUN, *overrides, "threads=1")
        return untimed(finished_job(*given, run_dir=run_dir, ranks=2, kind=Job).rows)

    return rows


def after_six_steps(hosts, run_dir, befalls, *overrides) -> tuple[str, str, Job]:
    """(what each host said, the first one's job) of a run that befalls(a, b) once it has made six
    steps, and of which no rank is left.
    """
    with agents(hosts, *RUN, *overrides, *PATIENCE, run_dir=run_dir) as (a, b):
        a.until_rows(6)
        befalls(a, b)
        return a.until_ranks_gone(GONE_S), b.until_ranks_gone(GONE_S), a


def goes_on(hosts, run_dir, overrides, at_least) -> list[dict]:
    """The rows of a run that is started again and ends."""
    given = (*RUN, *overrides, *PATIENCE, "resume=auto")
    with agents(hosts, *given, run_dir=run_dir) as (a, b):
        assert (a.wait(), b.wait()) == (0, 0), f"{a.output}\n{b.output}"
    resumed = int(a.output.partition("resumed from step_")[2].split()[0])
    assert resumed >= at_least
    return untimed(a.rows)


def check_saved(job: Job, at_least: int) -> None:
    """Check that the newest checkpoint is whole, and of this step or a later one."""
    assert verify(job.checkpoint) == []
    assert job.saved_step >= at_least


def check_named(output: str, rank: int, hosted: str, causes: tuple[str, ...]) -> None:
    """Check an error of a rank: who, where, in which step, why, and what to do."""
    (start,) = [line for line in output.splitlines() if line.startswith(f"llamarl: rank {rank}")]
    said = output[output.index(start) :]
    assert any(cause in said for cause in causes), output
    assert f"rank {rank} ({hosted})" in said, output
    assert ", step " in said and "resume=auto" in said, output


def test_a_cut_wire_is_named_by_the_host_that_keeps_the_trainer_and_by_the_other(
    hosts, tmp_path, uninterrupted
):
    """No step is lost: the trainer is whole, and saves."""
    run_dir = tmp_path / "run"
    on_a, on_b, a = after_six_steps(hosts, run_dir, lambda a, b: hosts.cut(hosts.b))
    num_steps = len(a.rows)
    check_named(on_a, 0, "trainer", (f"rank 1 (generator, reward) {OF_SILENCE}",))
    assert f"A checkpoint of step {num_steps} was sealed after that" in on_a
    check_named(on_b, 1, "generator, reward", (OF_STORE,))
    hosts.up(hosts.b)
    assert goes_on(hosts, run_dir, APART, at_least=num_steps) == uninterrupted()


@pytest.mark.parametrize("overrides", [SHARDED, TURNED], ids=["FSDP across", "trainer away"])
def test_a_cut_wire_that_splits_the_trainer_or_its_store_is_named_on_both_hosts(
    hosts, tmp_path, uninterrupted, overrides
):
    """The run goes on from its newest checkpoint."""
    run_dir = tmp_path / "run"
    on_a, on_b, _ = after_six_steps(hosts, run_dir, lambda a, b: hosts.cut(hosts.a), *overrides)
    first, second = ("trainer", "generator, reward, trainer")
    if overrides == TURNED:
        first, second = ("generator, reward", "trainer")
    check_named(on_a, 0, first, (f"rank 1 ({second}) {OF_SILENCE}",))
    assert f"since the last one: rank 1 ({second}) held a part of it" in " ".join(on_a.split())
    check_named(on_b, 1, second, (OF_STORE,))
    hosts.up(hosts.a)
    assert goes_on(hosts, run_dir, overrides, at_least=4) == uninterrupted(*overrides)


def test_a_wire_that_is_taken_away_is_named_and_a_new_one_will_do(hosts, tmp_path, uninterrupted):
    """The first host has then lost the address of its own store, so its rank cannot save."""
    on_a, on_b, _ = after_six_steps(hosts, tmp_path / "run", lambda a, b: hosts.take_away())
    check_named(on_a, 0, "trainer", (OF_STORE,))
    check_named(on_b, 1, "generator, reward", (OF_STORE,))
    hosts.join()
    assert goes_on(hosts, tmp_path / "run", APART, at_least=4) == uninterrupted()


@pytest.mark.parametrize("lost", ["the generator's", "the trainer's"])
def test_an_address_that_is_taken_away_is_named(hosts, tmp_path, lost):
    """The wire stays up. Without the address of its own store the trainer's host cannot save."""
    host = hosts.b if lost == "the generator's" else hosts.a
    on_a, on_b, a = after_six_steps(hosts, tmp_path / "run", lambda a, b: hosts.take_address(host))
    num_steps = len(a.rows)
    causes = (OF_STORE,)
    at_least = 4
    if host is hosts.b:
        causes = (f"rank 1 (generator, reward) {OF_SILENCE}",)
        at_least = num_steps
        assert f"A checkpoint of step {num_steps} was sealed after that" in on_a
    check_named(on_a, 0, "trainer", causes)
    check_named(on_b, 1, "generator, reward", (OF_STORE,))
    check_saved(a, at_least)


@pytest.mark.parametrize("lost", ["the generator's", "the trainer's"])
def test_a_host_whose_processes_all_die_is_named_by_the_other(hosts, tmp_path, lost):
    with agents(hosts, *RUN, *PATIENCE, run_dir=tmp_path / "run") as (a, b):
        a.until_rows(6)
        gone, left = (b, a) if lost == "the generator's" else (a, b)
        gone.kill_all()
        said = left.until_ranks_gone(GONE_S)
    if left is a:
        causes = (f"rank 1 (generator, reward) {OF_SILENCE}", "the link with rank 1")
        check_named(said, 0, "trainer", causes)
    else:
        check_named(said, 1, "generator, reward", (OF_STORE, "the link with rank 0"))
    check_saved(left, at_least=4)
