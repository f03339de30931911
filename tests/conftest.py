"""What test files share. With tests/__init__.py beside it, it also makes `tests.launching`
importable from every one of them.
"""

import functools
import gc
import logging
import os
from pathlib import Path

# PyTorch's store asks the DNS who connects; where none answers, as in a sandbox, each question
# takes 5 s by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests.order import long_files_first  # noqa: E402
from tests.pool import Pool  # noqa: E402
from tests.runs import Runs  # noqa: E402

# A busy machine makes an example slow, and no claim wrong.
slow = [HealthCheck.too_slow]
settings.register_profile("any machine", deadline=None, suppress_health_check=slow)
settings.load_profile("any machine")

MAX_WORKERS = 4  # each has a pool of ranks, some hundred MiB apiece
THREADS = torch.get_num_threads()


def pytest_xdist_auto_num_workers(config) -> int:
    """What `-n auto` means, which setup.cfg says: one worker a core.

    None where files are named, which are done before workers have started, and for tests of the one
    GPU and of vLLM's memory.
    """
    files_are_named = any(Path(argument.partition("::")[0]).is_file() for argument in config.args)
    if files_are_named or config.option.markexpr in ("gpu", "vllm"):
        return 0
    return min(len(os.sched_getaffinity(0)), MAX_WORKERS)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items) -> None:
    """Order the files, after tests were left out and pytest-randomly has shuffled the others."""
    long_files_first(items)


def pytest_collection_finish() -> None:
    """Spare the garbage collector everything that imports have made, which stays."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Compute with one thread. Tests have few numbers, and where all cores are busy, a second
    thread makes the least product last until the scheduler gives both of them a core.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def conf_is_read_once():
    """Command lines are composed by tests/build/composing.py, at a tenth of the time."""
    from tests.build.composing import quick_compose, quick_load

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hydra.compose", quick_compose)
        load = "hydra._internal.config_repository.ConfigRepository.load_config"
        patch.setattr(load, quick_load)
        yield


@pytest.fixture(scope="session")
def pool():
    """Four ranks, which come up with the first call."""
    made = Pool()
    yield made
    made.close()


@pytest.fixture
def process_state():
    """Threads, precision and logging of this process are afterwards as before: programs set them,
    and some tests run one here.
    """
    precision = torch.get_float32_matmul_precision()
    threads = torch.get_num_threads()
    level = logging.getLogger().level
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)
    logging.getLogger().setLevel(level)


@pytest.fixture
def threads_of_machine(process_state):
    """As many threads as a program has here, for kernels that share out their rows among them."""
    torch.set_num_threads(max(2, THREADS))


@pytest.fixture
def float32_products(process_state):
    """Products of float32 as every program of ours has them on this machine."""
    torch.set_float32_matmul_precision(_chosen_precision())


@functools.cache
def _chosen_precision() -> str:
    """Measure once: it takes longer than most of the tests that ask for it."""
    from llamarl.machine.precision import use_float32_products

    use_float32_products(reproducible=True)
    return torch.get_float32_matmul_precision()


@pytest.fixture
def run_here(process_state, monkeypatch, capfd):
    """run_here(program): (exit code, what was said) of a program that may end its process.

    In this one, for to start another takes longer than all that such a program does.
    """
    import torch.distributed as dist

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)

    def run(program) -> tuple[int, object]:
        capfd.readouterr()
        code = 0
        try:
            program()
        except SystemExit as ended:
            code = ended.code
        if dist.is_initialized():
            dist.destroy_process_group()
        return code, capfd.readouterr()

    return run


@pytest.fixture
def launch_here(run_here):
    """launch_here(*overrides): (exit code, what was said) of a job that ends before its first
    step.
    """
    from llamarl.config.command_line import compose_config
    from llamarl.launch import launch

    def run(*overrides: str) -> tuple[int, object]:
        def begin() -> None:
            with launch(compose_config(["threads=1", *overrides])):
                raise AssertionError("the job began")

        return run_here(begin)

    return run


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """runs(name): a finished run of tests/runs.py, made once for all workers."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    return Runs(folder / "named_runs")


@pytest.fixture(scope="session")
def synchronous_run(runs):
    """The finished one-process run, with max_lag=0, that others must equal."""
    return runs("synchronous")


@pytest.fixture(params=["native", "module"])
def way(request, monkeypatch):
    """Both ways to decode on a CPU: the C kernel, and the module with PyTorch's operations."""
    # Not at the top: most tests need no decoder.
    from llamarl.inference.decode import NativeDecode
    from tests.decoding import needs_kernels

    if request.param == "module":
        monkeypatch.setattr(NativeDecode, "fits", staticmethod(lambda *_: False))
    else:
        needs_kernels()
