"""The Control of a world of one rank."""

from __future__ import annotations

from llamarl.comm.control import Control


def lone_control() -> Control:
    """It needs no Store and no threads: its messages go through a local queue."""
    return Control(None, rank=0, world_size=1, leader=0, names=["everything"])
