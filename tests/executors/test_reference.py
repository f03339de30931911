"""Reference alone: its scores are those of each prompt with each completion in a forward of
its own.
"""

from collections import deque
from dataclasses import fields

import pytest
import torch
from safetensors.torch import save_file

from executors.reference import Reference
from llamarl.errors import NotFinite
from llamarl.executor import ExecutorGroup
from llamarl.learning import sharded_reference
from llamarl.models.attention import PackedAttention
from llamarl.models.build import build_decoder, read_config
from llamarl.models.hf import load_weights, named_parameters_hf
from llamarl.types import Group
from tests.tolerances import rounding

pytestmark = pytest.mark.machine

NAN = float("nan")
LOGPROBS = rounding(
    terms=16, depth=2 * 2, size=2.0
)  # nats: width and layers of CONFIG, and how its logits deviate
CONFIG = """{"architectures": ["LlamaForCausalLM"], "vocab_size": 29, "hidden_size": 16,
"intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
"num_key_value_heads": 2, "max_position_embeddings": 64,
"tie_word_embeddings": true}"""


class FakeReceiver:
    def __init__(self):
        self.records = deque()

    def take(self, limit=None):
        return [
            self.records.popleft()
            for _ in range(min(limit or len(self.records), len(self.records)))
        ]


class FakeSender:
    name, room = "referenced", 10**6

    def __init__(self):
        self.records = []

    def has_room(self):
        return len(self.records) < self.room

    def put(self, record):
        self.records.append(record)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a random model whose next-token distributions are far from uniform."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(CONFIG)
    decoder = build_decoder(read_config(path), device="cpu")
    random = torch.Generator().manual_seed(0)
    for parameter in decoder.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random) * 0.4 + (
            parameter.dim() == 1
        )
    save_file(
        {name: p.detach().contiguous() for name, p in named_parameters_hf(decoder)},
        path / "model.safetensors",
    )
    return path


@pytest.fixture
def packings(monkeypatch):
    """What is packed during the test."""
    made, pack = [], sharded_reference.pack

    def watched(*args, **options):
        made.append(pack(*args, **options))
        return made[-1]

    monkeypatch.setattr(sharded_reference, "pack", watched)
    return made


def executor(model, *, temperature=1.0, microbatch_tokens=1000, **settings):
    made = Reference(
        model_path=str(model),
        model_dtype="float32",
        temperature=temperature,
        microbatch_tokens=microbatch_tokens,
        **settings,
    )
    group = ExecutorGroup("reference", (0,), 0, torch.device("cpu"))
    made.attach(
        group, {"scored": FakeReceiver()}, {"referenced": FakeSender()}, control=None, metrics=None
    )
    made.setup()
    return made


def group(ticket=0, lengths=(3, 1, 6, 2), prompt=4):
    random = torch.Generator().manual_seed(ticket)
    tokens, size = sum(lengths), len(lengths)
    return Group(
        ticket=ticket,
        prompt_ids=torch.randint(0, 29, (prompt,), generator=random),
        lengths=torch.tensor(lengths),
        token_ids=torch.randint(0, 29, (tokens,), generator=random),
        generator_logprobs=-torch.rand(tokens, generator=random),
        policy_versions=torch.arange(tokens),
        ref_logprobs=torch.empty(0),
        rewards=torch.ones(size),
        finish_reasons=("stop",) * size,
        outcomes=("score",) * size,
    )


def scored_all(ours, groups):
    """The logprobs of groups that come together."""
    ours.inputs["scored"].records.extend(groups)
    while ours.step():
        pass
    (sink,) = ours.outputs.values()
    found = [g.ref_logprobs for g in sink.records]
    sink.records.clear()
    return found


def scored(ours, g):
    (logprobs,) = scored_all(ours, [g])
    return logprobs


@torch.no_grad()
def one_by_one(model, g, temperature=1.0):
    """Every token's logprob from whole logits of its own sequence."""
    decoder, out = load_weights(build_decoder(read_config(model)), model), []
    for completion in g.token_ids.split(g.lengths.tolist()):
        tokens = torch.cat([g.prompt_ids, completion])
        logits = (
            decoder(
                tokens, torch.arange(len(tokens)), PackedAttention(torch.tensor([0, len(tokens)]))
            )
            / temperature
        )
        logprobs = logits.log_softmax(-1)[len(g.prompt_ids) - 1 : -1]
        out.append(logprobs.gather(1, completion[:, None])[:, 0])
    return torch.cat(out)


@pytest.mark.filterwarnings("ignore:sequences longer")
@pytest.mark.parametrize(
    "budget, lengths, microbatches",
    [
        (1000, (3, 1, 6, 2), 1),
        (12, (3, 1, 6, 2), 1),
        (11, (3, 1, 6, 2), 2),
        (9, (3, 1, 6, 2), 2),
        (7, (6, 3, 2, 1), 2),
        (1, (3, 1, 6, 2), 4),
    ],
)
def test_scores_are_those_of_each_sequence_alone(model, packings, budget, lengths, microbatches):
    g = group(lengths=lengths)
    got, want = scored(executor(model, microbatch_tokens=budget), g), one_by_one(model, g)
    assert (got.dtype, got.device.type, got.shape) == (torch.float32, "cpu", g.token_ids.shape)
    assert want.std() > 1
    torch.testing.assert_close(got, want, atol=LOGPROBS, rtol=0)
    assert [len(p.microbatches) for p in packings] == [microbatches]


