"""A trainer learns the same on every topology, and what one has saved another goes on from, bit for
bit.

Each rank runs the trainer on topology after topology, and leaves what it held of every tensor, and
where in the model that is. All models on all topologies, and states of all of them on all others,
are slow; QUICK has each kind of split and each pair of kinds.
"""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from executors.trainer import FSDPTrainer
from llamarl.comm.channel import Scatter, dp_rank_of
from llamarl.config.command_line import ConfigError, check_command_line
from llamarl.ddma.layout import Source, parameters_to_send
from llamarl.executor import Executor, ExecutorGroup
from llamarl.learning.buffer import GroupBuffer
from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.learning.optim import AdamSettings, share_gradients
from llamarl.learning.trained_model import TrainedModelSettings
from llamarl.learning.values import CriticSettings
from llamarl.models.config import as_scorer, read_config
from llamarl.models.fsdp import held_box, local
from llamarl.models.sharding import Box, parameter_shapes
from llamarl.tickets.service import TicketService
from llamarl.types import Group
from tests.build.ledger import build_ledger
from tests.build.model_directory import write_model
from tests.ranks.topologies import DEADLINE_S, TOPOLOGIES, WORLD, alone, groups_on
from tests.ranks.trainers import (
    GROUPS,
    MODEL,
    Peers,
    attached,
    group_of,
    learn,
    leave,
    load_states,
    save_state,
    tickets_of,
)
from tests.simulated_mail import SimulatedMail
from tests.tolerances import rounding
from tests.updating import SETTINGS

pytestmark = pytest.mark.machine

# Each of LOADED goes on from what each of SAVED saved.
SAVED = ("one", *TOPOLOGIES)
LOADED = ("hsdp2x2", "fsdp2_tp2")
QUICK = {"tied": ("fsdp4",), "untied": ("hsdp2_tp2",)}  # model -> its topologies
QUICK_LOADED = {"tied": "fsdp2_tp2", "untied": "hsdp2x2"}  # which goes on from what these saved
MODELS = {
    "tied": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "untied": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
}
STEPS = 2
MAX_NORM = 0.01  # well below the norm, so that clipping shows
UPDATE = dataclasses.replace(
    SETTINGS,
    lr=0.01,
    schedule="constant",
    microbatch_tokens=25,
    max_grad_norm=MAX_NORM,
    temperature=0.8,
)
ADAM = AdamSettings(betas=(0.9, 0.99), eps=1e-4, weight_decay=0.1)
# The untied model's is a head on its trunk, the tied one's a model of its own.
CRITIC = CriticSettings(lr=0.05, coef=0.5, clip=0.2, gamma=0.9, gae_lambda=0.8, seed=3)
OF_CRITIC = "value."  # before the names of its parameters
# Of the largest: width, and the layers there and back.
LOSS = VALUES = rounding(terms=20, depth=2 * 2 * 2)


class CanaryPrompts:
    def __getitem__(self, ticket: int) -> Group:
        return group_of(ticket)  # which has prompt_ids too


def trainer_of(model: Path, group: ExecutorGroup) -> tuple[FSDPTrainer, Peers]:
    critic_path = str(model) if model.name == "tied" else None
    dtypes = {"dtype": "float32", "compute_dtype": "float32"}
    checkpoints = {"activation_checkpointing": model.name == "tied"}
    trainer = FSDPTrainer(
        model_settings=TrainedModelSettings(path=str(model), adam=ADAM, **dtypes, **checkpoints),
        replicate=group.replicate,
        tensor_parallel=group.tensor_parallel,
        loss_fn=policy_gradient,
        settings=UPDATE,
        buffer=GroupBuffer(),
        canary_prompts=CanaryPrompts(),
        canary_top=0,
        evaluate_at=lambda version: False,
        checkpoint_at=lambda version: False,
        critic_settings=dataclasses.replace(CRITIC, path=critic_path),
    )
    return trainer, attached(trainer, group)


def parameters_of(trainer: FSDPTrainer) -> dict[str, torch.nn.Parameter]:
    """The policy's, and those of the critic."""
    policy = {shard.name: shard.parameter for shard in trainer.model.shards}
    values = {f"{OF_CRITIC}{shard.name}": shard.parameter for shard in trainer.critic.shards}
    return policy | values


