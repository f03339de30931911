"""A trainer rank reads of a checkpoint what its own boxes overlap, and no more."""

from types import SimpleNamespace

import pytest
import torch

from llamarl.checkpoint.checkpointer import Checkpointer
from llamarl.checkpoint.parts import SavedPart
from llamarl.checkpoint.service import CheckpointService
from llamarl.comm.control import Control
from llamarl.errors import CheckpointError
from llamarl.models.sharded_state import Shard, box_from
from llamarl.models.sharding import Box

SAVED = torch.arange(24.0).view(8, 3)  # rows 0 to 7, by two ranks


class Watched(SavedPart):
    """A part whose reads are counted, in elements."""

    def __init__(self, values, tensors):
        self._values = values
        self._names = frozenset(tensors)
        self._tensors = tensors
        self.read = 0

    def __getitem__(self, name):
        assert name not in self._names, f"{name} is read whole"
        return self._values[name]

    def box(self, name, index):
        taken = self._tensors[name][index]
        self.read += taken.numel()
        return taken


@pytest.mark.parametrize(
    "mine, expected", [((3, 0, 2), [3, 3]), ((0, 0, 4), [12, 0]), ((6, 0, 2), [0, 6])], ids=str
)
def test_only_rows_that_a_rank_holds_are_read(mine, expected):
    first, column, count = mine
    box = Box((first, column), (count, 3))
    parameter = torch.nn.Parameter(torch.zeros(count, 3))
    shard = Shard("w", parameter, box)
    optimizer = SimpleNamespace(state={parameter: {}})
    parts = []
    found = 0
    for start in (0, 4):
        boxes = {"w": [[start, 0], [4, 3]]}
        rows = SAVED[start : start + 4]
        part = Watched({"boxes": boxes}, {"model/w": rows, "exp_avg/w": rows + 100})
        theirs = box_from(part["boxes"]["w"])
        found += shard.load(part, theirs, optimizer, weights="model/", moments="")
        parts.append(part)
    assert found == count * 3 and torch.equal(parameter.detach(), SAVED[first : first + count])
    assert torch.equal(optimizer.state[parameter]["exp_avg"], SAVED[first : first + count] + 100)
    assert [part.read for part in parts] == [2 * n for n in expected], "weights, and one moment"


def test_an_executor_that_cannot_go_on_is_an_end_in_words_with_the_checkpoints_name(tmp_path):
    control = Control(None, rank=0, world_size=1, leader=0, names=["all"])
    expected = [("controller", 0), ("trainer", 0)]
    checkpointer = Checkpointer(tmp_path, keep=1, control=control, expected=expected)
    checkpointer.save_part(3, "controller", 0, {"ledger": {}, "metrics": {}})
    checkpointer.save_part(3, "trainer", 0, {"w": torch.zeros(2)})
    checkpointer.pump()

    def refuse(parts):
        raise ValueError(f"{list(parts)[0]['w'].numel()} elements do not fit")

    executor = SimpleNamespace(
        name="trainer",
        leads=True,
        has_state=lambda: True,
        state_may_be_absent=False,
        load_state_dict=refuse,
    )
    stateful = SimpleNamespace(load_state_dict=lambda *state: None)
    service = CheckpointService(checkpointer, [executor], control, stateful, stateful, identity={})
    with pytest.raises(CheckpointError, match="step_3: trainer: 2 elements do not fit"):
        service.restore(checkpointer.folder / "step_3")