def test_the_order_is_the_groups_though_microbatches_hold_another(model, packings):
    g = group(lengths=(1, 2, 7), prompt=2)
    got = scored(executor(model, microbatch_tokens=8), g)
    places = [b.places.tolist() for p in packings for b in p.microbatches]
    assert places == [[0, 3, 4, 5, 6, 7, 8, 9], [1, 2]]
    torch.testing.assert_close(got, one_by_one(model, g), atol=LOGPROBS, rtol=0)


def test_the_temperature_is_the_policys(model):
    g = group()
    cool = scored(executor(model, temperature=0.5), g)
    torch.testing.assert_close(
        cool, one_by_one(model, g, temperature=0.5), atol=2 * LOGPROBS, rtol=0
    )
    assert (cool - scored(executor(model), g)).abs().max() > 0.1


def test_masked_and_aborted_completions_are_scored_too(model):
    """Lengths must fit the group's, and a reward that failed says nothing of the tokens."""
    g = group()
    values = {f.name: getattr(g, f.name) for f in fields(Group)}
    values |= {
        "rewards": torch.tensor([NAN, 0.0, 1.0, NAN]),
        "finish_reasons": ("aborted", "stop", "length", "stop"),
    }
    values |= {"outcomes": ("error", "score", "score", "abstain")}
    torch.testing.assert_close(
        scored(executor(model), Group(**values)), one_by_one(model, g), atol=LOGPROBS, rtol=0
    )


def test_completions_without_tokens_take_no_place(model):
    g = group(lengths=(0, 3, 0, 2))
    torch.testing.assert_close(
        scored(executor(model), g), one_by_one(model, g), atol=LOGPROBS, rtol=0
    )
    assert scored(executor(model), group(lengths=(0, 0))).shape == (0,)


def test_a_step_passes_groups_on_in_order_with_scores_and_nothing_else_changed(model):
    ours, groups = executor(model, groups_per_batch=2), [group(ticket) for ticket in (4, 2, 9)]
    source, (sink,) = ours.inputs["scored"], ours.outputs.values()
    source.records.extend(groups)
    assert ours.step() and [g.ticket for g in sink.records] == [4, 2]
    assert ours.step() and [g.ticket for g in sink.records] == [4, 2, 9]
    assert not ours.step() and ours.waiting_for() is None
    for got, sent in zip(sink.records, groups):
        torch.testing.assert_close(got.ref_logprobs, one_by_one(model, sent), atol=LOGPROBS, rtol=0)
        assert not got.ref_logprobs.requires_grad
        for field in fields(Group):
            ours_, theirs = getattr(got, field.name), getattr(sent, field.name)
            assert field.name == "ref_logprobs" or ours_ is theirs


def test_a_full_channel_stops_it_before_it_takes_anything(model):
    ours = executor(model)
    ours.inputs["scored"].records.append(group())
    ours.outputs["referenced"].room = 0
    assert not ours.step() and len(ours.inputs["scored"].records) == 1
    assert ours.waiting_for() == "room: in channel referenced, which the trainer empties"


@pytest.mark.bitwise("a reproducible reference scores a group alike whatever is beside it")
@pytest.mark.filterwarnings("ignore:sequences longer")
@pytest.mark.parametrize("budget", [1000, 16])
def test_together_groups_share_microbatches_and_alone_they_keep_their_bits(model, packings, budget):
    groups = [group(ticket, lengths=(ticket + 1, 2)) for ticket in range(4)]
    ours = executor(model, microbatch_tokens=budget, reproducible=True)
    alone = [scored(ours, g) for g in groups]
    beside = scored_all(ours, groups)
    assert len(packings) == 2 * len(groups)
    assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))
    together = scored_all(executor(model, microbatch_tokens=budget), groups)
    assert len(packings) == 2 * len(groups) + 1
    for found, wanted in zip(together, alone, strict=True):
        torch.testing.assert_close(found, wanted, atol=LOGPROBS, rtol=0)


def test_logprobs_that_are_not_finite_are_an_error_that_names_the_ticket(model):
    ours = executor(model)
    ours.decoder.layers[0].attn.q_proj.weight.data.fill_(NAN)
    with pytest.raises(NotFinite, match="reference on rank 0, ticket 7: its logprobs sum to nan"):
        scored_all(ours, [group(7)])


def test_scoring_leaves_weights_and_gradients_alone(model):
    ours = executor(model)
    before = [p.clone() for p in ours.decoder.parameters()]
    scored(ours, group())
    assert all(
        torch.equal(p, b) and p.grad is None and not p.requires_grad
        for p, b in zip(ours.decoder.parameters(), before)
    )
