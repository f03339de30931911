"""Two ranks under FSDP2 learn what one process learns from the same groups: gradients, norm,
clipping, weights after a step.

Each rank leaves what it computed in a safetensors file.
"""

import dataclasses
import itertools
from functools import partial
from itertools import compress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from llamarl.errors import NotFinite
from llamarl.learning.losses.clipped import clipped
from llamarl.learning.losses.common import per_completion
from llamarl.learning.losses.policy_gradient import policy_gradient
from llamarl.learning.losses.regularisers import regularised
from llamarl.learning.losses.tb import tb
from llamarl.learning.optim import clip_grad_norm
from llamarl.learning.targets import Shaping
from llamarl.learning.update import PolicyUpdate, StepAborted, UpdateSettings
from llamarl.learning.values import CriticSettings, SharedCritic
from llamarl.types import Group
from tests.build.group import build_group
from tests.ranks.sharded import FLOAT32, decoder_of, sharded_decoder, whole
from tests.tolerances import assert_same_count, rounding

pytestmark = pytest.mark.machine

OF_MICROBATCHES = ("padding_fraction", "unused_budget_fraction")  # each rank fills its own
AT_THRESHOLDS = ("clip/low", "clip/high", "value/clipped")  # shares of labels, by counts of them
CLIP = 0.2
RANKS = 2
MAX_NORM = 0.01  # well below the norm, so that clipping shows
TWO_STEPS = rounding(terms=15, depth=4 * 2 * 2 * 2)  # the same after four updates
DEADLINE_S = 120


def groups_of(rank: int, ranks: int) -> list[Group]:
    """Four groups: three for rank 0, one for rank 1, so that the ranks have unlike numbers of
    microbatches and tokens.
    """
    random = torch.Generator().manual_seed(1)
    out = []
    for ticket in range(4):
        lengths = torch.randint(1, 9, (4,), generator=random).tolist()
        rewards = [1.0, 0.0, 0.0, float("nan")]
        out.append(build_group(ticket, lengths, rewards, vocab_size=23))
    return out if ranks == 1 else [out[:3], out[3:]][rank]


