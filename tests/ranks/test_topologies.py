"""A trainer learns the same on every topology, and what one has saved another goes on from, bit for
bit.

Each rank runs the trainer on topology after topology, and leaves what it held of every tensor, and
where in the model that is. All models on all topologies, and states of all of them on all others,
are slow; QUICK has each kind of split and each pair of kinds.
"""

import itertools
import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from executors.trainer import FSDPTrainer
from llamarl.comm.channel import Scatter, dp_rank_of
from llamarl.comm.groups import World, executor_group
from llamarl.config.command_line import ConfigError, check_command_line
from llamarl.ddma.layout import Source, parameters_to_send
from llamarl.executor import Executor, ExecutorGroup
from llamarl.learning.buffer import GroupBuffer
from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.learning.optim import AdamSettings, share_gradients
from llamarl.learning.trained_model import TrainedModelSettings
from llamarl.learning.update import UpdateSettings
from llamarl.learning.values import CriticSettings
from llamarl.models.build import Decoder
from llamarl.models.config import read_config
from llamarl.models.fsdp import held_box, local
from llamarl.models.sharding import Box, parameter_shapes
from llamarl.tickets.ledger import TicketLedger
from llamarl.tickets.service import TicketService
from llamarl.types import Group, Policy, Prompt
from tests.executors.fakes import FakeReceiver
from tests.ranks.topologies import TOPOLOGIES, WORLD
from tests.tolerances import rounding

pytestmark = pytest.mark.machine

