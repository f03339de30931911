"""Two ranks under FSDP2 learn what one process learns from the same groups or rows: gradients,
norm, clipping, weights after a step, and evaluations.

Each rank leaves what it computed in a safetensors file.
"""

import itertools
from dataclasses import replace
from functools import cache, partial
from itertools import compress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from llamarl.errors import NotFinite
from llamarl.learning.losses.clipped import clipped
from llamarl.learning.losses.common import per_completion
from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.losses.tb import tb
from llamarl.learning.optim import clip_grad_norm
from llamarl.learning.sft import NextToken, SFTPair
from llamarl.learning.supervised import SupervisedSettings, SupervisedUpdate
from llamarl.learning.targets import Shaping
from llamarl.learning.update import PolicyUpdate, StepAborted
from llamarl.learning.values import CriticSettings, SharedCritic
from llamarl.models.build import build_decoder
from llamarl.types import Group
from tests import updating
from tests.build.group import build_group
from tests.build.model_config import model_config
from tests.tolerances import assert_same_count, rounding

pytestmark = pytest.mark.machine

# Each rank fills its own microbatches.
OF_MICROBATCHES = ("padding_fraction", "unused_budget_fraction")
AT_THRESHOLDS = ("clip/low", "clip/high", "value/clipped")  # shares of labels, by counts of them
CLIP = 0.2
RANKS = 2
CPU = torch.device("cpu")
MAX_NORM = 0.01  # well below the norm, so that clipping shows
# Of the largest: width, and the layers there and back; the same after four updates.
ONE_STEP = rounding(terms=15, depth=2 * 2 * 2)
TWO_STEPS = rounding(terms=15, depth=4 * 2 * 2 * 2)
DEADLINE_S = 120
STEPPING = {"schedule": "constant", "max_grad_norm": MAX_NORM}
SETTINGS = replace(updating.SETTINGS, microbatch_tokens=25, temperature=0.8, **STEPPING)
CRITIC = CriticSettings(lr=0.05, coef=0.5, clip=CLIP, gamma=0.9, gae_lambda=0.8)


def decoder_of(tied: bool):
    # 23 rows of embeddings and 15 of the feed-forward's: no even split over two ranks
    config = model_config(hidden_size=12, intermediate_size=15, tie_word_embeddings=tied)
    decoder = build_decoder(config, device="cpu")
    random = torch.Generator().manual_seed(0)
    for parameter in decoder.parameters():
        parameter.data = torch.randn(parameter.shape, generator=random) * 0.4
    return decoder


def sharded_decoder(tied: bool):
    decoder = decoder_of(tied)
    for layer in decoder.layers:
        fully_shard(layer)
    # The root would keep its weights whole until backward; giving them back makes the head's saved
    # weight come again.
    fully_shard(decoder, reshard_after_forward=True)
    return decoder


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def weights_of(decoder) -> dict[str, torch.Tensor]:
    return {f"weight/{name}": whole(p) for name, p in decoder.named_parameters()}


def columns_of(prefix: str, columns: dict) -> dict[str, torch.Tensor]:
    known = {name: value for name, value in columns.items() if value is not None}
    return {f"{prefix}/{n}": torch.tensor(x, dtype=torch.float64) for n, x in known.items()}


def update_of(decoder, loss_fn, settings, ranks: int, critic=None) -> PolicyUpdate:
    optimizer = torch.optim.SGD(decoder.parameters())
    group = dist.group.WORLD if ranks > 1 else None
    ends = {"group": group, "device": CPU, "critic": critic}
    return PolicyUpdate(decoder, optimizer, loss_fn, settings, **ends)