def shapes_of(config) -> dict[str, tuple[int, ...]]:
    """Of the whole parameters of both."""
    shapes = {"weight": (config.hidden_size,), "bias": (1,)}
    if config.tie_word_embeddings:
        shapes = parameter_shapes(as_scorer(config))
    values = {f"{OF_CRITIC}{name}": shape for name, shape in shapes.items()}
    return parameter_shapes(config) | values


def box_of(trainer: FSDPTrainer, name: str, parameter: torch.nn.Parameter) -> Box:
    if not name.startswith(OF_CRITIC):
        return held_box(trainer.model.decoder, name, parameter)
    boxes = {shard.name: shard.box for shard in trainer.critic.shards}
    return boxes[name.removeprefix(OF_CRITIC)]


def moments_of(trainer: FSDPTrainer) -> dict[str, torch.Tensor]:
    states = {**trainer.model.optimizer.state, **trainer.critic.optimizer.state}
    found = {}
    for name, p in parameters_of(trainer).items():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            found[f"{key}/{name}"] = local(states[p][key])
    return found


def weights_of(trainer: FSDPTrainer) -> dict[str, torch.Tensor]:
    return {f"weight/{name}": local(p) for name, p in parameters_of(trainer).items()}


def trained(trainer: FSDPTrainer) -> dict[str, torch.Tensor]:
    """STEPS optimizer steps: this rank's part of the clipped gradients of the first, of the weights
    and moments after the last.
    """
    learn(trainer, 0)
    out = {f"grad/{name}": local(p.grad).clone() for name, p in parameters_of(trainer).items()}
    for step in range(1, STEPS):
        learn(trainer, step)
    return out | weights_of(trainer) | moments_of(trainer)


def go_on(trainer: FSDPTrainer, parts: list[dict]) -> dict[str, torch.Tensor]:
    """What a trainer holds after loading the parts, and one step further."""
    trainer.load_state_dict(parts)
    held = weights_of(trainer) | moments_of(trainer)
    out = {f"loaded/{name}": value.clone() for name, value in held.items()}
    trainer._train(trainer.buffer.tickets())
    return out | {f"further/{name}": value for name, value in weights_of(trainer).items()}


def leave_all(trainer: FSDPTrainer, peers: Peers, tensors: dict, stem: Path) -> None:
    boxes = {}
    for name, p in parameters_of(trainer).items():
        box = box_of(trainer, name, p)
        boxes[name] = [box.offsets, box.lengths]
    leave(tensors, stem, boxes=boxes, rows=peers.rows, canaries=peers.canaries)


def train_and_leave(model: Path, group: ExecutorGroup, folder: Path, name: str) -> None:
    """Train on a topology, export, and save with the groups of the next step in the buffer."""
    trainer, peers = trainer_of(model, group)
    assert_weights_path_agrees(trainer, peers)
    leave_all(trainer, peers, trained(trainer), folder / f"{name}.rank{group.index}")
    trainer.export(str(folder / f"{name}.hf"))
    trainer.buffer.put([group_of(ticket) for ticket in tickets_of(trainer, STEPS)])
    save_state(trainer, folder / f"{name}.state.rank{group.index}")


def go_on_and_leave(model: Path, group: ExecutorGroup, folder: Path, name: str, saved: str) -> None:
    trainer, peers = trainer_of(model, group)
    tensors = go_on(trainer, load_states(folder, saved, num_ranks(saved)))
    leave_all(trainer, peers, tensors, folder / f"{name}.from.{saved}.rank{group.index}")


def num_ranks(topology: str) -> int:
    return 1 if topology.split(".")[0] == "one" else WORLD


def assert_weights_path_agrees(trainer: FSDPTrainer, peers: Peers) -> None:
    """What a rank holds is what the weight plan thinks that it holds."""
    group = trainer.group
    shards = group.size // (group.replicate * group.tensor_parallel)
    source = Source(shards, group.replicate, group.tensor_parallel)
    held = dict(peers.parameters)
    for p in parameters_to_send(peers.config, torch.float32):
        box = source.box(peers.config, p, group.index)
        assert tuple(local(held[p.name]).shape) == box.lengths
        assert not box.numel or held_box(trainer.model.decoder, p.name, held[p.name]) == box