SAVED, LOADED = (
    ("one", *TOPOLOGIES),
    ("hsdp2x2", "fsdp2_tp2"),
)  # each of these goes on from what each of those saved
QUICK = {"tied": ("hsdp2x2", "tp4"), "untied": ("fsdp4", "hsdp2_tp2")}  # model -> its topologies
QUICK_LOADED = {"tied": "fsdp2_tp2", "untied": "hsdp2x2"}  # which goes on from what these saved
MODELS = {  # 23 rows of embeddings and 20 of the feed-forward's: no even split over four ranks
    "tied": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "untied": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
}
BASE = {
    "vocab_size": 23,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
STEPS, GROUPS = 2, 4  # groups a step: one for each data-parallel rank at most
MAX_NORM = 0.01  # well below the norm, so that clipping shows
ADAM = AdamSettings(betas=(0.9, 0.99), eps=1e-4, weight_decay=0.1)
# The untied model's is a head on its trunk, the tied one's a model of its own.
CRITIC = CriticSettings(lr=0.05, coef=0.5, clip=0.2, gamma=0.9, gae_lambda=0.8)
OF_CRITIC = "value."  # before the names of its parameters
LOSS = VALUES = rounding(
    terms=20, depth=2 * 2 * 2
)  # of the largest: width, and the layers there and back
DEADLINE_S = 240


def write_model(path: Path, changes: dict) -> Path:
    """A random model; weights so large that every one of them shows in the loss."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(BASE | changes))
    random = torch.Generator().manual_seed(0)
    shapes = parameter_shapes(read_config(path))
    save_file(
        {n: torch.randn(s, generator=random) * 0.4 + (len(s) == 1) for n, s in shapes.items()},
        path / "model.safetensors",
    )
    return path


def group_of(ticket: int) -> Group:
    random = torch.Generator().manual_seed(ticket)
    lengths = torch.randint(1, 9, (4,), generator=random)
    tokens = torch.randint(0, 23, (int(lengths.sum()),), generator=random)
    return Group(
        ticket=ticket,
        prompt_ids=torch.randint(0, 23, (3,), generator=random),
        lengths=lengths,
        token_ids=tokens,
        generator_logprobs=torch.full(tokens.shape, -3.0),
        policy_versions=torch.full_like(tokens, max(0, ticket // GROUPS - 1)),
        ref_logprobs=torch.empty(0),
        rewards=torch.tensor([1.0, 0.0, 0.5, float("nan")]),
        finish_reasons=("stop",) * 4,
        outcomes=("score", "score", "score", "error"),
    )


class CanaryPrompts:
    def __getitem__(self, ticket: int) -> Prompt:
        return group_of(ticket)  # which has prompt_ids too


class Recorder:
    """Stands for the weights channel, metrics, control and tickets of a trainer."""

    stopping = ending = False
    bytes_per_sync = overcommit = 0

    def __init__(self):
        self.rows = []
        self.canaries = []
        self.parameters = []

    def trained(self, reward: float) -> None:
        """What governors of overcommit look at."""

    def given_back(self) -> list[int]:
        return []

    def yield_row(self) -> dict:
        return {}

    def bind(self, config, parameters, tensor_group) -> None:
        self.config, self.parameters = config, parameters

    def publish(self, version, *, evaluate, must_differ, canary) -> float:
        self.canaries.append(canary()["logprobs"])
        return 0.0

    def report(self, step, row) -> None:
        self.rows.append(
            {
                name: value
                for name, value in row.items()
                if not name.startswith(("time/", "weights/"))
            }
        )

    def reconcile(self, buffered) -> set[int]:
        return set(buffered)

    def finish(self, tickets) -> None:
        pass


def trainer_of(model: Path, group: ExecutorGroup) -> tuple[FSDPTrainer, Recorder]:
    update = UpdateSettings(
        lr=0.01,
        schedule="constant",
        warmup_steps=0,
        max_steps=10,
        microbatch_tokens=25,
        max_grad_norm=MAX_NORM,
        temperature=0.8,
        advantages="group_mean",
        skip_zero_advantage=False,
        parity=None,
    )
    trainer = FSDPTrainer(
        model_settings=TrainedModelSettings(
            path=str(model),
            dtype="float32",
            compute_dtype="float32",
            adam=ADAM,
            activation_checkpointing=model.name == "tied",
        ),
        replicate=group.replicate,
        tensor_parallel=group.tensor_parallel,
        loss_fn=partial(policy_gradient),
        settings=update,
        buffer=GroupBuffer(),
        canary_prompts=CanaryPrompts(),
        canary_top=0,
        evaluate_at=lambda version: False,
        checkpoint_at=lambda version: False,
        critic_settings=CRITIC,
        critic_path=str(model) if model.name == "tied" else None,
        critic_seed=3,
    )
    recorder = Recorder()
    ends = [(Group, FakeReceiver())], [(Policy, recorder)]
    trainer.attach(group, *ends, recorder, recorder, recorder, recorder)
    trainer.setup()
    return trainer, recorder


def parameters_of(trainer: FSDPTrainer) -> dict[str, torch.nn.Parameter]:
    """The policy's, and those of the critic."""
    policy = {shard.name: shard.parameter for shard in trainer.model.shards}
    values = {f"{OF_CRITIC}{shard.name}": shard.parameter for shard in trainer.critic.shards}
    return policy | values


def shapes_of(config) -> dict[str, tuple[int, ...]]:
    """Of the whole parameters of both."""
    shapes = {"weight": (config.hidden_size,), "bias": (1,)}
    if config.tie_word_embeddings:
        shapes = parameter_shapes(config.as_scorer())
    values = {f"{OF_CRITIC}{name}": shape for name, shape in shapes.items()}
    return parameter_shapes(config) | values


def box_of(trainer: FSDPTrainer, name: str, parameter: torch.nn.Parameter) -> Box:
    if not name.startswith(OF_CRITIC):
        return held_box(trainer.model.decoder, name, parameter)
    boxes = {shard.name: shard.box for shard in trainer.critic.shards}
    return boxes[name.removeprefix(OF_CRITIC)]


def moments_of(trainer: FSDPTrainer) -> dict[str, torch.Tensor]:
    states = {**trainer.model.optimizer.state, **trainer.critic.optimizer.state}
    state = {name: states[p] for name, p in parameters_of(trainer).items()}
    return {
        f"{key}/{name}": local(s[key])
        for (name, s), key in itertools.product(state.items(), ("exp_avg", "exp_avg_sq", "step"))
    }


def weights_of(trainer: FSDPTrainer) -> dict[str, torch.Tensor]:
    return {f"weight/{name}": local(p) for name, p in parameters_of(trainer).items()}


def learn(trainer: FSDPTrainer) -> dict[str, torch.Tensor]:
    """STEPS optimizer steps: this rank's part of the clipped gradients of the first, of the weights
    and moments after the last.
    """
    out, dp_ranks = {}, trainer.group.data_size
    for step in range(STEPS):
        tickets = [
            t
            for t in range(step * GROUPS, (step + 1) * GROUPS)
            if dp_rank_of(t, dp_ranks) == trainer.group.data_index
        ]
        trainer.buffer.put([group_of(t) for t in tickets])
        trainer._train(tickets)
        if step == 0:
            out |= {
                f"grad/{name}": local(p.grad).clone() for name, p in parameters_of(trainer).items()
            }
    return out | weights_of(trainer) | moments_of(trainer)


def go_on(trainer: FSDPTrainer, parts: list[dict]) -> dict[str, torch.Tensor]:
    """What a trainer holds after loading the parts, and one step further."""
    trainer.load_state_dict(parts)
    out = {
        f"loaded/{name}": value.clone()
        for name, value in (weights_of(trainer) | moments_of(trainer)).items()
    }
    waiting = trainer.buffer.tickets()
    trainer._train(waiting)
    return out | {f"further/{name}": value for name, value in weights_of(trainer).items()}


def leave(
    trainer: FSDPTrainer, recorder: Recorder, tensors: dict[str, torch.Tensor], out: Path
) -> None:
    held = {name: box_of(trainer, name, p) for name, p in parameters_of(trainer).items()}
    boxes = {name: [box.offsets, box.lengths] for name, box in held.items()}
    save_file({name: value.clone() for name, value in tensors.items()}, f"{out}.safetensors")
    Path(f"{out}.json").write_text(
        json.dumps({"boxes": boxes, "rows": recorder.rows, "canaries": recorder.canaries})
    )


def save_state(trainer: FSDPTrainer, out: Path) -> None:
    """The groups of the next step wait in the buffer, and are saved with it."""
    dp_ranks, first = trainer.group.data_size, STEPS * GROUPS
    trainer.buffer.put(
        [
            group_of(t)
            for t in range(first, first + GROUPS)
            if dp_rank_of(t, dp_ranks) == trainer.group.data_index
        ]
    )
    state = trainer.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    save_file({name: value.contiguous() for name, value in tensors.items()}, f"{out}.safetensors")
    Path(f"{out}.json").write_text(
        json.dumps({name: value for name, value in state.items() if name not in tensors})
    )


def load_states(directory: Path, topology: str, ranks: int) -> list[dict]:
    stems = [directory / f"{topology}.state.rank{rank}" for rank in range(ranks)]
    return [
        json.loads(Path(f"{stem}.json").read_text()) | load_file(f"{stem}.safetensors")
        for stem in stems
    ]


def alone() -> ExecutorGroup:
    return ExecutorGroup("trainer", (0,), 0, torch.device("cpu"))


def assert_weights_path_agrees(recorder: Recorder, group: ExecutorGroup, decoder: Decoder) -> None:
    """What a rank holds is what the weight plan thinks that it holds."""
    source = Source(
        group.size // (group.replicate * group.tensor_parallel),
        group.replicate,
        group.tensor_parallel,
    )
    held = {name: tuple(local(p).shape) for name, p in recorder.parameters}
    boxes = {
        p.name: source.box(recorder.config, p, group.index)
        for p in parameters_to_send(recorder.config, torch.float32)
    }
    assert held == {name: box.lengths for name, box in boxes.items()}
    mine = {name: held_box(decoder, name, p) for name, p in recorder.parameters}
    assert {name: box for name, box in mine.items() if box.numel} == {
        name: box for name, box in boxes.items() if box.numel
    }


def assert_copies_get_the_gradients_of_the_first(rank: int, group: ExecutorGroup) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parameters[1].grad = torch.full((2,), float(rank))
    share_gradients(parameters, group.tensor_group)
    assert (
        parameters[0].grad is None
        and parameters[1].grad.tolist() == [rank - group.tensor_index] * 2
    )


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
    world = World(rank, WORLD, torch.device("cpu"))
    groups = {
        name: executor_group(
            "trainer",
            tuple(range(WORLD)),
            world,
            DEADLINE_S,
            replicate=replicate,
            tensor_parallel=tensor_parallel,
        )
        for name, (replicate, tensor_parallel) in TOPOLOGIES.items()
    }
    assert_copies_get_the_gradients_of_the_first(rank, groups["fsdp2_tp2"])
    for model in MODELS:
        folder = directory / f"{model}.out"
        trained, saved_on, loaded_on = of(model, quick)
        for topology in trained:
            group = groups[topology]
            trainer, recorder = trainer_of(directory / model, group)
            assert_weights_path_agrees(recorder, group, trainer.model.decoder)
            leave(trainer, recorder, learn(trainer), folder / f"{topology}.rank{rank}")
            trainer.export(str(folder / f"{topology}.hf"))
            save_state(trainer, folder / f"{topology}.state.rank{rank}")
        dist.barrier()
        for topology in loaded_on:
            for saved in saved_on:
                trainer, recorder = trainer_of(directory / model, groups[topology])
                tensors = go_on(trainer, load_states(folder, saved, 1 if saved == "one" else WORLD))
                leave(trainer, recorder, tensors, folder / f"{topology}.from.{saved}.rank{rank}")


# --- another model's ---


@pytest.mark.parametrize(
    "saved, held, said",
    [
        (
            {"hidden_size": 16},
            {"hidden_size": 8},
            "the checkpoint's .* does not fit this run's model",
        ),
        ({"hidden_size": 8}, {"hidden_size": 16}, "the checkpoint lacks .*, or parts of it"),
        (
            {"num_hidden_layers": 3},
            {"num_hidden_layers": 2},
            "the checkpoint's model.layers.2.* does not fit .* None",
        ),
        ({"num_hidden_layers": 2}, {"num_hidden_layers": 3}, "the checkpoint lacks model.layers.2"),
    ],
)
def test_another_models_checkpoint_is_refused_and_not_taken_in_parts(tmp_path, saved, held, said):
    theirs, _ = trainer_of(write_model(tmp_path / "theirs", MODELS["tied"] | saved), alone())
    learn(theirs)
    save_state(theirs, tmp_path / "one.state.rank0")
    mine, _ = trainer_of(write_model(tmp_path / "mine", MODELS["tied"] | held), alone())
    with pytest.raises(
        ValueError, match=f"(?s){said}.*another model's; resume with the model.path"
    ):
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
            whole, copies = (
                torch.full(shapes[name], float("nan")),
                torch.zeros(shapes[name], dtype=torch.int),
            )
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
        folder = root / f"{model}.out"
        folder.mkdir()
        trainer, recorder = trainer_of(write_model(root / model, changes), alone())
        leave(trainer, recorder, learn(trainer), folder / "one.rank0")
        trainer.export(str(folder / "one.hf"))
        save_state(trainer, folder / "one.state.rank0")
    pool.call(
        __file__,
        "train_and_go_on",
        ranks=WORLD,
        timeout_s=DEADLINE_S,
        directory=str(root),
        quick=quick,
    )
    for model in MODELS:
        folder = root / f"{model}.out"
        for saved in of(model, quick)[1]:
            trainer, recorder = trainer_of(root / model, alone())
            tensors = go_on(trainer, load_states(folder, saved, 1 if saved == "one" else WORLD))
            leave(trainer, recorder, tensors, folder / f"one.from.{saved}.rank0")
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
    return lambda topology: Left(
        directory / f"{model}.out" / topology,
        1 if topology.split(".")[0] == "one" else WORLD,
        read_config(directory / model),
    )


ON_TOPOLOGIES = pairs(QUICK, tuple(TOPOLOGIES))


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], kind: str) -> None:
    """Every tensor of a kind, within VALUES of the largest value of that kind."""
    names = [name for name in want if name.startswith(f"{kind}/")]
    assert names and {name for name in got if name.startswith(f"{kind}/")} == set(names)
    largest = max(want[name].abs().max().item() for name in names)
    for name in names:
        torch.testing.assert_close(
            got[name], want[name], atol=VALUES * largest, rtol=0, msg=lambda m: f"{name}: {m}"
        )


