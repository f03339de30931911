"""What test files share. With tests/__init__.py beside it, it also makes `tests.launching` importable from every one of them."""

import pytest

from tests.launching import SMALL, Job
from tests.pool import Pool


@pytest.fixture(scope="session")
def pool():
    """Four ranks, which come up with the first call."""
    made = Pool()
    yield made
    made.close()


@pytest.fixture(scope="session")
def synchronous_run(tmp_path_factory):
    """The finished one-process run, with max_lag=0, that others must equal."""
    with Job(*SMALL, "max_lag=0", run_dir=tmp_path_factory.mktemp("synchronous") / "run") as job:
        assert job.wait() == 0, job.output
        yield job