def groups_of(rank: int, ranks: int) -> list[Group]:
    """Four groups with what a reference says of them, and one completion that has not ended: three
    for rank 0, one for rank 1, so that the ranks have unlike numbers of microbatches and tokens.
    """
    random = torch.Generator().manual_seed(1)
    out = []
    for ticket in range(4):
        lengths = torch.randint(1, 9, (4,), generator=random).tolist()
        rewards = [1.0, 0.0, 0.0, float("nan")]
        said = {
            "ref_logprobs": torch.linspace(-4, -2, sum(lengths)),
            "finish_reasons": ("stop", "length", "stop", "stop"),
        }
        out.append(build_group(ticket, lengths, rewards, vocab_size=23, **said))
    return out if ranks == 1 else [out[:3], out[3:]][rank]


def policy_step(decoder, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """PolicyUpdate with a KL term, where the last rank has no groups at all: weights after a step,
    and its metrics.
    """
    groups = groups_of(0, 1) if rank == 0 else []
    update = update_of(decoder, regularised(policy_gradient, kl_coef=0.1), SETTINGS, ranks)
    before = weights_of(decoder)
    # Neither what is not finite on one rank nor a stop request on another changes anything
    # anywhere.
    broken = []
    for group in groups:
        nothing = torch.full(group.token_ids.shape, float("nan"))
        broken.append(replace(group, generator_logprobs=nothing))
    for error, given, stop in (
        (StepAborted, groups, lambda: rank == ranks - 1),
        (NotFinite, broken, lambda: False),
    ):
        with pytest.raises(error):
            update.run(given, 0, stop)
        assert all(torch.equal(x, before[name]) for name, x in weights_of(decoder).items())
    return columns_of("metric", update.run(groups, 0, lambda: False)) | weights_of(decoder)


def stepped(decoder, groups, ranks, loss_fn, critic=None, **changes) -> dict[str, torch.Tensor]:
    """Two steps of two passes each."""
    settings = replace(SETTINGS, updates_per_batch=2, **changes)
    update = update_of(decoder, loss_fn, settings, ranks, critic)
    out = {}
    for version in range(2):
        out |= columns_of(f"metric{version}", update.run(groups, version, lambda: False))
    return out | weights_of(decoder)


def coupled(inputs):
    """Squared log-probabilities of whole completions around their group's mean, which is of several
    microbatches' tokens.
    """
    completions = inputs.completions
    total = completions.sums(inputs.trainer_logprobs)
    mean = completions.group_mean(total, torch.ones_like(total, dtype=torch.bool))
    square = (total - mean - completions.rewards).square().sum()
    return per_completion(square, completions), {"square/completions": square.detach()}


def whole_group_step(decoder, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """A loss over whole groups."""
    return stepped(decoder, groups_of(rank, ranks), ranks, coupled, whole_groups=True)


def split_step(decoder, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Trajectory balance; a rank has half of each group's completions."""
    groups = []
    for group in groups_of(0, 1):
        rewards = torch.linspace(-1, 1, 4) * (1 + group.ticket)
        every = torch.ones(4, dtype=torch.bool)
        scored = replace(group, rewards=rewards, outcomes=("score",) * 4, trained=every)
        groups.append(share_of(scored, rank, ranks))
    shared = {"whole_groups": True, "shares_groups": True, "microbatch_tokens": 20}
    return stepped(decoder, groups, ranks, partial(tb, beta=0.5), **shared)


def share_of(group: Group, rank: int, ranks: int) -> Group:
    """The group with every so-many-th of its completions, tokens and all."""
    kept = torch.arange(len(group.lengths)) % ranks == rank
    of_tokens = kept.repeat_interleave(group.lengths)
    tokens = ("token_ids", "generator_logprobs", "policy_versions", "ref_logprobs")
    tokens += ("loss_mask", "restarts", "turn_rewards")
    tensors, tuples = ("lengths", "rewards", "trained", "achieved"), ("columns", "finish_reasons")
    return replace(
        group,
        **{name: getattr(group, name)[of_tokens] for name in tokens},
        **{name: getattr(group, name)[kept] for name in tensors},
        **{name: tuple(compress(getattr(group, name), kept)) for name in (*tuples, "outcomes")},
    )


def ppo_step(decoder, rank: int, ranks: int, *, clip: float = CLIP) -> dict[str, torch.Tensor]:
    """PPO with a value head, everything shaped and whitened over the ranks. clip: of ratios and of
    values.
    """
    everyone = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
    critic = critic_of(replace(CRITIC, clip=clip), everyone)
    loss = regularised(partial(clipped, clip_low=clip, clip_high=clip))
    shaping = Shaping(missing_eos_penalty=-1.0, reward_kl_coef=0.05, whiten="both")
    out = stepped(decoder, groups_of(rank, ranks), ranks, loss, critic, shaping=shaping)
    for name, p in zip(("weight", "bias"), critic.parameters):
        out[f"head/{name}"] = whole(p)
    if ranks > 1:
        # What the ranks save fits the unsharded head, and what one saves fits the shards.
        saved = critic.state_dict()
        rows = saved.pop("value_rows")
        places = itertools.product(("weight", "bias"), (0, 1))
        saved["rows"] = torch.tensor([rows[name][i][0] for name, i in places])
        tensors = {name: x for name, x in saved.items() if isinstance(x, torch.Tensor)}
        out |= {f"saved{rank}/{name}": value for name, value in tensors.items()}
    return out


def critic_of(settings: CriticSettings, mesh) -> SharedCritic:
    return SharedCritic(12, settings, betas=(0.9, 0.99), eps=1e-4, mesh=mesh, device=CPU)


# Which of the rows each rank has, of a supervised step: as many as the other, fewer, none.
SHARES = {"even": ([0, 1], [2, 3]), "fewer": ([0, 1, 2], [3]), "none": ([], [0, 1, 2, 3])}


def supervised_step(decoder, rank: int, ranks: int, *, shares) -> dict[str, torch.Tensor]:
    """Two steps on four rows of 8 to 11 tokens, of which the last few are learned, and an
    evaluation of them.
    """
    draw = torch.Generator().manual_seed(1)
    rows = []
    for size, learned in ((8, 3), (11, 7), (9, 1), (10, 5)):
        ids = torch.randint(0, 23, (size,), generator=draw)
        rows.append(SFTPair(ids, torch.arange(size) >= size - learned))
    if ranks > 1:
        rows = [rows[number] for number in shares[rank]]
    one_row = {"lr": 0.5, "warmup_steps": 0, "max_steps": 2, "microbatch_tokens": 12}
    settings = SupervisedSettings(**one_row, **STEPPING)
    group = dist.group.WORLD if ranks > 1 else None
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.5)
    ends = {"group": group, "device": CPU}
    update = SupervisedUpdate(decoder, optimizer, NextToken(), settings, **ends)
    out = {}
    for step in range(2):
        out |= columns_of(f"metric{step}", update.run(rows, step))
    return out | columns_of("evaluation", update.evaluate(rows)) | weights_of(decoder)


STEPS = {
    "update": policy_step,
    "coupled": whole_group_step,
    "ppo": ppo_step,
    "split": split_step,
    **{kind: partial(supervised_step, shares=shares) for kind, shares in SHARES.items()},
}
UNTIED = ("update",)  # the others' embedding is tied to the output


def norm_over_mixed_placements() -> torch.Tensor:
    """Collective: gradients sharded, replicated and plain, of norm sqrt(9 + 16 + 144) when each
    number counts once.
    """
    line, grid = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (RANKS, 1))
    sharded = torch.tensor([[0.0], [0.0], [12.0]])  # on the last rank alone
    both = torch.tensor([[0.0], [0.0], [3.0]])
    gradients = [
        distribute_tensor(sharded, line, [Shard(0)]),
        distribute_tensor(torch.tensor([4.0]), line, [Replicate()]),
        distribute_tensor(both, grid, [Replicate(), Shard(0)]),
    ]
    parameters = []
    for gradient in gradients:
        parameters.append(torch.nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient
    return clip_grad_norm(parameters, None)


def compute_on_ranks(rank: int, directory: str) -> None:
    """What one rank of the pool runs."""
    out = {"mixed": norm_over_mixed_placements()}
    for kind, step in STEPS.items():
        made = step(sharded_decoder(kind not in UNTIED), rank, RANKS)
        out |= {f"{kind}/{name}": tensor.contiguous() for name, tensor in made.items()}
    save_file(out, Path(directory) / f"rank{rank}.safetensors")


@pytest.fixture(scope="module")
def ranks(pool, tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    """What each rank computed."""
    directory = tmp_path_factory.mktemp("ranks")
    where = {"timeout_s": DEADLINE_S, "directory": str(directory)}
    pool.call(__file__, "compute_on_ranks", ranks=RANKS, **where)
    return [load_file(directory / f"rank{rank}.safetensors") for rank in range(RANKS)]


def test_shards_count_once_and_replicas_not_again(ranks):
    assert [rank["mixed"].item() for rank in ranks] == [13.0] * RANKS


def of_kind(tensors, kind: str) -> dict[str, torch.Tensor]:
    prefix = f"{kind}/"
    return {n.removeprefix(prefix): value for n, value in tensors.items() if n.startswith(prefix)}


@cache
def alone(kind: str, **options) -> dict[str, torch.Tensor]:
    """What one process computes of all groups or rows."""
    return STEPS[kind](decoder_of(kind not in UNTIED), 0, 1, **options)


@pytest.mark.parametrize("kind", STEPS)
def test_two_ranks_learn_what_one_process_learns(ranks, kind):
    """Policies, also where a rank has no groups; losses of whole groups and of groups that ranks
    share; value heads; supervised rows, however unevenly these are shared.
    """
    one = alone(kind)
    within = ONE_STEP if kind == "update" else TWO_STEPS
    for rank in ranks:
        got = of_kind(rank, kind)
        assert {name for name in got if not name.startswith("saved")} == one.keys()
        for name, want in one.items():
            if name.endswith(OF_MICROBATCHES):
                continue
            if kind == "ppo" and name.endswith(AT_THRESHOLDS):
                stricter = float(alone(kind, clip=CLIP + TWO_STEPS)[name])
                looser = float(alone(kind, clip=CLIP - TWO_STEPS)[name])
                assert_same_count(float(got[name]), stricter=stricter, looser=looser, what=name)
                continue
            how = {"atol": within, "rtol": TWO_STEPS}
            torch.testing.assert_close(got[name], want, **how, msg=lambda m: f"{name}: {m}")
    start = weights_of(decoder_of(kind not in UNTIED))
    assert max((one[name] - start[name]).abs().max() for name in start) > 1e-3


def test_what_is_compared_is_all_there():
    assert "metric/kl/ref" in alone("update")
    assert {name for name in alone("ppo") if name.endswith(AT_THRESHOLDS)}
    supervised = alone("even")
    assert supervised["metric0/targets/trained"] == 16
    assert supervised["metric0/grad_norm"] > MAX_NORM


def test_what_ranks_save_of_a_value_head_is_the_whole_of_it(ranks):
    critic = critic_of(CRITIC, None)
    parts = []
    for i, rank in enumerate(ranks):
        part = of_kind(rank, f"ppo/saved{i}")
        w0, wn, b0, bn = part.pop("rows").tolist()
        # Twelve weights are shared evenly, the bias is the first rank's.
        assert wn == 6 and bn == 1 - i
        rows = {"weight": [[w0], [wn]], "bias": [[b0], [bn]]}
        parts.append({**part, "value_rows": rows, "value_step": 4.0})
    assert critic.load_state_dict(parts) == 0
    for name, p in zip(("weight", "bias"), critic.parameters):
        assert torch.equal(p.detach(), ranks[0][f"ppo/head/{name}"])
        assert critic.optimizer.state[p]["exp_avg_sq"].abs().sum() > 0