@pytest.mark.parametrize("model, topology", ON_TOPOLOGIES)
@pytest.mark.parametrize("kind", ["grad", "weight", "exp_avg", "exp_avg_sq"])
def test_every_topology_learns_what_one_rank_learns(left, model, topology, kind):
    assert_close(left(topology).whole, left("one").whole, kind)


@pytest.mark.parametrize("model, topology", ON_TOPOLOGIES)
def test_every_place_is_held_by_as_many_ranks_as_there_are_replicas(left, model, topology):
    replicate, tensor_parallel = TOPOLOGIES[topology]
    for key, copies in left(topology).copies.items():
        split = (
            "_proj." in key
        )  # embeddings, norms and head are whole on every tensor-parallel rank
        assert copies.eq(replicate if split else replicate * tensor_parallel).all(), key


@pytest.mark.parametrize("model, topology", ON_TOPOLOGIES)
def test_metrics_and_canaries_are_those_of_one_rank(left, model, topology):
    got, want = left(topology), left("one")
    assert [row["tokens/trained"] for row in got.rows] == [
        row["tokens/trained"] for row in want.rows
    ]
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
    held = {
        name.removeprefix("weight/"): value
        for name, value in left(topology).whole.items()
        if name.startswith("weight/")
    }
    assert exported.keys() == {name for name in held if not name.startswith(OF_CRITIC)}
    assert all(torch.equal(exported[name], held[name]) for name in exported)


