"""Channels that follow from executors: who is joined to whom, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executors.build import build_executors
from executors.build_victim import build_victim
from llamarl.comm.channel import Broadcast, Gather, Scatter
from llamarl.comm.groups import World
from llamarl.config.command_line import RED_TEAM, RL, compose_config
from llamarl.ddma.channel import Weights
from llamarl.executor import Executor, Inputs, Outputs, WeightsForm
from llamarl.launch.graph import channels_between
from llamarl.launch.job import Job
from llamarl.launch.run_directory import RunDirectory
from llamarl.types import Completion, EvalCompletion, Group, Policy, Stretch
from tests.build.completion import build_completion
from tests.evaluated import evaluated


class Station(Executor):
    """An executor that does nothing with the records that a test says."""

    consumes = produces = offers = ()

    def __init__(self, name, consumes=(), produces=(), **more):
        vars(self).update(name=name, consumes=consumes, produces=produces, **more)


def generator():
    return Station("generator", (Policy,), (Completion, EvalCompletion))


def reward(name="reward"):
    return Station(name, (Completion, EvalCompletion), (Group,))


def trainer():
    return Station("trainer", (Group,), (Policy,), takes_by_rank=True)


def annotator(name):
    return Station(name, (Group,), (Group,))


def arrows(channels):
    """(kind, name, source, destination) of each channel."""
    return [(type(c), c.name, c.source.name, c.destination.name) for c in channels]


def executors_of(*overrides, kind=None):
    """The executors of a command line, in flow order."""
    config = compose_config(list(overrides), kind or RL)
    job = Job(config, World(0, 1, torch.device("cpu")), RunDirectory(Path(), None))
    made, reward, references, trainer = build_executors(config, job)
    victims = [build_victim(config, job)] if kind is not None else []
    return [made, *victims, reward, *references, trainer]


FROM_GENERATOR = [
    (Gather, "completions", "generator", "reward"),
    (Gather, "evaluations", "generator", "reward"),
]
TO_GENERATOR = (Weights, "policy", "trainer", "generator")
RESETTING = ("reference=reset", "loss.kl_coef=0.1", "model.dtype=bfloat16")
PICTURES = [
    ((), None, [*FROM_GENERATOR, (Scatter, "groups", "reward", "trainer"), TO_GENERATOR]),
    (
        RESETTING,
        None,
        [
            *FROM_GENERATOR,
            (Gather, "scored", "reward", "reference"),
            (Scatter, "groups", "reference", "trainer"),
            TO_GENERATOR,
            (Weights, "reference_policy", "trainer", "reference"),
        ],
    ),
    (
        (),
        RED_TEAM,
        [
            (Gather, "completions", "generator", "victim"),
            (Gather, "evaluations", "generator", "victim"),
            (Gather, "replied", "victim", "reward"),
            (Gather, "eval_replied", "victim", "reward"),
            (Gather, "scored", "reward", "reference"),
            (Scatter, "groups", "reference", "trainer"),
            TO_GENERATOR,
        ],
    ),
]


@pytest.mark.parametrize("overrides, kind, picture", PICTURES, ids=["main", "reset", "victim"])
def test_a_job_is_its_picture(overrides, kind, picture):
    assert arrows(channels_between(executors_of(*overrides, kind=kind))) == picture


def test_weights_travel_in_the_form_of_their_destination():
    given = ("model.dtype=bfloat16", "generator.quantize=int8", "weights.transport=gloo")
    made = executors_of(*given, "reference=reset", "loss.kl_coef=0.1")
    forms = {executor.name: executor.weights_form for executor in made}
    assert forms["generator"] == WeightsForm(
        dtype="bfloat16", quantize="int8", exclude=("lm_head",), transport="gloo"
    )
    assert forms["reference"] == WeightsForm(dtype="bfloat16", transport="gloo")


@given(st.lists(st.integers(), max_size=6, unique=True))
def test_groups_pass_all_who_annotate_them_in_their_order(numbers):
    names = [f"annotator {number}" for number in numbers]
    row = [generator(), reward(), *map(annotator, names), trainer()]
    channels = [c for c in channels_between(row) if c.carries is Group]
    assert [(c.source.name, c.destination.name) for c in channels] == list(
        pairwise(["reward", *names, "trainer"])
    )
    assert [type(c) for c in channels] == [Gather] * len(names) + [Scatter]


@given(st.permutations(["reads ahead", "also", "does not"]))
def test_what_is_offered_goes_to_everyone_who_consumes_it(names):
    readers = []
    for name in names:
        ahead = () if name == "does not" else (Stretch,)
        readers.append(Station(name, (Group, *ahead), (Group,)))
    teller = generator()
    teller.offers = (Stretch,)
    channels = channels_between([teller, reward(), *readers, trainer()])
    told = [c.destination.name for c in channels if c.carries is Stretch]
    assert told == [name for name in names if name != "does not"]


def test_an_executor_whose_ranks_all_take_is_sent_every_record_at_each_of_them():
    mirror = Station("mirror", (Group,), (Group,), takes_all=True)
    channels = channels_between([generator(), reward(), mirror, trainer()])
    (to_mirror,) = [c for c in channels if c.destination is mirror]
    assert type(to_mirror) is Broadcast
    assert to_mirror.route(build_completion(5), num_destinations=3) == [0, 1, 2]


REFUSED = {
    "nobody consumes it": (
        lambda: [generator(), Station("reward", (Completion,), (Group,)), trainer()],
        "generator produces EvalCompletion, which no executor consumes",
    ),
    "nobody produces it": (
        lambda: [generator(), reward(), Station("reader", (Stretch,)), trainer()],
        "reader consumes Stretch, which no executor produces",
    ),
    "another gets it": (
        lambda: [generator(), reward(), reward("judge"), trainer()],
        "judge consumes Completion, which generator sends to reward",
    ),
    "two send it": (
        lambda: [generator(), reward(), Station("maker", (), (Group,)), trainer()],
        "trainer consumes Group, which would come from both reward and maker",
    ),
    "it is behind its reader": (
        lambda: [generator(), reward(), trainer(), annotator("late")],
        "trainer consumes Group, which would come from both reward and late",
    ),
}


@pytest.mark.parametrize("make, what", REFUSED.values(), ids=REFUSED)
def test_executors_that_do_not_fit_together_are_refused_by_name(make, what):
    with pytest.raises(ValueError, match="make no graph") as error:
        channels_between(make())
    assert f"\n  {what}\n" in str(error.value)


def test_all_that_does_not_fit_is_said_at_once():
    with pytest.raises(ValueError) as error:
        channels_between([generator(), trainer()])
    assert str(error.value).splitlines()[:4] == [
        "the executors generator, trainer make no graph:",
        "  generator produces Completion, which no executor consumes",
        "  generator produces EvalCompletion, which no executor consumes",
        "  trainer consumes Group, which no executor produces",
    ]


def test_an_end_is_found_by_its_record_and_never_guessed():
    ours, other, third = (object() for _ in range(3))
    inputs = Inputs("reward", [(Completion, ours), (Stretch, other), (Stretch, third)])
    assert inputs.of(Completion) is ours and list(inputs) == [ours, other, third]
    assert inputs.all_of(Stretch) == [other, third] and inputs.all_of(Group) == []
    for ends, record, said in (
        (inputs, Stretch, "reward has 2 inputs that carry Stretch"),
        (inputs, Group, "reward has 0 inputs .*Group.* it has Completion, Str"),
        (Outputs("trainer", []), Policy, "trainer has 0 outputs .*Policy.* it has none"),
    ):
        with pytest.raises(ValueError, match=said):
            ends.of(record)


def test_what_is_of_no_ticket_goes_to_the_first_rank():
    channel = Gather(Executor(), Executor(), carries=EvalCompletion)
    answer = evaluated("46", prompt=5).completion
    assert channel.route(answer, num_destinations=3) == [0]
    assert channel.route(build_completion(5), num_destinations=3) == [2]
