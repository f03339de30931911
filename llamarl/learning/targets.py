"""Makes a batch's targets: its rewards are shaped, turned into advantages, and whitened over all
ranks.

groups -> (teaching) -> those that are trained on
rewards -> shape -> (whiten) -> advantages: of each group's completions, or GAE's of each token ->
(whiten) -> Targets

    r_t = -beta KL_t + [t is the last token] * score        (Async RLHF 2.1; OPPO eq. 1's r_t)

    KL_t  = -x,  x = log ref_t - log mu_t        (Schulman's k1)
    score = the task's reward, or missing_eos_penalty where it was cut off
            (Async RLHF tables 4 and 7)
    mu    = generator_logprobs, the policy that sampled the token; ref = ref_logprobs

Advantages by token (GAE) take r_t; those by completion take its sum, the whole completion's reward.
A completion that is not trained on has a reward of 0, whatever its end.

Shapes: G completions of a group, T their tokens end to end; C the tokens of all groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from llamarl.comm.together import TrainerRanks
from llamarl.learning.advantages import ADVANTAGES, by_turn, gae
from llamarl.learning.segments import end_to_end, owners, sum_by
from llamarl.learning.step_metrics import Row
from llamarl.learning.values import Critic, CriticSettings
from llamarl.types import Group, Verdict, ends_of_turns

STD_EPS = 1e-8
# Float32 values that differ by less, as a share of their size, differ by rounding: they count as
# equal.
EQUAL = torch.finfo(torch.float32).eps

SumOverRanks = Callable[..., dict[str, float]]


@dataclass(frozen=True, slots=True)
class Shaping:
    """Settings of the shaping. missing_eos_penalty: the reward of a completion that was cut off;
    None: its own. reward_kl_coef: beta, 0: no KL.
    """

    missing_eos_penalty: float | None = None
    reward_kl_coef: float = 0.0
    whiten: str = "none"  # a word of choices.Whiten

    @property
    def any(self) -> bool:
        """Whether rewards are changed at all."""
        return (
            self.missing_eos_penalty is not None
            or self.reward_kl_coef > 0
            or self.whitens("rewards")
        )

    def whitens(self, what: str) -> bool:
        """Whether `what`, "rewards" or "advantages", is whitened."""
        return self.whiten in (what, "both")


@dataclass(frozen=True, slots=True)
class Rewards:
    """The rewards of a group. A completion's reward is the sum of its tokens' rewards."""

    completions: Tensor  # [G] float32; 0 where the completion is not trained on
    tokens: Tensor  # [T] float32; 0 there


def shape(groups: list[Group], shaping: Shaping) -> list[Rewards]:
    """Return the shaped rewards of each group. ValueError for a KL without ref_logprobs.

    All groups are computed end to end: N completions, C tokens.
    """
    if not groups:
        return []
    lengths = end_to_end(groups, "lengths")
    loss_mask = end_to_end(groups, "loss_mask")
    num_completions = len(lengths)
    completion_of = owners(lengths)
    trained = end_to_end(groups, "trained")
    own = torch.where(trained, end_to_end(groups, "rewards").double(), 0)
    scores = own
    if shaping.missing_eos_penalty is not None:
        reasons = chain.from_iterable(g.finish_reasons for g in groups)
        keeps_its_own = _ended(reasons) | ~trained
        scores = torch.where(keeps_its_own, scores, shaping.missing_eos_penalty)
    tokens = torch.zeros(len(completion_of), dtype=torch.float64)
    if shaping.reward_kl_coef > 0:
        if any(g.ref_logprobs.numel() != g.token_ids.numel() for g in groups):
            raise ValueError(
                f"reward_kl_coef={shaping.reward_kl_coef} needs ref_logprobs: reference=frozen, "
                "or 0"
            )
        generator_logprobs = end_to_end(groups, "generator_logprobs").double()
        x = end_to_end(groups, "ref_logprobs") - generator_logprobs
        tokens = torch.where(loss_mask, shaping.reward_kl_coef * x, 0)
    tokens = torch.where(trained[completion_of], tokens, 0)
    completions = scores + sum_by(tokens, completion_of, num_completions)
    # What is for a turn stands at its end, and the rest at the end of all.
    keeps_turns = trained & (scores == own)
    turn_rewards = end_to_end(groups, "turn_rewards").double()
    of_turns = torch.where(keeps_turns[completion_of], turn_rewards, 0)
    tokens = tokens + of_turns
    scores = scores - sum_by(of_turns, completion_of, num_completions)
    is_begun = sum_by(loss_mask.long(), completion_of, num_completions) > 0
    # A completion's last token was sampled, if any was.
    last = lengths.cumsum(0)[is_begun] - 1
    tokens = tokens.index_add(0, last, scores[is_begun])
    by_group = completions.float().split([g.lengths.numel() for g in groups])
    tokens_by_group = tokens.float().split([g.token_ids.numel() for g in groups])
    pairs = zip(by_group, tokens_by_group, strict=True)
    return [Rewards(completions=own_N, tokens=own_C) for own_N, own_C in pairs]


def without_truncated(group: Group) -> Group:
    """Return the group with no loss on completions that were cut off. Their rewards count in its
    mean all the same if its targets are made before, as TRL's mask_truncated_completions has it.
    """
    return replace(group, trained=group.trained & _ended(group.finish_reasons))


def _ended(reasons: Iterable[str]) -> Tensor:
    """Return [N] bool: which completions ended by themselves, from their finish reasons."""
    return torch.tensor([reason == "stop" for reason in reasons], dtype=torch.bool)


def whiten_rewards(
    groups: list[Group], rewards: list[Rewards], *, by_token: bool, total: SumOverRanks
) -> list[Rewards]:
    """Collective: divide rewards by their standard deviation in the batch, over tokens (GAE) or
    completions.

    Means stay: Huang et al. 2024 (the settings of Async RLHF's table 4) leave them for the value
    head, and a mean over a group takes them away anyway. Rewards that are all equal have no
    deviation and stay what they are. total(**values): the sums over ranks.
    """
    of = []
    for r, g in zip(rewards, groups):
        of.append(r.tokens[g.trained_tokens] if by_token else r.completions[g.trained])
    mean, std = moments(of, total)
    if std <= EQUAL * abs(mean):
        return rewards
    unit = std + STD_EPS
    return [Rewards(completions=r.completions / unit, tokens=r.tokens / unit) for r in rewards]


def whiten_advantages(
    advantages: list[Tensor], trained: list[Tensor], *, total: SumOverRanks
) -> list[Tensor]:
    """Collective: return (A - mean) / std over what is trained on all ranks; 0 at the others.

    [T] and [T] bool each, over tokens; or [G] and [G] bool, over completions.
    """
    own = [a[t] for a, t in zip(advantages, trained)]
    mean, std = moments(own, total)
    whitened = [(a.double() - mean) / (std + STD_EPS) for a in advantages]
    return [torch.where(t, w, 0).float() for w, t in zip(whitened, trained)]


def moments(values: list[Tensor], total: SumOverRanks) -> tuple[float, float]:
    """Collective: return the mean and the standard deviation over n - 1 (0 for fewer than two) of
    all ranks' values. Two passes, float64.
    """
    wide = torch.cat([torch.zeros(0), *values]).double()
    sums = total(count=float(wide.numel()), sum=float(wide.sum()))
    mean = sums["sum"] / max(sums["count"], 1.0)
    squares = total(squares=float((wide - mean).square().sum()))["squares"]
    return mean, (squares / max(sums["count"] - 1, 1.0)) ** 0.5


# --- Targets ---


_NO_CRITIC = torch.zeros(0)


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of a group, made of its shaped rewards."""

    rewards: Tensor  # [G] float32, shaped; of no meaning where the completion is not trained on
    advantages: Tensor  # [T] float32
    returns: Tensor = _NO_CRITIC  # [T] float32, what the value head learns; [0] without one
    old_values: Tensor = _NO_CRITIC  # [T] float32, what it said before the step; [0] without one

    @classmethod
    def of(cls, group: Group, advantages: Tensor, rewards: Tensor | None = None) -> Targets:
        """Return the targets that give every token of a completion its completion's advantage
        ([G]).

        rewards [G]: shaped; None: the group's own.
        """
        return cls(
            rewards=group.rewards if rewards is None else rewards,
            advantages=advantages.float().repeat_interleave(group.lengths),
        )


def make_targets(
    groups: list[Group],
    shaping: Shaping,
    *,
    advantages: str,
    critic: Critic | None,
    old_values: Tensor | None,
    minibatches: list[slice],
    ranks: TrainerRanks,
) -> tuple[list[Targets], Row]:
    """Collective: return the targets of this rank's groups, and metrics of the whole batch.

    advantages: a name in ADVANTAGES or "turns", where there is no critic; with one, old_values [C]
    are its values of all tokens. minibatches: which of the groups are trained on together;
    whiten=completions is over each of them, all other whitening over the batch. metrics:
    reward/shaped_mean where rewards are shaped; value/explained_variance of the old values: 1 -
    var(return - value) / var(return), None where the returns are all alike.
    """
    metrics: Row = {}
    rewards = shape(groups, shaping)
    if shaping.whitens("rewards"):
        rewards = whiten_rewards(groups, rewards, by_token=critic is not None, total=ranks.sum)
    if shaping.any:
        valid = [r.completions[g.trained] for r, g in zip(rewards, groups, strict=True)]
        metrics["reward/shaped_mean"] = moments(valid, ranks.sum)[0]
    if critic is None and advantages == "turns":
        targets = [_targets_by_turn(g, r) for g, r in zip(groups, rewards, strict=True)]
    elif critic is None:
        by_completion = _advantages(ADVANTAGES[advantages], groups, rewards)
        if shaping.whitens("completions"):
            # (A - mean A) / std A        (Magistral, 2.1)
            whitened = []
            for minibatch in minibatches:
                trained = [g.trained for g in groups[minibatch]]
                whitened += whiten_advantages(by_completion[minibatch], trained, total=ranks.sum)
            by_completion = whitened
        with_rewards = zip(groups, by_completion, rewards, strict=True)
        targets = [Targets.of(g, own, r.completions) for g, own, r in with_rewards]
    else:
        assert old_values is not None, "a critic has said values before the step"
        targets = _targets_by_token(groups, rewards, critic.settings, old_values)
        metrics["value/explained_variance"] = _explained_variance(groups, targets, ranks)
    if shaping.whitens("advantages"):
        trained = [g.trained_tokens for g in groups]
        whitened = whiten_advantages([t.advantages for t in targets], trained, total=ranks.sum)
        targets = [replace(t, advantages=a) for t, a in zip(targets, whitened)]
    return targets, metrics


def verdict_of(group: Group) -> Verdict:
    """Return what the outcomes of a group say, of its completions that may be trained on."""
    outcomes = group.trained_outcomes.tolist()  # few numbers, for which tensors are slow
    return Verdict(
        num_scored=len(outcomes),
        total=math.fsum(outcomes),
        teaches=len(set(outcomes)) > 1,
        solved=math.fsum(min(max(outcome, 0.0), 1.0) for outcome in outcomes),
    )


def teaching(groups: list[Group], shaping: Shaping) -> list[Group]:
    """Return the groups that teach: two trained completions have different shaped rewards.

    The others have no advantage to learn from: Magistral (2.1) leaves them out of its batches, and
    so out of every mean and deviation.
    """
    kept = []
    for group, rewards in zip(groups, shape(groups, shaping), strict=True):
        if rewards.completions[group.trained].unique().numel() > 1:
            kept.append(group)
    return kept


def _advantages(
    function: Callable[[Tensor, Tensor], Tensor], groups: list[Group], rewards: list[Rewards]
) -> list[Tensor]:
    """Return the advantages [G] of each group's completions; of groups of one size all at once."""
    own = [r.completions for r in rewards]
    trained = [g.trained for g in groups]
    if len({len(completions) for completions in own}) != 1:
        return [function(values, mask) for values, mask in zip(own, trained)]
    return list(function(torch.stack(own), torch.stack(trained)).unbind())


def _targets_by_turn(group: Group, rewards: Rewards) -> Targets:
    """Return targets by what comes from each turn on, all 0 for the tokens that are not trained
    on.
    """
    size = group.lengths.numel()
    completion_of = torch.arange(size).repeat_interleave(group.lengths)
    masks = group.loss_mask.split(group.lengths.tolist())
    ends = torch.cat([torch.zeros(0, dtype=torch.bool), *map(ends_of_turns, masks)])
    # A token's turn is the number of turns that have ended before it.
    ended = ends.long().cumsum(0) - ends.long()
    before = torch.zeros(size + 1, dtype=torch.int64)
    before[1:] = sum_by(ends.long(), completion_of, size).cumsum(0)
    turn_of = ended - before[completion_of]
    num_turns = int(before.diff().max()) if size else 0
    rewards_GK = torch.zeros(size, max(1, num_turns))
    has_turn_GK = torch.zeros(size, max(1, num_turns), dtype=torch.bool)
    trained = group.trained_tokens
    places = (completion_of[trained], turn_of[trained])
    rewards_GK.index_put_(places, rewards.tokens[trained], accumulate=True)
    has_turn_GK[places] = True
    advantages = torch.zeros(group.token_ids.numel())
    advantages[trained] = by_turn(rewards_GK, has_turn_GK)[places].float()
    return Targets(rewards=rewards.completions, advantages=advantages)


def _targets_by_token(
    groups: list[Group], rewards: list[Rewards], settings: CriticSettings, old_values: Tensor
) -> list[Targets]:
    """Return targets by GAE, all 0 for the tokens that are not trained on; old_values [C], 0 for
    these.
    """
    if not groups:
        return []
    sampled_lengths = end_to_end(groups, "sampled_lengths")
    tokens = end_to_end(rewards, "tokens")
    loss_mask = end_to_end(groups, "loss_mask")
    trained = end_to_end(groups, "trained_tokens")
    sizes = [g.token_ids.numel() for g in groups]
    advantages = torch.zeros_like(tokens)
    returns = torch.zeros_like(tokens)
    # Context is no step of the policy: the next step after a turn is the next turn's first token.
    advantages[loss_mask], returns[loss_mask] = gae(
        tokens[loss_mask],
        old_values[loss_mask],
        sampled_lengths,
        gamma=settings.gamma,
        lam=settings.gae_lambda,
    )
    all_3C = torch.where(trained, torch.stack([advantages, returns, old_values]), 0)
    return [
        Targets(
            rewards=own_rewards.completions,
            advantages=own_3T[0],
            returns=own_3T[1],
            old_values=own_3T[2],
        )
        for own_rewards, own_3T in zip(rewards, all_3C.split(sizes, dim=1), strict=True)
    ]


def _explained_variance(
    groups: list[Group], targets: list[Targets], ranks: TrainerRanks
) -> float | None:
    """Collective: return value/explained_variance, see make_targets."""
    returns = []
    errors = []
    for t, g in zip(targets, groups):
        returns.append(t.returns[g.trained_tokens])
        errors.append((t.returns - t.old_values)[g.trained_tokens])
    _, spread = moments(returns, ranks.sum)
    _, error = moments(errors, ranks.sum)
    if not spread > 0:
        return None
    return 1 - (error / spread) ** 2
