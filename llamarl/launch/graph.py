"""The channels of a graph, from its executors in flow order and the records that these declare.

    generator   produces Completion, EvalCompletion   consumes Policy
    reward      produces Group                        consumes Completion, EvalCompletion
    reference   produces Group                        consumes Group
    trainer     produces Policy                       consumes Group

    generator --Completion--> reward --Group--> reference --Group--> trainer --Policy--> generator
              --EvalCompletion-->

A record that an executor produces goes to the next executor after it that consumes it, and after
the last comes the first. So an executor between two others that consumes and produces Group gets
the groups of the first and sends its own to the second. A record that an executor offers goes to
every executor that consumes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.comm.channel import NAMES, Broadcast, Channel, Gather, Scatter
from llamarl.ddma.channel import Weights
from llamarl.executor import Executor
from llamarl.types import Group, Policy


def channels_between(executors: Sequence[Executor]) -> list[Channel]:
    """Return the channels of a graph, in the order of their sources.

    ValueError names at once each record that no executor consumes or none produces, and each that
    would come from two executors.
    """
    channels: list[Channel] = []
    problems = []
    for place, source in enumerate(executors):
        others = [*executors[place + 1 :], *executors[:place]]
        for record in source.produces:
            takers = [other for other in others if record in other.consumes]
            if takers:
                channels.append(_channel(source, takers[0], record, channels))
            else:
                problems.append(
                    f"{source.name} produces {record.__name__}, which no executor consumes"
                )
        for record in source.offers:
            for other in others:
                if record in other.consumes:
                    channels.append(_channel(source, other, record, channels))
    for executor in executors:
        problems += _missing(executor, executors, channels)
    if problems:
        row = ", ".join(executor.name for executor in executors)
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise ValueError(
            f"the executors {row} make no graph:{lines}\n"
            "Change their order or what they consume and produce (llamarl/launch/graph.py), or "
            "give the run its channels"
        )
    return channels


def _channel(
    source: Executor, destination: Executor, record: type, made: Sequence[Channel]
) -> Channel:
    """Return a channel of the kind that its record and its destination need."""
    if issubclass(record, Policy):
        return Weights(source, destination, carries=record)
    if destination.takes_by_rank:
        name = "groups" if record is Group else ""
        return Scatter(source, destination, carries=record, name=name)
    # The destination is in the name, because a source may send a record to several.
    siblings = [one for one in made if one.source is source and one.carries is record]
    name = f"{destination.name}_{NAMES.get(record, record.__name__)}" if siblings else ""
    if destination.takes_all:
        return Broadcast(source, destination, carries=record, name=name)
    return Gather(source, destination, carries=record, name=name)


def _missing(
    executor: Executor, executors: Sequence[Executor], channels: Sequence[Channel]
) -> list[str]:
    """Return what is wrong with the sources of an executor's records, one sentence a record."""
    problems = []
    for record in executor.consumes:
        sources = []
        for channel in channels:
            if channel.destination is executor and channel.carries is record:
                sources.append(channel.source.name)
        if len(sources) == 1:
            continue
        what = f"{executor.name} consumes {record.__name__}, which"
        if sources:
            problems.append(f"{what} would come from both {' and '.join(sources)}")
            continue
        elsewhere = [c for c in channels if c.carries is record]
        if elsewhere:
            ways = [f"{c.source.name} sends to {c.destination.name}" for c in elsewhere]
            problems.append(f"{what} {' and '.join(ways)}")
        else:
            problems.append(f"{what} no executor produces")
    return problems
