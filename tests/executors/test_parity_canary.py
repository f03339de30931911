"""A run whose generator does not hold the trainer's weights ends at the version where
that begins.
"""

import pytest

from tests.launching import RECIPE, SMALL, ForkedJob

pytestmark = pytest.mark.machine

BROKEN = """
import runpy, sys, torch
from llamarl.ddma.receiver import WeightsReceiver
swap, first = WeightsReceiver.swap, int(sys.argv[1])
def broken(self):
    staged = swap(self)
    if staged is not None and staged.version >= first:
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.dim() == 2:
                    parameter.mul_(1.05)
    return staged
WeightsReceiver.swap = broken
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_broken(first: int, folder) -> tuple[int, str]:
    """(exit code, output) of the main job in one process; from version `first` on, each matrix of
    the generator is 1.05 times the trainer's.
    """
    script = folder / "broken.py"
    script.write_text(BROKEN)
    # In step with the trainer, so that every version is swapped in.
    given = (str(first), str(RECIPE), *SMALL, "max_lag=0")
    with ForkedJob(*given, run_dir=folder / "run", recipe=script) as job:
        return job.wait(), job.output


@pytest.mark.parametrize("version", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_other_weights_in_the_generator_end_the_run_before_anything_more_is_trained(
    tmp_path, version
):
    code, said = run_broken(version, tmp_path)
    assert code == 1, said
    assert f"generator on rank 0 does not hold the trainer's weights of version {version}," in said
    assert "Traceback" not in said
    assert f"step {version + 1}/" not in said and ("step 1/" in said) == (version > 0), said


@pytest.mark.slow
def test_the_same_run_with_the_trainers_weights_passes(tmp_path):
    code, said = run_broken(99, tmp_path)
    assert code == 0, said
