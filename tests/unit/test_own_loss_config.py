"""What a loss of one's own declares of itself, as the config's check finds it."""

import pytest

from llamarl.config.command_line import check_command_line
from tests.unit.refusals import complaint

MARKED = """
from llamarl.learning.losses.common import holds_to_generator, needs_reference

def plain(inputs): ...

@holds_to_generator
def held(inputs): ...

@needs_reference
def compared(inputs): ...
"""
OTHER_TEMPERATURES = ("buffer=replay", "generator.temperature=[0.5,2]")


@pytest.fixture(autouse=True)
def marked_losses(tmp_path, monkeypatch):
    (tmp_path / "marked_losses.py").write_text(MARKED)
    monkeypatch.syspath_prepend(tmp_path)


def accept(*overrides):
    check_command_line(list(overrides), world_size=1)


def test_a_loss_that_holds_to_the_generator_is_refused_at_other_temperatures():
    accept("loss.fn=marked_losses:held")
    accept("loss.fn=marked_losses:plain", *OTHER_TEMPERATURES)
    said = complaint("loss.fn=marked_losses:held", *OTHER_TEMPERATURES)
    assert "this loss keeps the policy close to the distribution that sampled" in said


def test_a_loss_that_compares_with_a_reference_is_refused_without_one():
    accept("loss.fn=marked_losses:plain")
    accept("loss.fn=marked_losses:compared", "reference=frozen")
    assert "this loss compares with a reference" in complaint("loss.fn=marked_losses:compared")
