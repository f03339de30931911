"""The published losses, random microbatches for their tests, and slow views for oracles."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from omegaconf import OmegaConf
from torch import Tensor

from llamarl.config.command_line import CONF_DIR
from llamarl.learning.losses import LOSSES
from llamarl.learning.losses.common import Loss
from llamarl.learning.losses.inputs import Completions, LossInputs

# What `loss=NAME` sets in the section `loss`.
SECTIONS = {
    file.stem: OmegaConf.to_container(OmegaConf.load(file).loss)
    for file in sorted((CONF_DIR / "loss").glob("*.yaml"))
}


def published(name: str) -> Loss:
    """The loss that `loss=NAME` chooses, with its options."""
    options = dict(SECTIONS[name])
    fn = LOSSES[options.pop("fn")]
    del options["name"]
    return functools.partial(fn, **options)


PUBLISHED = {name: published(name) for name in SECTIONS}


def inputs_of(
    trainer_logprobs: Tensor,
    generator_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    num_loss_tokens: float,
    entropy: Tensor | None = None,
    completions: Completions | None = None,
) -> LossInputs:
    """A loss's inputs; all labels are of one completion, and the entropy is 0, unless given."""
    if completions is None:
        completions = one_completion(trainer_logprobs.numel())
    if entropy is None:
        entropy = torch.zeros_like(trainer_logprobs).detach()
    return LossInputs(
        trainer_logprobs=trainer_logprobs,
        generator_logprobs=generator_logprobs,
        ref_logprobs=ref_logprobs,
        entropy=entropy,
        advantages=advantages,
        loss_mask=loss_mask,
        completions=completions,
        num_loss_tokens=num_loss_tokens,
    )


def one_completion(num_labels: int) -> Completions:
    """That of all labels of a microbatch, alone in its group and in the batch."""
    return Completions(
        index=torch.zeros(num_labels, dtype=torch.int64),
        groups=torch.zeros(1, dtype=torch.int64),
        rewards=torch.zeros(1),
        group_tokens=torch.tensor([float(num_labels)]),
        num_completions=1.0,
        num_groups=0.0,
        num_trained_groups=1.0,
    )


@dataclass(frozen=True)
class Problem:
    """A loss's tensors [T], float64, about a quarter of the labels masked; `completions` as the
    learner would give them.
    """

    pi: Tensor
    mu: Tensor
    ref: Tensor
    advantages: Tensor
    mask: Tensor
    completions: Completions
    num_loss_tokens: float

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.pi, self.mu, self.ref, self.advantages, self.mask

    def inputs(self, entropy: Tensor | None = None) -> LossInputs:
        return inputs_of(
            *self.tensors,
            num_loss_tokens=self.num_loss_tokens,
            entropy=entropy,
            completions=self.completions,
        )

    def call(self, fn, entropy: Tensor | None = None, **options):
        """(loss, metrics) of the microbatch."""
        return fn(self.inputs(entropy), **options)

    def gradient(self, fn, **options) -> Tensor:
        return torch.autograd.grad(self.call(fn, **options)[0], self.pi)[0]

    def labels(self, completion: int) -> Tensor:
        """The trained labels of a completion."""
        return ((self.completions.index == completion) & self.mask).nonzero().flatten()

    def members(self) -> list[list[int]]:
        """The trained completions of each group."""
        groups = self.completions.groups.tolist()
        found = []
        for k in range(max(groups) + 1):
            found.append([j for j, g in enumerate(groups) if g == k and len(self.labels(j))])
        return found

    def part(self, chosen: list[int]) -> Problem:
        """The microbatch that holds these completions of it; its denominators stay those of the
        batch.
        """
        kept = torch.tensor([int(c) in chosen for c in self.completions.index], dtype=torch.bool)
        order = {c: i for i, c in enumerate(sorted(chosen))}
        c = self.completions
        groups = c.groups[torch.tensor(sorted(chosen), dtype=torch.int64)]
        return Problem(
            *(t[kept] for t in self.tensors),
            replace(
                c,
                index=torch.tensor([order[int(i)] for i in c.index[kept]], dtype=torch.int64),
                groups=groups.unique(return_inverse=True)[1],
                rewards=c.rewards[torch.tensor(sorted(chosen), dtype=torch.int64)],
                group_tokens=c.group_tokens[torch.tensor(sorted(chosen), dtype=torch.int64)],
            ),
            self.num_loss_tokens,
        )


def problem(sizes=(3, 2, 4), seed=0, spread=1.0) -> Problem:
    """Groups of these sizes; logprobs of the three policies `spread` nats apart at most, advantages
    the same over a completion.
    """
    random = torch.Generator().manual_seed(seed)
    n = sum(sizes)
    lengths = torch.randint(1, 5, (n,), generator=random)
    index = torch.arange(n).repeat_interleave(lengths)
    size = index.numel()
    pi = -0.1 - torch.rand(size, generator=random, dtype=torch.float64)
    mu, ref = pi + spread * (torch.rand(2, size, generator=random, dtype=torch.float64) - 0.5)
    mask = torch.rand(size, generator=random) < 0.75
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    trained = torch.zeros(n, dtype=torch.bool).scatter(0, index[mask], True)
    of_group = [int((trained & (groups == g)).sum()) for g in range(len(sizes))]
    labels_of_group = torch.zeros(len(sizes)).index_add(0, groups[index], mask.float())
    completions = Completions(
        index=index,
        groups=groups,
        rewards=torch.randn(n, generator=random, dtype=torch.float64),
        group_tokens=labels_of_group[groups],
        num_completions=float(trained.sum()),
        num_groups=float(sum(n >= 2 for n in of_group)),
        num_trained_groups=float(sum(n >= 1 for n in of_group)),
    )
    advantages = torch.randn(n, generator=random, dtype=torch.float64)[index]
    return Problem(pi.requires_grad_(), mu, ref, advantages, mask, completions, float(mask.sum()))
