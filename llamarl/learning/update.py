"""One step on the taken groups: shape rewards, pack, then N minibatches T times over, each forward,
backward, check, update.

    step (policy version v -> v + 1)
      reference logprobs of every token, no gradient     with a reference of the trainer's own
      old values of every token, no gradient             with a critic
      rewards -> shaped -> advantages                    llamarl.learning.targets, .advantages
      T passes (updates_per_batch) over
        N minibatches (minibatches_per_step) of whole groups, one optimizer update each

The old logprobs of every ratio are generator_logprobs, also in later updates of a step. Nothing
changes before the check of the first update: a step that is aborted (a stop request) or not finite
leaves weights and optimizer as they were. After it the step is finished before a stop is served,
and what is not finite in a later update ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from llamarl.comm.together import TrainerRanks
from llamarl.errors import NotFinite, ParityError
from llamarl.learning.fresh import FreshTokens
from llamarl.learning.logprobs import (
    LateEnds,
    group_to_score,
    label_head,
    label_logprobs,
    to_device,
)
from llamarl.learning.losses.common import has_mark
from llamarl.learning.losses.inputs import Completions, LossInputs
from llamarl.learning.optim import clip_grad_norm, lr_at, set_lr, share_gradients
from llamarl.learning.packing import Packing, pack
from llamarl.learning.samples import StepWatch
from llamarl.learning.step_metrics import (
    Metric,
    Metrics,
    Reduction,
    Row,
    Tally,
    batch_row,
    join,
    lag_histogram,
    metrics_of_loss,
    updates_row,
)
from llamarl.learning.targets import Shaping, Targets, make_targets, teaching, without_truncated
from llamarl.learning.values import Critic
from llamarl.models.build import Decoder
from llamarl.models.decoder import Head
from llamarl.models.fsdp import drop_gradients, next_backward, reshard
from llamarl.models.hf import named_parameters_hf
from llamarl.models.lora import adapters_off
from llamarl.models.parity import ParityLimits
from llamarl.models.routing import Routing
from llamarl.models.sharded_state import Shard, shards_of
from llamarl.types import Group, PackedBatch

Stop = Callable[[], bool]  # whether to give the step up


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
    parity: ParityLimits | None  # None: the generator samples from another distribution on purpose
    decay_steps: int | None = None  # of wsd, in steps; None: the last fifth
    whole_groups: bool = False  # the loss couples the completions of a group
    # Every data-parallel rank is given a share of the same groups, in the same order.
    shares_groups: bool = False
    minibatches_per_step: int = 1
    updates_per_batch: int = 1
    shaping: Shaping = field(default_factory=Shaping)
    filter_groups: bool = False  # groups of equal rewards are taken, and left out of the update
    masks_truncated: bool = False  # completions that were cut off have no loss
    recomputes_kv: bool = False  # the generator's; see FreshTokens
    late_ends: LateEnds | None = None  # what completions could not have when they were sampled
    replays_routes: bool = False  # each token takes the experts by which it was sampled

    @property
    def updates_per_step(self) -> int:
        """The optimizer updates of a step: passes times minibatches."""
        return self.minibatches_per_step * self.updates_per_batch

    def rate(self, version: int, index: int = 0) -> float:
        """Return the fraction, 0 to 1, of the learning rates that an update uses. index: of the
        update in its step.
        """
        updates = self.updates_per_step
        decay_steps = None if self.decay_steps is None else self.decay_steps * updates
        return lr_at(
            version * updates + index,
            lr=1.0,
            schedule=self.schedule,
            warmup_steps=self.warmup_steps * updates,
            max_steps=self.max_steps * updates,
            decay_steps=decay_steps,
        )


@dataclass(frozen=True, slots=True)
class _UpdateId:
    """An update by its step and its number in it, for messages and checks."""

    settings: UpdateSettings
    version: int
    index: int  # of the update within the step
    tickets: list[int]  # of the step, on this rank

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def __str__(self) -> str:
        s = self.settings
        if s.updates_per_step == 1:
            return f"step {self.version}"
        passed, minibatch = divmod(self.index, s.minibatches_per_step)
        return (
            f"step {self.version}, minibatch {minibatch + 1} of {s.minibatches_per_step}, "
            f"pass {passed + 1} of {s.updates_per_batch}"
        )


class PolicyUpdate:
    """Runs steps. Collective over `group` (the trainer's ranks), None for a single rank.

    Ranks that share a tensor-parallel decoder are given the same groups; in sums over ranks they
    count once. A rank's groups are cut into minibatches in the order given, as evenly as they go.
    step_options(step): options of the loss that change from step to step, over those that it has.
    reference: frozen, sharded as the decoder is; says the reference logprobs of groups, which then
    come without. The decoder itself: with its adapters off. watch: is told what each step sees.
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
        reference: Decoder | None = None,
        step_options: Callable[[int], dict[str, float]] = lambda step: {},
        watch: StepWatch | None = None,
    ):
        self.decoder = decoder
        if settings.replays_routes:
            assert decoder.routing is not None, "checks let no dense model through"
            decoder.routing.replays = True
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.settings = settings
        self.critic = critic
        self.reference = reference
        self.step_options = step_options
        self.watch = watch
        self._device = device
        tp = decoder.tensor_parallel
        self._tensor_parallel = tp
        self.ranks = TrainerRanks(group, device, tp)
        self._fresh = FreshTokens(settings.parity, recomputes_kv=settings.recomputes_kv)
        self._shards = shards_of(decoder, named_parameters_hf(decoder))
        shards = self._shards + (critic.shards if critic is not None else [])
        # Those that tensor-parallel ranks all hold.
        self._copied = [s.parameter for s in shards if tp is not None and s.peers is None]
        self._models = [decoder]
        if critic is not None and critic.trunk is not None:
            self._models.append(critic.trunk)

    def run(self, groups: list[Group], version: int, stop: Stop) -> Row:
        """Make step `version` -> version + 1 on this rank's groups. Return its metrics, the same on
        every rank.

        StepAborted if any rank's stop() is true at a microbatch boundary before the first update;
        NotFinite; ParityError.
        """
        s = self.settings
        if self.reference is not None:
            groups = self._with_reference(self.reference, groups, version, stop)
        trained = teaching(groups, s.shaping) if s.filter_groups else groups
        parts = s.minibatches_per_step
        bounds = [len(trained) * i // parts for i in range(parts + 1)]
        cuts = [slice(first, end) for first, end in pairwise(bounds)]
        old_values = None
        if self.critic is not None:
            old_values = self._old_values(self.critic, trained, version, stop)
        targets, of_targets = make_targets(
            trained,
            s.shaping,
            advantages=s.advantages,
            critic=self.critic,
            old_values=old_values,
            minibatches=cuts,
            ranks=self.ranks,
        )
        with_loss = trained
        if s.masks_truncated:
            with_loss = [without_truncated(g) for g in trained]
        minibatches = [self._packed(with_loss[cut], targets[cut]) for cut in cuts]
        tickets = [g.ticket for g in groups]
        updates = []
        for index in range(s.updates_per_step):
            minibatch = minibatches[index % parts]
            update_id = _UpdateId(s, version, index, tickets)
            updates.append(self._update(minibatch, update_id, stop))
        totals = self.ranks.sum(
            room=sum(m.room for m in minibatches),
            unused=sum(m.unused_budget_fraction * m.room for m in minibatches),
            filtered=len(groups) - len(trained),
        )
        unused_share = totals["unused"] / max(1.0, totals["room"])
        row: Row = {
            **updates_row(updates, self.ranks),
            **batch_row(groups, version, self.ranks),
            **of_targets,
            "tokens/trained": sum(m.num_loss_tokens for m in minibatches),
            "packing/unused_budget_fraction": unused_share,
        }
        if s.filter_groups:
            row["groups/filtered"] = totals["filtered"]
        if self.watch is not None:
            first_pass = [update.logprobs for update in updates[:parts]]
            self.watch.see(groups, trained, targets, cuts, first_pass)
        return row

    # --- Before the first update ---

    def _with_reference(
        self, reference: Decoder, groups: list[Group], version: int, stop: Stop
    ) -> list[Group]:
        """Collective: return the groups with ref_logprobs of every completion, by the reference's
        frozen weights without adapters. NotFinite.
        """
        s = self.settings
        alike = []
        for g in groups:
            completions = g.token_ids.split(g.lengths.tolist())
            alike.append(group_to_score(g.prompt_ids, completions))
        logprobs = partial(
            label_logprobs,
            reference,
            device=self._device,
            temperature=s.temperature,
            late_ends=s.late_ends,
        )
        with adapters_off(reference):
            logprobs_C, total = self._of_labels(alike, logprobs, stop)
        if reference is not self.decoder:
            reshard(reference)
        if not math.isfinite(total):
            raise NotFinite(
                f"trainer, step {version}: the reference's logprobs sum to {total}; nothing was "
                "changed. The weights of model.path, or what is computed with them, are not finite"
            )
        sizes = [g.token_ids.numel() for g in groups]
        own_logprobs = logprobs_C.split(sizes)
        return [replace(g, ref_logprobs=own) for g, own in zip(groups, own_logprobs, strict=True)]

    def _old_values(self, critic: Critic, groups: list[Group], version: int, stop: Stop) -> Tensor:
        """Collective: return [C] values of all groups' completion tokens, end to end; 0 for tokens
        that are not trained on. NotFinite.
        """

        def values(microbatch: PackedBatch) -> Tensor:
            return critic.values(self.decoder, *to_device(microbatch, self._device)).cpu()

        values_C, total = self._of_labels(groups, values, stop)
        if not math.isfinite(total):
            raise NotFinite(
                f"trainer, step {version}: the critic's values sum to {total}; nothing was "
                "changed. Lower trainer.value_lr"
            )
        return values_C

    @torch.no_grad()
    def _of_labels(
        self, groups: list[Group], compute: Callable[[PackedBatch], Tensor], stop: Stop
    ) -> tuple[Tensor, float]:
        """Collective: return the results [R] of `compute` for all labels as [C], 0 for the other
        completion tokens, and their sum over all ranks. StepAborted.
        """
        results_C = torch.zeros(sum(g.token_ids.numel() for g in groups))
        # Advantages of 1 keep every trained completion.
        everything = [Targets.of(g, torch.ones_like(g.rewards)) for g in groups]
        for microbatch in self._packed(groups, everything).microbatches:
            self._agree_to_go_on(stop)
            results_C[microbatch.places] = compute(microbatch)
        return results_C, self.ranks.sum(results=float(results_C.sum()))["results"]

    def _packed(self, groups: list[Group], targets: list[Targets]) -> Packing:
        """Collective: pack these groups of this rank, with counts over all ranks."""
        s = self.settings
        packing = pack(
            groups,
            targets,
            budget_tokens=s.microbatch_tokens,
            skip_zero_advantage=s.skip_zero_advantage,
            whole_groups=s.whole_groups,
            largest_over_ranks=self.ranks.max_each if s.shares_groups else None,
        )
        return packing.over(self.ranks)

    # --- One update ---

    def _update(self, minibatch: Packing, update_id: _UpdateId, stop: Stop) -> Tally:
        """Collective: make one optimizer update. StepAborted, NotFinite, ParityError."""
        self._zero_grad()
        if update_id.is_first:
            self._fresh.begin(update_id.version)
        tally = Tally(completions=minibatch.num_completions)
        for i, microbatch in enumerate(minibatch.microbatches, start=1):
            if update_id.is_first:
                self._agree_to_go_on(stop)
            for model in self._models:
                next_backward(model, last=i == len(minibatch.microbatches))
            self._forward_backward(microbatch, minibatch, update_id, tally)
        if update_id.is_first:
            self._agree_to_go_on(stop)
        if self._tensor_parallel is not None and self._copied:
            share_gradients(self._copied, self._tensor_parallel.group)
        tally.checked = self._checked(tally, update_id)
        if update_id.is_first:
            try:
                tally.checked |= self._fresh.checked(str(update_id), self.ranks)
            except ParityError:
                self._zero_grad()
                raise
        rate = self.settings.rate(update_id.version, update_id.index)
        set_lr(self.optimizer, self.settings.lr * rate)
        self.optimizer.step()
        if self.critic:
            self.critic.step(rate)
        return tally

    def _forward_backward(
        self, batch: PackedBatch, minibatch: Packing, update_id: _UpdateId, tally: Tally
    ) -> None:
        """Add a microbatch's share to the gradients and to the tally."""
        s = self.settings
        batch, attention = to_device(batch, self._device)
        head: Head = label_head(
            self.decoder,
            batch,
            temperature=s.temperature,
            late_ends=s.late_ends,
            entropy_grad=has_mark(self.loss_fn, "uses_entropy"),
        )
        if self.critic:
            head = self.critic.beside(head, batch.rows)
        logprobs, entropy, *values = self.decoder(batch.input_ids, batch.positions, attention, head)
        loss, of_loss = self._policy_loss(batch, minibatch, update_id, logprobs, entropy)
        routing = self.decoder.routing
        if routing is not None and batch.labels.numel():
            of_routes, balance = self._of_routes(routing, batch, minibatch)
            of_loss |= of_routes
            loss = loss + balance
        of_critic: Metrics = {}
        if self.critic and values:
            of_values, of_critic = self.critic.loss(values[0], batch, minibatch.num_loss_tokens)
            loss = loss + of_values
        # FSDP averages gradients over data-parallel ranks; the denominator is global already.
        (loss * self.ranks.data_size).backward()
        tally.loss = tally.loss + loss.detach()
        if self.critic and not values:
            # After the policy's backward: the activations of one model are held at a time.
            own_values = self.critic.values(self.decoder, batch, attention)
            of_values, of_critic = self.critic.loss(own_values, batch, minibatch.num_loss_tokens)
            (of_values * self.ranks.data_size).backward()
            tally.loss = tally.loss + of_values.detach()
        differences = logprobs.detach() - batch.generator_logprobs
        if update_id.is_first and batch.labels.numel():
            self._fresh.add(batch, differences)
        if self.watch is not None and update_id.index < s.minibatches_per_step:
            tally.logprobs.append((batch.places, logprobs.detach()))
        tally.log_ratio = tally.log_ratio + differences.sum()
        tally.labels += batch.labels.numel()
        # A filler's one token is computed in vain.
        tally.tokens += batch.input_ids.numel() if batch.labels.numel() else 0
        tally.places += attention.padded_tokens
        lags = lag_histogram(update_id.version - batch.policy_versions)
        sums = {**of_loss, **lags, "entropy": entropy.detach().sum()}
        join(tally.metrics, metrics_of_loss(sums) | of_critic)

    def _of_routes(
        self, routing: Routing, batch: PackedBatch, minibatch: Packing
    ) -> tuple[dict[str, Tensor], Tensor | float]:
        """Return the metrics of a microbatch's routes, as `_policy_loss` does, and its share of the
        load-balancing loss, which counts by trained tokens.
        """
        size = batch.labels.numel()
        metrics = {}
        if not routing.unknown:
            metrics["moe/load_max"] = routing.load_max() * size
        if routing.replays:
            metrics["moe/route_diff"] = routing.differing(batch.rows).sum()
        balance = routing.balance_loss()
        if balance is None:
            return metrics, 0.0
        metrics["moe/balance_loss"] = balance.detach() * size
        return metrics, balance * (size / minibatch.num_loss_tokens)

    def _policy_loss(
        self,
        batch: PackedBatch,
        minibatch: Packing,
        update_id: _UpdateId,
        logprobs: Tensor,
        entropy: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the microbatch's share of the loss, and its metrics
        (llamarl.learning.losses.common).
        """
        completions = Completions(
            index=batch.completions,
            groups=batch.groups,
            rewards=batch.rewards,
            group_tokens=batch.group_tokens,
            num_completions=minibatch.num_completions,
            num_groups=minibatch.num_groups,
            num_trained_groups=minibatch.num_trained_groups,
            sum_over_ranks=self.ranks.total if self.settings.shares_groups else None,
        )
        inputs = LossInputs(
            trainer_logprobs=logprobs,
            generator_logprobs=batch.generator_logprobs,
            ref_logprobs=batch.ref_logprobs if minibatch.has_reference else None,
            entropy=entropy,
            advantages=batch.advantages,
            loss_mask=torch.ones_like(batch.labels, dtype=torch.bool),
            completions=completions,
            num_loss_tokens=minibatch.num_loss_tokens,
        )
        return self.loss_fn(inputs, **self.step_options(update_id.version))

    # --- Checks ---

    def _zero_grad(self) -> None:
        self.optimizer.zero_grad()
        if self.critic:
            self.critic.optimizer.zero_grad()

    def _agree_to_go_on(self, stop: Stop) -> None:
        """Collective: raise StepAborted on all ranks if one wants to stop."""
        if self.ranks.any(stop()):
            self._zero_grad()
            for model in self._models:
                drop_gradients(model)
            raise StepAborted

    def _clipped(self, shards: Sequence[Shard]) -> float:
        """Collective: clip the gradients of these shards. Return their norm before that."""
        parameters = [shard.parameter for shard in shards]
        peers = [shard.peers for shard in shards]
        most = self.settings.max_grad_norm
        return float(clip_grad_norm(parameters, most, tensor_groups=peers))

    def _checked(self, tally: Tally, update_id: _UpdateId) -> Metrics:
        """Collective: return the loss, and the norms of the policy's and the critic's gradients
        before each is clipped. NotFinite.
        """
        norm = self._clipped(self._shards)
        total = self.ranks.sum(loss=float(tally.loss), log_ratio=float(tally.log_ratio))
        found = {"loss/value": total["loss"], "grad_norm": norm}
        if self.critic:
            found["value/grad_norm"] = self._clipped(self.critic.shards)
        if all(map(math.isfinite, (*found.values(), total["log_ratio"]))):
            return {name: Metric(value, Reduction.UPDATE_MEAN) for name, value in found.items()}
        self._zero_grad()
        state = f"the weights are those of version {update_id.version}"
        if not update_id.is_first:
            state = (
                f"{update_id.index} updates of this step are in the weights already; go on from "
                "the last checkpoint (resume=auto)"
            )
        of_values = f" (critic: {found['value/grad_norm']})" if self.critic else ""
        raise NotFinite(
            f"trainer, {update_id}: loss {total['loss']}, gradient norm {norm}{of_values}, sum of "
            f"log ratios {total['log_ratio']}; {state}. Tickets on this rank: "
            f"{update_id.tickets[:8]}. Lower lr, or loss.ratio_cap, or look at these groups' "
            "logprobs"
        )