SETTINGS = UpdateSettings(
    lr=0.5,
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


def policy_step(decoder, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """PolicyUpdate with a KL term, where the last rank has no groups at all: weights after a step,
    and its metrics.
    """
    groups = [
        dataclasses.replace(g, ref_logprobs=torch.full(g.token_ids.shape, -2.5))
        for g in groups_of(0, 1)
    ]
    groups = groups if rank == 0 else []
    out, everyone = {}, dist.group.WORLD if ranks > 1 else None
    optimizer = torch.optim.SGD(decoder.parameters())
    loss = regularised(policy_gradient, kl_coef=0.1)
    update = PolicyUpdate(
        decoder, optimizer, loss, SETTINGS, group=everyone, device=torch.device("cpu")
    )
    weights = {name: whole(p.detach()).clone() for name, p in decoder.named_parameters()}
    # Neither what is not finite on one rank nor a stop request on another changes anything
    # anywhere.
    broken = [
        dataclasses.replace(g, generator_logprobs=torch.full(g.token_ids.shape, float("nan")))
        for g in groups
    ]
    for error, given, stop in (
        (StepAborted, groups, lambda: rank == ranks - 1),
        (NotFinite, broken, lambda: False),
    ):
        with pytest.raises(error):
            update.run(given, 0, stop)
        assert all(
            torch.equal(whole(p.detach()), weights[name]) for name, p in decoder.named_parameters()
        )
    metrics = update.run(groups, 0, lambda: False)
    out |= {
        f"metric/{name}": torch.tensor(value, dtype=torch.float64)
        for name, value in metrics.items()
    }
    return out | {
        f"weight/{name}": whole(p.detach()).clone() for name, p in decoder.named_parameters()
    }


def coupled(inputs):
    """Squared log-probabilities of whole completions around their group's mean, which is of several
    microbatches' tokens.
    """
    completions = inputs.completions
    total = completions.sums(inputs.trainer_logprobs)
    centred = (
        total
        - completions.group_mean(total, torch.ones_like(total, dtype=torch.bool))
        - completions.rewards
    )
    return per_completion(centred.square().sum(), completions), {
        "square/completions": centred.detach().square().sum()
    }


def whole_group_step(decoder, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Two steps of a loss over whole groups, two passes each; rank 0 has three groups and the other
    one.
    """
    settings = dataclasses.replace(SETTINGS, whole_groups=True, updates_per_batch=2)
    return stepped(decoder, graded(groups_of(rank, ranks)), ranks, coupled, settings, None)


def split_step(decoder, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Two steps of trajectory balance, two passes each; a rank has half of each group's
    completions.
    """
    groups = []
    for group in graded(groups_of(0, 1)):
        rewards = torch.linspace(-1, 1, 4) * (1 + group.ticket)
        every = torch.ones(4, dtype=torch.bool)
        scored = dataclasses.replace(group, rewards=rewards, outcomes=("score",) * 4, trained=every)
        groups.append(share_of(scored, rank, ranks))
    settings = dataclasses.replace(
        SETTINGS, whole_groups=True, shares_groups=True, updates_per_batch=2, microbatch_tokens=20
    )
    return stepped(decoder, groups, ranks, partial(tb, beta=0.5), settings, None)


def share_of(group: Group, rank: int, ranks: int) -> Group:
    """The group with every so-many-th of its completions, tokens and all."""
    kept = torch.arange(len(group.lengths)) % ranks == rank
    of_tokens = kept.repeat_interleave(group.lengths)
    tokens = (
        "token_ids",
        "generator_logprobs",
        "policy_versions",
        "ref_logprobs",
        "loss_mask",
        "restarts",
        "turn_rewards",
    )
    return dataclasses.replace(
        group,
        lengths=group.lengths[kept],
        rewards=group.rewards[kept],
        trained=group.trained[kept],
        achieved=group.achieved[kept],
        columns=tuple(compress(group.columns, kept)),
        finish_reasons=tuple(compress(group.finish_reasons, kept)),
        outcomes=tuple(compress(group.outcomes, kept)),
        **{name: getattr(group, name)[of_tokens] for name in tokens},
    )


def ppo_step(decoder, rank: int, ranks: int, *, clip: float = CLIP) -> dict[str, torch.Tensor]:
    """Two steps of PPO with a value head, two passes each, everything shaped and whitened over the
    ranks. clip: of ratios and of values.
    """
    everyone = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
    shaping = Shaping(missing_eos_penalty=-1.0, reward_kl_coef=0.05, whiten="both")
    settings = dataclasses.replace(SETTINGS, updates_per_batch=2, shaping=shaping)
    critic = SharedCritic(
        12,
        CriticSettings(lr=0.05, coef=0.5, clip=clip, gamma=0.9, gae_lambda=0.8),
        betas=(0.9, 0.99),
        eps=1e-4,
        mesh=everyone,
        device=torch.device("cpu"),
    )
    groups = graded(groups_of(rank, ranks))
    loss = regularised(partial(clipped, clip_low=clip, clip_high=clip))
    out = stepped(decoder, groups, ranks, loss, settings, critic)
    out |= {
        f"head/{name}": whole(p.detach()).clone()
        for name, p in zip(("weight", "bias"), critic.parameters)
    }
    if ranks > 1:
        # What the ranks save fits the unsharded head, and what one saves fits the shards.
        saved = critic.state_dict()
        out |= {
            f"saved{rank}/{name}": value
            for name, value in saved.items()
            if isinstance(value, torch.Tensor)
        }
        rows = saved["value_rows"]
        out[f"saved{rank}/rows"] = torch.tensor(
            [rows[name][i][0] for name, i in itertools.product(("weight", "bias"), (0, 1))]
        )
    return out


def graded(groups: list[Group]) -> list[Group]:
    """The groups with what a reference says of them, and one that has not ended."""
    out = []
    for group in groups:
        of_reference = torch.linspace(-4, -2, group.token_ids.numel())
        reasons = ("stop", "length", "stop", "stop")
        out.append(dataclasses.replace(group, ref_logprobs=of_reference, finish_reasons=reasons))
    return out


def stepped(decoder, groups, ranks, loss_fn, settings, critic) -> dict[str, torch.Tensor]:
    group = dist.group.WORLD if ranks > 1 else None
    optimizer = torch.optim.SGD(decoder.parameters())
    update = PolicyUpdate(
        decoder,
        optimizer,
        loss_fn,
        settings,
        group=group,
        device=torch.device("cpu"),
        critic=critic,
    )
    out = {}
    for version in range(2):
        metrics = update.run(groups, version, lambda: False)
        out |= {
            f"metric{version}/{name}": torch.tensor(value, dtype=torch.float64)
            for name, value in metrics.items()
            if value is not None
        }
    return out | {
        f"weight/{name}": whole(p.detach()).clone() for name, p in decoder.named_parameters()
    }


STEPS = {
    "update": policy_step,
    "coupled": whole_group_step,
    "ppo": ppo_step,
    "split": split_step,
}
EMBEDDING = {"update": "untied"}  # the others' is tied to the output


def norm_over_mixed_placements() -> torch.Tensor:
    """Collective: gradients sharded, replicated and plain, of norm sqrt(9 + 16 + 144) when each
    number counts once.
    """
    line, grid = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (RANKS, 1))
    sharded = torch.zeros(3, 1)
    replicated = torch.tensor([4.0])
    both = torch.tensor([[0.0], [0.0], [3.0]])
    sharded[2] = 12.0  # on the last rank alone
    gradients = [
        distribute_tensor(sharded, line, [Shard(0)]),
        distribute_tensor(replicated, line, [Replicate()]),
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
        made = step(sharded_decoder(EMBEDDING.get(kind, "tied")), rank, RANKS)
        out |= {f"{kind}/{name}": tensor.contiguous() for name, tensor in made.items()}
    save_file(out, Path(directory) / f"rank{rank}.safetensors")


@pytest.fixture(scope="module")
def ranks(pool, tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    """What each rank computed."""
    directory = tmp_path_factory.mktemp("ranks")
    pool.call(
        __file__, "compute_on_ranks", ranks=RANKS, timeout_s=DEADLINE_S, directory=str(directory)
    )
    return [load_file(directory / f"rank{rank}.safetensors") for rank in range(RANKS)]


def test_shards_count_once_and_replicas_not_again(ranks):
    assert [rank["mixed"].item() for rank in ranks] == [13.0] * RANKS


def test_a_policy_update_of_two_ranks_is_that_of_one_even_if_a_rank_has_no_groups(ranks):
    alone = policy_step(decoder_of(False), 0, 1)
    one = {f"update/{name}": tensor for name, tensor in alone.items()}
    assert "update/metric/kl/ref" in one
    for rank in ranks:
        assert {name for name in rank if name.startswith("update/")} == one.keys()
        for name, want in one.items():
            if name.endswith(OF_MICROBATCHES):
                continue
            torch.testing.assert_close(
                rank[name], want, atol=FLOAT32, rtol=2 * FLOAT32, msg=lambda m: f"{name}: {m}"
            )
    start = decoder_of(False).state_dict()
    assert (
        max((one[f"update/weight/{name}"] - start[name]).abs().max().item() for name in start)
        > 1e-3
    )


@pytest.mark.parametrize("kind", ["coupled", "ppo", "split"])
def test_whole_groups_split_groups_and_value_heads_learn_the_same_on_two_ranks(ranks, kind):
    one = {f"{kind}/{name}": tensor for name, tensor in STEPS[kind](decoder_of(True), 0, 1).items()}
    stricter, looser = {}, {}
    if kind == "ppo":
        stricter = ppo_step(decoder_of(True), 0, 1, clip=CLIP + TWO_STEPS)
        looser = ppo_step(decoder_of(True), 0, 1, clip=CLIP - TWO_STEPS)
        assert {name for name in looser if name.endswith(AT_THRESHOLDS)}
    for rank in ranks:
        got = {name for name in rank if name.startswith(f"{kind}/") and "/saved" not in name}
        assert got == one.keys()
        for name, want in one.items():
            if name.endswith(OF_MICROBATCHES):
                continue
            if name.endswith(AT_THRESHOLDS):
                own = name.removeprefix(f"{kind}/")
                counts = {"stricter": float(stricter[own]), "looser": float(looser[own])}
                assert_same_count(float(rank[name]), **counts, what=name)
                continue
            torch.testing.assert_close(
                rank[name], want, atol=TWO_STEPS, rtol=TWO_STEPS, msg=lambda m: f"{name}: {m}"
            )
    start = decoder_of(True).state_dict()
    assert (
        max((one[f"{kind}/weight/{name}"] - start[name]).abs().max().item() for name in start)
        > 1e-3
    )


def test_what_ranks_save_of_a_value_head_is_the_whole_of_it(ranks):
    settings = CriticSettings(lr=0.05, coef=0.5, clip=0.2, gamma=0.9, gae_lambda=0.8)
    critic = SharedCritic(
        12, settings, betas=(0.9, 0.99), eps=1e-4, mesh=None, device=torch.device("cpu")
    )
    parts = []
    for i, rank in enumerate(ranks):
        part = {
            name.removeprefix(f"ppo/saved{i}/"): value
            for name, value in rank.items()
            if name.startswith(f"ppo/saved{i}/")
        }
        w0, wn, b0, bn = part.pop("rows").tolist()
        assert (
            wn == 6 and bn == 1 - i
        )  # twelve weights are shared evenly, the bias is the first rank's
        rows = {"weight": [[w0], [wn]], "bias": [[b0], [bn]]}
        parts.append({**part, "value_rows": rows, "value_step": 4.0})
    assert critic.load_state_dict(parts) == 0
    for name, p in zip(("weight", "bias"), critic.parameters):
        assert torch.equal(p.detach(), ranks[0][f"ppo/head/{name}"])
        assert critic.optimizer.state[p]["exp_avg_sq"].abs().sum() > 0