@pytest.mark.parametrize("model, topology", ON_TOPOLOGIES)
def test_a_saved_state_holds_every_weight_moment_and_group_once(directory, model, topology):
    parts = load_states(directory / f"{model}.out", topology, WORLD)
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        for name, shape in parameter_shapes(read_config(directory / model)).items():
            stored = sum(
                part[f"{kind}/{name}"].numel() for part in parts if f"{kind}/{name}" in part
            )
            assert stored == torch.Size(shape).numel(), f"{kind}/{name}"
    first = STEPS * GROUPS
    buffered = itertools.chain.from_iterable(part["buffered"] for part in parts)
    assert sorted(buffered) == list(range(first, first + GROUPS))


def of_states() -> list:
    """Parameters (model, saved, topology)."""
    out = []
    for model in MODELS:
        for saved in SAVED:
            for topology in ("one", *LOADED):
                quick = saved in ("one", *QUICK[model]) and topology in ("one", QUICK_LOADED[model])
                marks = () if quick else pytest.mark.slow
                out.append(
                    pytest.param(
                        model, saved, topology, marks=marks, id=f"{model}-{saved}-{topology}"
                    )
                )
    return out


@pytest.mark.parametrize("model, saved, topology", of_states())
def test_a_state_saved_on_one_topology_is_the_same_bits_on_another_and_goes_on_alike(
    left, model, saved, topology
):
    want, got = left(saved).whole, left(f"{topology}.from.{saved}").whole
    loaded = {
        name.removeprefix("loaded/"): value
        for name, value in got.items()
        if name.startswith("loaded/")
    }
    assert loaded.keys() == {name for name in want if not name.startswith("grad/")}
    assert all(torch.equal(loaded[name], want[name]) for name in loaded)
    assert loaded["step/model.norm.weight"] == STEPS
    further = left(f"one.from.{saved}").whole
    assert_close(got, further, "further")
    moved = max(
        (further[f"further/{n}"] - loaded[n]).abs().max() for n in loaded if n.startswith("weight/")
    )
    assert moved > 1e-3


