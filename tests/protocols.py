"""Which members of a Protocol an object lacks, on every version of Python."""

from __future__ import annotations


def missing_members(thing: object, protocol: type) -> list[str]:
    """The names of a Protocol's attributes, properties and methods that `thing` has not.

    They are asked for as code asks for them: isinstance with a Protocol does not see what comes by
    __getattr__ since Python 3.12, as the parameters and submodules of a torch module do.
    """
    names = []
    for ancestor in protocol.__mro__:
        if not getattr(ancestor, "_is_protocol", False) or ancestor.__name__ == "Protocol":
            continue
        own = [*getattr(ancestor, "__annotations__", {}), *vars(ancestor)]
        names += [name for name in own if not name.startswith("_") or name == "__call__"]
    assert names, f"{protocol.__name__} has no members"
    return [name for name in dict.fromkeys(names) if not hasattr(thing, name)]
