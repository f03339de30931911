"""DeviceSharing on a shared device. On a CPU the device is host memory too, so what shows is that
storages empty and come back whole.
"""

import pytest
import torch

from llamarl.machine.offload import DeviceSharing


def bytes_held(tensors) -> int:
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


@pytest.fixture
def pair():
    a, b = [torch.arange(12.0).view(3, 4), torch.ones(5, dtype=torch.int8)], [torch.full((7,), 2.0)]
    turns = DeviceSharing(["a", "b"])
    turns.join("a", lambda: a)
    turns.join("b", lambda: b)
    return turns, a, b


def test_only_the_holder_has_its_bytes_and_views_survive(pair):
    turns, a, b = pair
    assert bytes_held(a) == bytes_held(b) == 0
    assert turns.claim("a") and not turns.claim("a")
    assert (
        bytes_held(b) == 0
        and torch.equal(a[0], torch.arange(12.0).view(3, 4))
        and a[1].tolist() == [1] * 5
    )
    view = a[0][1]
    view += 100
    assert turns.claim("b") and bytes_held(a) == 0 and b[0].tolist() == [2.0] * 7
    turns.claim("a")
    assert view.tolist() == [104.0, 105.0, 106.0, 107.0] and torch.equal(a[0][1], view)


def test_shared_storages_move_once_and_new_tensors_join_at_the_next_turn():
    base = torch.arange(10.0)
    held = [base, base[2:4]]
    turns = DeviceSharing(["a", "b"])
    turns.join("a", lambda: held)
    assert bytes_held(held) == 0
    turns.join("b", lambda: [])
    turns.claim("a")
    held.append(torch.ones(3))
    turns.claim("b")
    assert bytes_held(held) == 0
    turns.claim("a")
    assert held[1].tolist() == [2.0, 3.0] and held[2].tolist() == [1.0] * 3


def test_executors_that_did_not_join_take_no_turn(pair):
    turns, a, _ = pair
    turns.claim("a")
    assert not turns.claim("reward") and turns.holder == "a" and bytes_held(a) > 0