# --- who trains on what ---


class Trainer(Executor):
    name, tensor_parallel = "trainer", 2


def test_a_group_goes_to_all_tensor_parallel_peers_of_its_lane_and_each_lane_gets_its_share():
    channel = Scatter(Executor(), Trainer(), carries=Group)
    routes = {t: channel.route(group_of(t), num_destinations=6) for t in range(6)}
    assert routes == {t: [2 * dp_rank_of(t, 3), 2 * dp_rank_of(t, 3) + 1] for t in range(6)}
    named = sorted(itertools.chain.from_iterable(routes.values()))
    assert named == sorted(2 * [0, 1, 2, 3, 4, 5])


class Mail:
    """Controls of trainer ranks in one process: what is posted arrives at once."""

    def __init__(self, rank: int, controls: list["Mail"], handlers: dict):
        self.rank = rank
        self.leader = 0
        self.is_leader = rank == 0
        self.stopping = False
        self._controls = controls
        self._handlers = handlers
        self._mail = []

    def on(self, topic, handler) -> None:
        self._handlers[topic] = handler

    def post(self, rank, topic, payload) -> None:
        if topic in self._handlers:
            self._handlers[topic](self.rank, payload)
        else:
            self._controls[rank]._mail.append((self.rank, payload))

    def take(self, topic) -> list:
        mail, self._mail = self._mail, []
        return mail


