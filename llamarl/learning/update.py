"""One step on the taken groups: shape rewards, pack, then N minibatches T times over, each forward,
backward, check, update.

    step (policy version v -> v + 1)
      old values of every token, no gradient             with a value head
      rewards -> shaped -> advantages                    llamarl.learning.shaping, .advantages, .values
      T passes (updates_per_batch) over
        N minibatches (minibatches_per_step) of whole groups, one optimizer update each

The old logprobs of every ratio are generator_logprobs, also in later updates of a step. Nothing
changes before the check of the first update: a step that is aborted (a stop request) or not finite
leaves weights and optimizer as they were. After it the step is finished before a stop is served,
and what is not finite in a later update ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from llamarl.errors import NotFinite, ParityError
from llamarl.learning.lags import lag_histogram
from llamarl.learning.logprobs import make_head
from llamarl.learning.losses.common import needs_entropy_gradient
from llamarl.learning.losses.inputs import Completions, LossInputs
from llamarl.learning.optim import clip_grad_norm, lr_at, set_lr, share_gradients
from llamarl.learning.packing import Packing, Targets, filler, pack, to_device
from llamarl.learning.reduction import Ranks
from llamarl.learning.shaping import Shaping
from llamarl.learning.step_metrics import batch_sums, metrics_of
from llamarl.learning.targets import make_targets, with_signal
from llamarl.learning.values import Critic, value_loss
from llamarl.models.attention import PackedAttention
from llamarl.models.build import Decoder
from llamarl.models.fsdp import drop_gradients, is_split, next_backward
from llamarl.models.heads import only_values, with_values
from llamarl.models.hf import named_parameters_hf
from llamarl.models.parity import Canary, Sequence
from llamarl.models.sharding import span
from llamarl.types import Group, PackedBatch


class StepAborted(Exception):
    """A stop request ended the step before it changed anything."""


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """Plain values of a step. Learning rate, warm-up and max_steps are in steps; the rate changes
    with every update of one.
    """

    lr: float
    schedule: str
    warmup_steps: int
    max_steps: int
    microbatch_tokens: int
    max_grad_norm: float | None  # None: not clipped
    temperature: float
    advantages: str  # a name in ADVANTAGES; not used with a critic, whose advantages are GAE's
    skip_zero_advantage: bool
    parity_tolerance: (
        float | None
    )  # None: do not compare (the generator truncates its distribution)
    decay_steps: int | None = None  # of wsd, in steps; None: the last fifth
    whole_groups: bool = False  # the loss couples the completions of a group
    minibatches_per_step: int = 1
    updates_per_batch: int = 1
    shaping: Shaping = field(default_factory=Shaping)
    filter_groups: bool = False  # groups of equal rewards are taken, and left out of the update
    # The generator computes its K/V cache anew under new weights; else a completion that began
    # under older ones goes on with theirs, and its logprobs are not the trainer's.
    recomputes_kv: bool = False


@dataclass(frozen=True, slots=True)
class _Minibatch:
    """This rank's microbatches of an update, and what counts the update over all ranks."""

    packing: Packing
    num_microbatches: int  # the most that a rank has
    num_loss_tokens: float
    num_completions: float
    num_groups: float
    num_trained_groups: float
    has_reference: bool


@dataclass(frozen=True, slots=True)
class _At:
    """Which update of which step."""

    version: int
    index: int  # of the update within the step
    minibatches: int
    passes: int
    tickets: list[int]  # of the step, on this rank

    @property
    def first(self) -> bool:
        return self.index == 0

    def __str__(self) -> str:
        if self.minibatches * self.passes == 1:
            return f"step {self.version}"
        done, place = divmod(self.index, self.minibatches)
        return f"step {self.version}, minibatch {place + 1} of {self.minibatches}, pass {done + 1} of {self.passes}"


