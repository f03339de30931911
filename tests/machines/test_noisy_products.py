"""On a machine with noisy products nothing is computed twice alike, forward or backward, by PyTorch
or by a kernel, in any process; and all of it is right up to rounding.
"""

import json
import os
from pathlib import Path

import pytest

from llamarl.machine.kernels import library
from tests.build.job import run_python
from tests.launching import environment

pytestmark = pytest.mark.machine
NOISY = Path(__file__).parent / "noisy"
PROBE = Path(__file__).parent / "noise_probe.py"
# A sum of sizes s has noise of at most 1/2 eps s, and roundings of its own of about as much.
LARGEST = 2.0


def seen(name: str) -> float:
    """How far apart at least, in that unit, two draws of hundreds of sums lie somewhere."""
    return 0.0 if name == "bfloat16" else 0.1  # whose rounding may take all of it away


def said_by(*command: str) -> str:
    """What Python on such a machine prints."""
    path = os.pathsep.join([str(NOISY), environment()["PYTHONPATH"]])
    return run_python(*command, PYTHONPATH=path, LLAMARL_NOISE_SEED="1")


@pytest.fixture(scope="module")
def found() -> dict:
    return json.loads(said_by(str(PROBE)))


def test_two_equal_products_differ_and_both_are_right(found):
    for name, apart in found["products"].items():
        assert seen(name) <= apart["between"] < LARGEST, name
        assert apart["from_truth"] < LARGEST, name


def test_attention_and_its_gradient_differ(found):
    # Of eps of the largest: products of 16 and 20 terms, and a softmax.
    for name, apart in found["attention"].items():
        assert 0.1 < apart < 100, name


def test_kernels_differ(found):
    if library("decode", "-fopenmp") is None:
        pytest.skip("no kernels here; what stands in for them is PyTorch's, and has its noise")
    expected = {"norm", "norm's gradient", "decoding", "its keys and values"}
    assert found["kernels"].keys() == expected
    for name, apart in found["kernels"].items():
        assert 0.1 < apart < 200, name


AGAIN = """
import json, os, sys
os.environ.pop("PYTEST_CURRENT_TEST", None)
import torch
sys.path.append(sys.argv[1])
from noise_probe import noise, noise_of_fork
forked = noise_of_fork()
drawn = [noise(), forked]
def made(test):
    os.environ["PYTEST_CURRENT_TEST"] = test
    a = torch.full((8, 64), 0.1)
    return (a @ a.T).tolist()
first, other, again = made("one"), made("two"), made("one")
print(json.dumps([drawn, first == other, first == again]))
"""


def test_no_two_processes_draw_the_same_and_each_test_has_its_own_draws_again(found):
    drawn, other_test, same_test = json.loads(said_by("-c", AGAIN, str(PROBE.parent)))
    draws = [*found["noise"], *drawn]
    assert len({tuple(draw) for draw in draws}) == len(draws)
    assert (other_test, same_test) == (False, True)
