"""The generator alone, with fakes on both sides: versions on tokens, pinned evaluations, and what it asks for."""

from types import SimpleNamespace

import pytest
import torch

from executors.generator import Generator
from llamarl.executor import ExecutorGroup
from llamarl.inference import SamplingParams
from llamarl.models.hf import SafetensorsDir
from llamarl.models.scratch import tiny_directory
from llamarl.types import Prompt, Ticket

PROMPT = Prompt(torch.tensor([1, 5, 6, 14, 7, 8, 18]), "12+34=", {"answer": "46"})
GROUP, EVALS = 2, 3


class Weights:
    """Stages the same tiny weights under whatever version a test says."""

    def __init__(self):
        self.staged = None

    def bind(self, parameters):
        source = SafetensorsDir(tiny_directory())
        for name, parameter in parameters:
            parameter.data.copy_(source.get(name))

    def swap(self):
        taken, self.staged = self.staged, None
        return taken

    def close(self):
        pass


class Outbox(list):
    def has_room(self):
        return True

    put = list.append


class Tickets:
    """Grants `grants` tickets to each ask and remembers what was asked."""

    def __init__(self, synchronous):
        self.synchronous, self.grants, self.asked, self.next = synchronous, 1, [], 0

    def ask(self, generator, count, version):
        self.asked.append((count, version))
        out = [Ticket(self.next + i, version) for i in range(min(count, self.grants))]
        self.next += len(out)
        return out

    def granted(self):
        return []


def generator(synchronous=False, in_flight=True, new_tokens=6, chunk=2):
    made = Generator(
        model_path=str(tiny_directory()), model_dtype="float32", prompts=[PROMPT] * 100, eval_prompts=[PROMPT] * EVALS,
        sampling=SamplingParams(max_new_tokens=new_tokens, min_new_tokens=new_tokens, n=GROUP, stop_token_ids=(2,)), stop_token_ids=(2,),
        max_slots=8, max_len=32, chunk_tokens=chunk, in_flight_updates=in_flight,
    )  # fmt: skip
    posts = []
    made.attach(
        ExecutorGroup("generator", (0,), 0, torch.device("cpu")),
        {"policy": Weights()},
        {"completions": Outbox(), "evaluations": Outbox()},
        SimpleNamespace(post=lambda rank, topic, payload: posts.append((rank, topic, payload)), leader=7),
        SimpleNamespace(add=lambda counter, amount: None),
        Tickets(synchronous),
    )
    made.setup()
    made.posts = posts
    return made


def test_without_weights_it_samples_nothing_and_says_what_it_waits_for():
    g = generator()
    assert g.step() is False and g.tickets.asked == [] and g.waiting_for().startswith("weights:")


def test_the_first_version_is_probed_for_the_leader():
    g = generator()
    g.weights.staged = (0, False)
    g.step()
    (rank, topic, probe), *rest = g.posts
    assert (rank, topic, rest) == (7, "probe", []) and len(probe["logprobs"]) == len(probe["token_ids"]) > 0
    assert all(len(x) == len(ids) - 1 for x, ids in zip(probe["logprobs"], probe["token_ids"]))


def test_weights_that_come_in_flight_stamp_the_later_tokens():
    g = generator()
    g.weights.staged = (3, False)
    g.step()
    g.tickets.grants = 0
    g.weights.staged = (4, False)
    while g.engine.num_live:
        g.step()
    versions = [c.policy_versions.tolist() for c in g.outputs["completions"]]
    assert len(versions) == GROUP and all(v == sorted(v) and set(v) == {3, 4} for v in versions)


def test_without_in_flight_updates_running_completions_keep_their_version():
    g = generator(in_flight=False)
    g.weights.staged = (3, False)
    g.step()
    g.tickets.grants = 0
    g.weights.staged = (4, False)
    while not g.outputs["completions"]:
        g.step()
    assert all(set(c.policy_versions.tolist()) == {3} for c in g.outputs["completions"])
    g.step()
    assert g.version == 4


def test_an_evaluated_version_is_pinned_until_its_prompts_are_done():
    g = generator(chunk=1)
    g.tickets.grants = 0
    g.weights.staged = (5, True)
    g.step()
    g.weights.staged = (6, False)
    while len(g.outputs["evaluations"]) < EVALS:
        assert g.version == 5
        g.step()
    assert all(set(c.policy_versions.tolist()) == {5} for c in g.outputs["evaluations"])
    assert sorted(c.ticket for c in g.outputs["evaluations"]) == list(range(EVALS))
    g.step()
    assert g.version == 6


def test_in_step_with_the_trainer_it_asks_for_nothing_while_it_evaluates():
    g = generator(synchronous=True, chunk=1)
    g.weights.staged = (0, True)
    g.step()
    assert g.engine.num_live and g.tickets.asked == []
    while len(g.outputs["evaluations"]) < EVALS:
        g.step()
    g.step()
    assert g.tickets.asked[0] == (4, 0)  # eight free slots hold four groups of two


def test_a_full_channel_downstream_stops_it():
    g = generator()
    g.weights.staged = (0, False)
    g.outputs["completions"].has_room = lambda: False
    g.step()
    assert g.tickets.asked == [] and g.waiting_for().startswith("room:")


@pytest.mark.parametrize("synchronous, asks", [(True, 1), (False, 3)])
def test_an_ask_in_vain_is_repeated_only_where_something_can_change_before_new_weights(synchronous, asks):
    g = generator(synchronous=synchronous)
    g.tickets.grants = 0
    g.weights.staged = (0, False)
    for _ in range(3):
        g.step()
    assert len(g.tickets.asked) == asks
