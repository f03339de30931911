"""The two hosts of these tests."""

import pytest

from tests.two_hosts import TwoHosts, why_not


@pytest.fixture
def hosts():
    """Two hosts that a wire joins; the test is skipped where this machine cannot make them."""
    if why_not():
        pytest.skip(why_not())
    with TwoHosts() as made:
        yield made