class PolicyUpdate:
    """Runs steps. Collective over `group` (the trainer's ranks), None for a single rank.

    Ranks that share a tensor-parallel decoder are given the same groups; in sums over ranks they
    count once. A rank's groups are cut into minibatches in the order given, as evenly as they go.
    step_options(step): options of the loss that change from step to step, over those that it has.
    """

    def __init__(
        self,
        decoder: Decoder,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable,
        settings: UpdateSettings,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device,
        critic: Critic | None = None,
        step_options: Callable[[int], dict[str, float]] = lambda step: {},
    ):
        self.decoder, self.optimizer, self.loss_fn, self.settings = (
            decoder,
            optimizer,
            loss_fn,
            settings,
        )
        self.critic, self.step_options, self._device = critic, step_options, device
        tp = decoder.tensor_parallel
        self._ranks = Ranks(group, device, tp)
        split = [
            tp is not None and is_split(decoder, name) for name, _ in named_parameters_hf(decoder)
        ]
        self._tensor_groups = [tp.group if s else None for s in split]
        self._copied = [p for p, s in zip(decoder.parameters(), split, strict=True) if tp and not s]
        self._copied += critic.parameters if tp and critic else []

    def run(
        self, groups: list[Group], version: int, stop: Callable[[], bool]
    ) -> dict[str, float | None]:
        """Step `version` -> version + 1 on this rank's groups. Returns the step's metrics, the same
        on every rank.

        StepAborted if any rank's stop() is true at a microbatch boundary before the first update;
        NotFinite; ParityError.
        """
        s = self.settings
        n = s.minibatches_per_step
        trained = with_signal(groups, s.shaping) if s.filter_groups else groups
        spans = [span(len(trained), i, n) for i in range(n)]
        cuts = [slice(first, first + count) for first, count in spans]
        old_values = self._old_values(groups, version, stop) if self.critic else None
        targets, of_targets = make_targets(
            trained,
            s.shaping,
            advantages=s.advantages,
            critic=self.critic,
            old_values=old_values,
            minibatches=cuts,
            ranks=self._ranks,
        )
        if s.filter_groups:
            left_out = len(groups) - len(trained)
            of_targets["groups/filtered"] = self._ranks.sum(groups=float(left_out))["groups"]
        packings = [self._packed(trained[cut], targets[cut]) for cut in cuts]
        minibatches, totals, maxima = self._counted(groups, packings, version)
        totals |= {"_rows": 0.0, "_trained": 0.0}
        norms = []
        for index in range(n * s.updates_per_batch):
            at = _At(version, index, n, s.updates_per_batch, [g.ticket for g in groups])
            sums, tops, norm = self._update(minibatches[index % n], at, stop)
            totals["_trained"] += minibatches[index % n].num_completions
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + value
            for name, value in tops.items():
                maxima[name] = max(maxima.get(name, value), value)
            norms.append(norm)
        return {**metrics_of(totals, maxima, norms), **of_targets}

    @torch.no_grad()
    def canary(self, sequences: list[Sequence], *, top: int = 0) -> Canary:
        """Collective: what the weights, as they are, say of these sequences. top: likeliest tokens
        to keep at each place.
        """
        sizes = torch.tensor([len(s.token_ids) - 1 for s in sequences])
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
        positions = torch.cat([torch.arange(int(n)) for n in sizes]).to(self._device)
        ids = torch.cat([torch.tensor(s.token_ids[:-1]) for s in sequences]).to(self._device)
        labels = torch.cat([torch.tensor(s.token_ids[s.given :]) for s in sequences]).to(
            self._device
        )
        places = torch.cat(
            [
                positions.new_tensor(range(s.given - 1, len(s.token_ids) - 1)) + int(a)
                for s, a in zip(sequences, cu_seqlens)
            ]
        )
        logits_SV = self.decoder(
            ids,
            positions,
            PackedAttention(cu_seqlens.to(self._device)),
            lambda h_TD, w_VD: F.linear(h_TD[places], w_VD),
        )
        logprobs_SV = (logits_SV.float() / (self.settings.temperature or 1.0)).log_softmax(1)
        likeliest = logprobs_SV.topk(min(top, logprobs_SV.shape[1]), dim=1)
        scored = logprobs_SV.gather(1, labels[:, None]).squeeze(1)
        top_ids, top_logprobs = (
            x.tolist() if top else [] for x in (likeliest.indices, likeliest.values)
        )
        return Canary(sequences, scored.tolist(), top_ids, top_logprobs)

    @torch.no_grad()
    def _old_values(self, groups: list[Group], version: int, stop: Callable[[], bool]) -> Tensor:
        """Collective: [C] values of all groups' completion tokens, end to end; 0 of those that are
        not trained on. NotFinite.
        """
        nothing = [Targets.of(g, torch.zeros(g.lengths.numel())) for g in groups]
        packing = pack(
            groups,
            nothing,
            budget_tokens=self.settings.microbatch_tokens,
            drop_zero_advantage=False,
        )
        out = torch.zeros(sum(g.token_ids.numel() for g in groups))
        most = self._ranks.reduce({}, {"_": float(len(packing.microbatches))})[1]["_"]
        for i in range(int(most)):
            self._agree_to_go_on(stop)
            mine = i < len(packing.microbatches)
            batch = to_device(packing.microbatches[i] if mine else filler(), self._device)
            attention = PackedAttention(batch.cu_seqlens, batch.parents)
            values = self.decoder(
                batch.input_ids,
                batch.positions,
                attention,
                only_values(self.critic.head, batch.rows),
            )
            if mine:
                out[packing.places[i]] = values.cpu()
        if not math.isfinite(total := self._ranks.sum(values=float(out.sum()))["values"]):
            raise NotFinite(
                f"trainer, step {version}: the value head's values sum to {total}; nothing was changed. Lower trainer.value_lr"
            )
        return out

    def _packed(self, groups: list[Group], targets: list[Targets]) -> Packing:
        s = self.settings
        return pack(
            groups,
            targets,
            budget_tokens=s.microbatch_tokens,
            drop_zero_advantage=s.skip_zero_advantage,
            whole_groups=s.whole_groups,
        )

    def _counted(
        self, groups: list[Group], packings: list[Packing], version: int
    ) -> tuple[list[_Minibatch], dict[str, float], dict[str, float]]:
        """Collective: the minibatches, and the sums and maxima of the whole batch over all ranks.

        groups: all that the step took, also those that are left out of the packings.
        """
        sums = {
            **batch_sums(groups, version),
            "tokens/trained": float(sum(p.num_loss_tokens for p in packings)),
        }
        budgets = [len(p.microbatches) * self.settings.microbatch_tokens for p in packings]
        unused = [p.unused_budget_fraction * budget for p, budget in zip(packings, budgets)]
        sums |= {"_budget": float(sum(budgets)), "_unused": float(sum(unused))}
        maxima = {
            "lag/max": float(
                max((version - g.oldest_version for g in groups if g.token_ids.numel()), default=0)
            )
        }
        counts: dict[str, float] = {}
        for i, p in enumerate(packings):
            counts |= {
                f"tokens/{i}": p.num_loss_tokens,
                f"completions/{i}": p.num_completions,
                f"groups/{i}": p.num_groups,
                f"trained_groups/{i}": p.num_trained_groups,
            }
            maxima |= {
                f"_microbatches/{i}": float(len(p.microbatches)),
                f"_reference/{i}": float(p.has_reference),
            }
        totals, maxima = self._ranks.reduce(
            {**sums, **{f"_{k}": float(v) for k, v in counts.items()}}, maxima
        )
        minibatches = [
            _Minibatch(
                packing=p,
                num_microbatches=int(maxima.pop(f"_microbatches/{i}")),
                num_loss_tokens=totals.pop(f"_tokens/{i}"),
                num_completions=totals.pop(f"_completions/{i}"),
                num_groups=totals.pop(f"_groups/{i}"),
                num_trained_groups=totals.pop(f"_trained_groups/{i}"),
                has_reference=maxima.pop(f"_reference/{i}") > 0,
            )
            for i, p in enumerate(packings)
        ]
        return minibatches, totals, maxima

    # -- one update
    # ---------------------------------------------------------------------------------------------------

    def _update(
        self, minibatch: _Minibatch, at: _At, stop: Callable[[], bool]
    ) -> tuple[dict[str, float], dict[str, float], float]:
        """Collective: one optimizer update. Returns sums and maxima of its metrics over all ranks,
        and the gradient's norm.
        """
        s, packing = self.settings, minibatch.packing
        self._zero_grad()
        local_sums: dict[str, Tensor] = {}
        local_maxima: dict[str, Tensor] = {}
        for i in range(minibatch.num_microbatches):
            if at.first:
                self._agree_to_go_on(stop)
            # A rank with fewer microbatches than its peers takes part in their collectives with an
            # empty one.
            batch = packing.microbatches[i] if i < len(packing.microbatches) else None
            next_backward(self.decoder, last=i + 1 == minibatch.num_microbatches)
            self._forward_backward(batch, minibatch, at, local_sums, local_maxima)
        if at.first:
            self._agree_to_go_on(stop)
        norm, value_norm = self._checked_norms(local_sums, at)
        sums, maxima = self._ranks.reduce(
            {name: float(v) for name, v in local_sums.items()},
            {name: float(v) for name, v in local_maxima.items()},
        )
        if at.first:
            self._check_parity(maxima, at)
        updates = at.minibatches * at.passes
        factor = lr_at(
            at.version * updates + at.index,
            lr=1.0,
            schedule=s.schedule,
            warmup_steps=s.warmup_steps * updates,
            max_steps=s.max_steps * updates,
            decay_steps=s.decay_steps and s.decay_steps * updates,
        )
        set_lr(self.optimizer, s.lr * factor)
        self.optimizer.step()
        if self.critic:
            self.critic.step(factor)
            sums["value/grad_norm"] = value_norm
        return sums, maxima, norm

    def _forward_backward(
        self,
        batch: PackedBatch | None,
        minibatch: _Minibatch,
        at: _At,
        sums: dict[str, Tensor],
        maxima: dict[str, Tensor],
    ) -> None:
        batch = to_device(batch or filler(), self._device)
        loss, stats = self._loss(batch, minibatch, at)
        # FSDP averages gradients over data-parallel ranks; the denominator is global already.
        (loss * self._ranks.data_size).backward()
        for name, value in {**stats, "loss/value": loss.detach()}.items():
            if name.endswith("/max"):
                maxima[name] = torch.maximum(maxima.get(name, value), value)
            else:
                sums[name] = sums.get(name, 0) + value

    def _loss(
        self, batch: PackedBatch, minibatch: _Minibatch, at: _At
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This microbatch's share of the update's loss, and of its metrics."""
        head = make_head(
            batch.labels,
            batch.rows,
            temperature=self.settings.temperature,
            entropy_grad=needs_entropy_gradient(self.loss_fn),
        )
        if self.critic:
            head = with_values(head, self.critic.head, batch.rows)
        attention = PackedAttention(batch.cu_seqlens, batch.parents)
        logprobs, entropy, *values = self.decoder(batch.input_ids, batch.positions, attention, head)
        every = torch.ones_like(batch.labels, dtype=torch.bool)
        completions = Completions(
            index=batch.completions,
            groups=batch.groups,
            rewards=batch.rewards,
            group_tokens=batch.group_tokens,
            num_completions=minibatch.num_completions,
            num_groups=minibatch.num_groups,
            num_trained_groups=minibatch.num_trained_groups,
        )
        inputs = LossInputs(
            trainer_logprobs=logprobs,
            generator_logprobs=batch.generator_logprobs,
            ref_logprobs=batch.ref_logprobs if minibatch.has_reference else None,
            entropy=entropy,
            advantages=batch.advantages,
            loss_mask=every,
            completions=completions,
            num_loss_tokens=minibatch.num_loss_tokens,
        )
        loss, stats = self.loss_fn(inputs, **self.step_options(at.version))
        stats = {
            **stats,
            **lag_histogram(at.version - batch.policy_versions),
            "entropy": entropy.detach().sum(),
            "_rows": torch.tensor(float(logprobs.numel())),
            "_places": torch.tensor(float(attention.padded_tokens)),
            # A filler's one token is computed in vain.
            "_tokens": torch.tensor(float(batch.input_ids.numel() if batch.labels.numel() else 0)),
        }
        # A loss may mask what is not finite, or not look at it; it is a broken batch all the same.
        stats["_log_ratio"] = (logprobs.detach() - batch.generator_logprobs).sum()
        if self.critic:
            c = self.critic.settings
            of_values, more = value_loss(
                values[0],
                batch.old_values,
                batch.returns,
                every,
                value_clip=c.clip,
                num_loss_tokens=minibatch.num_loss_tokens,
            )
            loss = loss + c.coef * of_values
            stats |= {**more, "value/loss": of_values.detach()}
        if at.first:
            fresh = self._is_fresh(batch, at.version)
            difference = (
                (logprobs.detach() - batch.generator_logprobs).abs().masked_fill(~fresh, -1.0)
            )
            stats["parity/max"] = difference.max() if logprobs.numel() else torch.tensor(-1.0)
        return loss, stats

    def _is_fresh(self, batch: PackedBatch, version: int) -> Tensor:
        """[R] bool: sampled by these weights from what these weights made of all before it."""
        if self.settings.recomputes_kv:
            return batch.policy_versions == version
        # Versions never fall within a completion: one that began under this one is of it alone.
        begun = torch.full_like(batch.groups, version).scatter_reduce(
            0, batch.completions, batch.policy_versions, "amin"
        )
        return begun[batch.completions] == version

    # -- checks
    # -------------------------------------------------------------------------------------------------------

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic:
            self.critic.optimizer.zero_grad(set_to_none=True)

    def _agree_to_go_on(self, stop: Callable[[], bool]) -> None:
        """Collective. StepAborted on all ranks if one wants to stop."""
        if self._ranks.any(stop()):
            self._zero_grad()
            drop_gradients(self.decoder)
            raise StepAborted

    def _checked_norms(self, sums: dict[str, Tensor], at: _At) -> tuple[float, float]:
        """Collective: the norms of the policy's and the value head's gradients, before each is
        clipped. NotFinite.
        """
        if self._copied:
            share_gradients(self._copied, self.decoder.tensor_parallel.group)
        most = self.settings.max_grad_norm
        norm = float(
            clip_grad_norm(self.decoder.parameters(), most, tensor_groups=self._tensor_groups)
        )
        value_norm = float(clip_grad_norm(self.critic.parameters, most)) if self.critic else 0.0
        total = self._ranks.sum(
            **{name: float(sums.get(name, 0.0)) for name in ("loss/value", "_log_ratio")}
        )
        loss, log_ratio = total["loss/value"], total["_log_ratio"]
        if not all(map(math.isfinite, (norm, value_norm, loss, log_ratio))):
            self._zero_grad()
            state = f"the weights are those of version {at.version}"
            if not at.first:
                state = f"{at.index} updates of this step are in the weights already; go on from the last checkpoint (resume=auto)"
            of_values = f" (value head: {value_norm})" if self.critic else ""
            raise NotFinite(
                f"trainer, {at}: loss {loss}, gradient norm {norm}{of_values}, sum of log ratios {log_ratio}; {state}. "
                f"Tickets on this rank: {at.tickets[:8]}. Lower lr, or loss.ratio_cap, or look at these groups' logprobs"
            )
        return norm, value_norm

    def _check_parity(self, maxima: dict[str, float], at: _At) -> None:
        worst, allowed = maxima.get("parity/max", -1.0), self.settings.parity_tolerance
        if allowed is not None and not worst <= allowed:  # NaN too
            self._zero_grad()
            raise ParityError(
                f"trainer, {at}: on tokens sampled from version {at.version} alone, trainer and generator logprobs differ by "
                f"{worst:.4g}, more than {allowed:g}. The generator's weights or its sampling (temperature, top-k, top-p) are not the "
                "trainer's; raise trainer.parity_tolerance only if the dtype explains it"
            )

    def over_ranks(
        self, sums: dict[str, float], maxima: dict[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Collective: sums and maxima over the trainer's ranks."""
        return self._ranks.reduce(sums, maxima)
