"""How often Python looks for unused cycles of objects while a job starts: seldom.

A start makes a million objects, of imports and of the configuration, and nearly all of them stay.
As it is set, the collector looks through them again and again, which is a seventh of the CPU
seconds of importing PyTorch. It is set back once a job is ready to run, and does not look at them
then: it would be once more, for a tenth of a second and longer, while models load.
"""

from __future__ import annotations

import gc

_AS_USUAL = gc.get_threshold()
# Objects made, and not freed, before the next look: there are some ten of them in a start.
_WHILE_STARTING = 100_000


def collect_seldom() -> None:
    """Have the collector look seldom, until `collect_as_usual`."""
    gc.set_threshold(_WHILE_STARTING, *_AS_USUAL[1:])


def collect_as_usual() -> None:
    """Have the collector look as often as it did before `collect_seldom`, if that was called, and
    never at what there is by now. The latter is done at the first start of a process alone, so that
    what a job leaves behind is looked at in the next one. Unused cycles of that start stay.
    """
    if gc.get_threshold()[0] != _WHILE_STARTING:
        return
    gc.set_threshold(*_AS_USUAL)
    if not gc.get_freeze_count():
        gc.freeze()