def test_a_group_is_finished_once_it_has_reached_all_peers_and_all_of_them_take_it():
    controls, handlers = [], {}
    controls += [Mail(rank, controls, handlers) for rank in range(4)]
    ledger = TicketLedger(groups_per_step=2, max_lag=0, overcommit=0, num_pools=2)
    ranks = [
        TicketService(ledger, c, trainer_ranks=(0, 1, 2, 3), timeout_s=1.0, tensor_parallel=2)
        for c in controls
    ]
    assert [t.index for t in ledger.start(2, 0)] == [0, 1]
    mine = {dp_rank_of(ticket, 2): ticket for ticket in (0, 1)}  # data-parallel rank -> its ticket
    for rank in (0, 1, 2):
        ranks[rank].finish([mine[rank // 2]])
        assert [r.take(0) for r in ranks] == [None] * 4, "taken although it has not reached rank 3"
    ranks[3].finish([mine[1]])
    assert [r.take(0) for r in ranks] == [[mine[0]], [mine[0]], [mine[1]], [mine[1]]]


# -- what is refused before anything starts
# --------------------------------------------------------------------------------


def complaints(*overrides: str, ranks: int) -> str:
    with pytest.raises(ConfigError) as error:
        check_command_line(list(overrides), world_size=ranks)
    return str(error.value)


@pytest.mark.parametrize(
    "overrides, ranks, said",
    [
        (
            "trainer.replicate=2",
            2,
            (
                "trainer.replicate=2",
                "1 trainer rank cannot make whole replicas; "
                "set placement.trainer to a multiple of 2",
            ),
        ),
        (
            "trainer.replicate=2 trainer.tensor_parallel=2 placement.trainer=[0,1]",
            3,
            ("tensor_parallel=2", "a multiple of 4 ranks"),
        ),
        (
            "trainer.tensor_parallel=4 placement.trainer=[0,1,2,3]",
            5,
            ("trainer.tensor_parallel=4", "2 key/value heads"),
        ),
        (
            "trainer.tensor_parallel=3 placement.trainer=[0,1,2]",
            4,
            ("4 query heads and 2 key/value heads and 512 hidden units",),
        ),
        (
            "trainer.tensor_parallel=2 placement.trainer=[0,1,2,3] groups_per_step=3",
            5,
            ("2 sets of 2 trainer ranks", "multiple of 2"),
        ),
        (
            "trainer.replicate=2 placement.trainer=[0,1,2,3] groups_per_step=6",
            5,
            ("4 trainer ranks", "multiple of 4"),
        ),
    ],
)
def test_what_cannot_be_shared_out_evenly_is_said_before_anything_starts(overrides, ranks, said):
    message = complaints(*overrides.split(), ranks=ranks)
    assert all(text in message for text in said), message


def test_what_can_is_accepted():
    split = [
        "trainer.tensor_parallel=2",
        "placement.trainer=[0,1]",
        "groups_per_step=3",
    ]  # one data-parallel rank: no sharing out
    # conf/config.yaml leaves the size of a step to the model, so Hydra has to add that key.
    assert check_command_line(split, world_size=3) == [*split[:2], "++groups_per_step=3"]