def assert_copies_get_the_gradients_of_the_first(rank: int, group: ExecutorGroup) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parameters[1].grad = torch.full((2,), float(rank))
    share_gradients(parameters, group.tensor_group)
    assert parameters[0].grad is None
    assert parameters[1].grad.tolist() == [rank - group.tensor_index] * 2


def of(model: str, quick: bool) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The topologies that a model is trained on, those whose states are saved, and those that go on
    from these.
    """
    if quick:
        return QUICK[model], ("one", *QUICK[model]), (QUICK_LOADED[model],)
    return tuple(TOPOLOGIES), SAVED, LOADED


def train_and_go_on(rank: int, directory: str, quick: bool) -> None:
    """What one rank of the pool runs."""
    directory = Path(directory)
    groups = groups_on(rank)
    assert_copies_get_the_gradients_of_the_first(rank, groups["fsdp2_tp2"])
    for model in MODELS:
        folder = directory / f"{model}.out"
        trained_on, saved_on, loaded_on = of(model, quick)
        for topology in trained_on:
            train_and_leave(directory / model, groups[topology], folder, topology)
        dist.barrier()
        for topology, saved in itertools.product(loaded_on, saved_on):
            go_on_and_leave(directory / model, groups[topology], folder, topology, saved)


# --- another model's ---


@pytest.mark.parametrize(
    "saved, held, said",
    [
        ({"hidden_size": 16}, {"hidden_size": 8}, "the checkpoint's .* does not fit"),
        ({"num_hidden_layers": 2}, {"num_hidden_layers": 3}, "the checkpoint lacks model.layers.2"),
    ],
)
def test_another_models_checkpoint_is_refused_and_not_taken_in_parts(tmp_path, saved, held, said):
    sizes = MODEL | MODELS["tied"]
    theirs, _ = trainer_of(write_model(tmp_path / "theirs", sizes | saved), alone())
    learn(theirs, 0)
    save_state(theirs, tmp_path / "one.state.rank0")
    mine, _ = trainer_of(write_model(tmp_path / "mine", sizes | held), alone())
    with pytest.raises(ValueError, match=f"(?s){said}.*resume with the model.path"):
        mine.load_state_dict(load_states(tmp_path, "one", 1))


# --- what they left ---


class Left:
    """What ranks left of a run: whole tensors by name, each place of which was held by `copies`
    ranks with the same bits.
    """

    def __init__(self, stem: Path, ranks: int, config):
        self.ranks = [json.loads(Path(f"{stem}.rank{r}.json").read_text()) for r in range(ranks)]
        parts = [load_file(f"{stem}.rank{r}.safetensors") for r in range(ranks)]
        shapes = shapes_of(config)
        self.whole: dict[str, torch.Tensor] = {}
        self.copies: dict[str, torch.Tensor] = {}
        for key in parts[0]:
            name = key.rpartition("/")[2]
            if "step/" in key:
                assert all(torch.equal(part[key], parts[0][key]) for part in parts)
                self.whole[key] = parts[0][key]
                continue
            whole = torch.full(shapes[name], float("nan"))
            copies = torch.zeros(shapes[name], dtype=torch.int)
            for part, said in zip(parts, self.ranks):
                box = tuple(slice(a, a + n) for a, n in zip(*said["boxes"][name]))
                seen = copies[box] > 0
                assert torch.equal(whole[box][seen], part[key][seen]), f"{key}: copies differ"
                whole[box], copies[box] = part[key], copies[box] + 1
            self.whole[key], self.copies[key] = whole, copies
        self.rows = self.ranks[0]["rows"]


def run_everywhere(pool, root: Path, quick: bool) -> Path:
    """What one process and then all ranks left."""
    for model, changes in MODELS.items():
        (root / f"{model}.out").mkdir()
        write_model(root / model, MODEL | changes)
        train_and_leave(root / model, alone(), root / f"{model}.out", "one")
    where = {"timeout_s": DEADLINE_S, "directory": str(root), "quick": quick}
    pool.call(__file__, "train_and_go_on", ranks=WORLD, **where)
    for model in MODELS:
        for saved in of(model, quick)[1]:
            go_on_and_leave(root / model, alone(), root / f"{model}.out", "one", saved)
    return root


@pytest.fixture(scope="module")
def directories(pool, tmp_path_factory):
    """directories(quick): what was left, made when it is first asked for."""
    made = {}

    def directory_of(quick: bool) -> Path:
        if quick not in made:
            made[quick] = run_everywhere(pool, tmp_path_factory.mktemp("topologies"), quick)
        return made[quick]

    return directory_of


def pairs(others: dict[str, tuple[str, ...]], every: tuple[str, ...]) -> list:
    """Parameters (model, other): those of `others` now, the rest when slow tests are run."""
    out = []
    for model in MODELS:
        for other in every:
            marks = () if other in others[model] else pytest.mark.slow
            out.append(pytest.param(model, other, marks=marks, id=f"{model}-{other}"))
    return out


@pytest.fixture
def directory(directories, request, model) -> Path:
    return directories(request.node.get_closest_marker("slow") is None)


@pytest.fixture
def left(directory, model):
    """left(topology): what its ranks left of this model."""
    config = read_config(directory / model)
    folder = directory / f"{model}.out"
    return lambda topology: Left(folder / topology, num_ranks(topology), config)


ON_TOPOLOGIES = pairs(QUICK, tuple(TOPOLOGIES))


def of_kind(tensors: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """The tensors of a kind, by the rest of their names."""
    prefix = f"{kind}/"
    return {n.removeprefix(prefix): value for n, value in tensors.items() if n.startswith(prefix)}


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], kind: str) -> None:
    """Every tensor of a kind, within VALUES of the largest value of that kind."""
    got, want = of_kind(got, kind), of_kind(want, kind)
    assert want and got.keys() == want.keys()
    allowed = VALUES * max(value.abs().max().item() for value in want.values())
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= allowed, f"{kind} of {name}"


@pytest.mark.parametrize("model, topology", ON_TOPOLOGIES)
def test_every_topology_learns_what_one_rank_learns(left, model, topology):
    replicate, tensor_parallel = TOPOLOGIES[topology]
    of_ranks = left(topology)
    for kind in ("grad", "weight", "exp_avg", "exp_avg_sq"):
        assert_close(of_ranks.whole, left("one").whole, kind)
    for key, copies in of_ranks.copies.items():
        # Embeddings, norms and head are whole on every tensor-parallel rank.
        expected = replicate if "_proj." in key else replicate * tensor_parallel
        assert copies.eq(expected).all(), key


@pytest.mark.parametrize("model, topology", ON_TOPOLOGIES)
def test_metrics_and_canaries_are_those_of_one_rank(left, model, topology):
    got, want = left(topology), left("one")
    assert all(row["grad_norm"] > 2 * MAX_NORM for row in want.rows) and len(want.rows) == STEPS
    for row, expected in zip(got.rows, want.rows, strict=True):
        # How full microbatches are depends on which groups share a rank.
        for name in ("packing/padding_fraction", "packing/unused_budget_fraction"):
            expected.pop(name)
        nothing = {name for name, value in expected.items() if value is None}
        assert nothing == {name for name, value in row.items() if value is None}
        for name in expected.keys() - nothing:
            assert row[name] == pytest.approx(expected[name], rel=LOSS, abs=LOSS), name
    for rank in got.ranks:
        for canary, expected in zip(rank["canaries"], want.ranks[0]["canaries"], strict=True):
            assert canary == pytest.approx(expected, abs=LOSS)


@pytest.mark.parametrize("model, topology", ON_TOPOLOGIES)
def test_the_exported_model_is_what_the_ranks_hold(directory, model, left, topology):
    exported = load_file(directory / f"{model}.out" / f"{topology}.hf" / "model.safetensors")
    held = of_kind(left(topology).whole, "weight")
    assert exported.keys() == {name for name in held if not name.startswith(OF_CRITIC)}
    assert all(torch.equal(exported[name], held[name]) for name in exported)


@pytest.mark.parametrize("model, topology", ON_TOPOLOGIES)
def test_a_saved_state_holds_every_weight_moment_and_group_once(directory, model, topology):
    parts = load_states(directory / f"{model}.out", topology, WORLD)
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        for name, shape in parameter_shapes(read_config(directory / model)).items():
            held = [part[f"{kind}/{name}"] for part in parts if f"{kind}/{name}" in part]
            stored = sum(value.numel() for value in held)
            assert stored == torch.Size(shape).numel(), f"{kind}/{name}"
    first = STEPS * GROUPS
    buffered = itertools.chain.from_iterable(part["buffered"] for part in parts)
    assert sorted(buffered) == list(range(first, first + GROUPS))


def of_states() -> list:
    """Parameters (model, saved, topology)."""
    out = []
    for case in itertools.product(MODELS, SAVED, ("one", *LOADED)):
        model, saved, topology = case
        quick = saved in ("one", *QUICK[model]) and topology in ("one", QUICK_LOADED[model])
        out.append(pytest.param(*case, marks=() if quick else pytest.mark.slow, id="-".join(case)))
    return out


@pytest.mark.parametrize("model, saved, topology", of_states())
def test_a_state_saved_on_one_topology_is_the_same_bits_on_another_and_goes_on_alike(
    left, model, saved, topology
):
    want, got = left(saved).whole, left(f"{topology}.from.{saved}").whole
    loaded = of_kind(got, "loaded")
    assert loaded.keys() == {name for name in want if not name.startswith("grad/")}
    assert all(torch.equal(loaded[name], want[name]) for name in loaded)
    assert loaded["step/model.norm.weight"] == STEPS
    further = left(f"one.from.{saved}").whole
    assert_close(got, further, "further")
    after, before = of_kind(further, "further/weight"), of_kind(loaded, "weight")
    assert max((after[name] - before[name]).abs().max() for name in after) > 1e-3


# --- who trains on what ---


class Trainer(Executor):
    name, tensor_parallel = "trainer", 2


def test_a_group_goes_to_all_tensor_parallel_peers_of_its_lane_and_each_lane_gets_its_share():
    channel = Scatter(Executor(), Trainer(), carries=Group)
    routes = {t: channel.route(group_of(t), num_destinations=6) for t in range(6)}
    assert routes == {t: [2 * dp_rank_of(t, 3), 2 * dp_rank_of(t, 3) + 1] for t in range(6)}
    named = sorted(itertools.chain.from_iterable(routes.values()))
    assert named == sorted(2 * [0, 1, 2, 3, 4, 5])


def test_a_group_is_finished_once_it_has_reached_all_peers_and_all_of_them_take_it():
    mail: list[SimulatedMail] = []
    mail += [SimulatedMail(rank, mail, wake=lambda: None) for rank in range(4)]
    ledger = build_ledger(groups_per_step=2, max_lag=0, overcommit=0, num_pools=2)
    shared = {"trainer_ranks": (0, 1, 2, 3), "timeout_s": 1.0, "tensor_parallel": 2}
    ranks = [TicketService(ledger, control, **shared) for control in mail]
    assert [t.index for t in ledger.start(2, 0)] == [0, 1]
    mine = {dp_rank_of(ticket, 2): ticket for ticket in (0, 1)}  # data-parallel rank -> its ticket
    for rank in (0, 1, 2):
        ranks[rank].finish([mine[rank // 2]])
        assert [r.take(0) for r in ranks] == [None] * 4, "taken although it has not reached rank 3"
    ranks[3].finish([mine[1]])
    assert [r.take(0) for r in ranks] == [[mine[0]], [mine[0]], [mine[1]], [mine[1]]]


# --- what is refused before anything starts ---


@pytest.mark.parametrize(
    "overrides, ranks, said",
    [
        ("replicate=2 trainer.tensor_parallel=2 placement.trainer=[0,1]", 3, "of 4 ranks"),
        ("tensor_parallel=2 placement.trainer=[0,1,2,3] groups_per_step=3", 5, "2 sets of 2 t"),
        ("replicate=2 placement.trainer=[0,1,2,3] groups_per_step=6", 5, "4 t.*multiple of 4"),
    ],
)
def test_what_cannot_be_shared_out_evenly_is_said_before_anything_starts(overrides, ranks, said):
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        check_command_line(f"trainer.{overrides}".split(), world_size=ranks)


def test_what_can_is_accepted():
    # One data-parallel rank: no sharing out.
    split = ["trainer.tensor_parallel=2", "placement.trainer=[0,1]", "groups_per_step=3"]
    # conf/config.yaml leaves the size of a step to the model, so Hydra has to add that key.
    assert check_command_line(split, world_size=3) == [*split[:2], "++groups_per_step=3"]
