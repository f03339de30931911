"""FSDPTrainer: takes the groups of a step, makes its optimizer updates, publishes the new weights,
and checkpoints when that is due.

loop step  consumes              waits for                  unblocked by
take       groups in the buffer  a finished set for step v  groups from the reward; the ledger
                                 room for its weights       the generators' receipt of older ones
train      that batch            -                          -
begin, end -                     the other trainer ranks    what these share with other executors
publish    -                     a free staging slot        the generators' receipt of older weights
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal

import torch

from llamarl.comm.channel import dp_rank_of
from llamarl.ddma.channel import send_reset, sender_of, senders_of
from llamarl.ddma.sender import WeightsSender
from llamarl.executor import Executor
from llamarl.inference.agreement import check_agreement
from llamarl.learning.buffer import GroupBuffer
from llamarl.learning.logprobs import canary_of
from llamarl.learning.samples import SampleMaker, StepWatch
from llamarl.learning.step_metrics import measured
from llamarl.learning.targets import verdict_of
from llamarl.learning.trained_model import TrainedModel, TrainedModelSettings
from llamarl.learning.update import PolicyUpdate, StepAborted, UpdateSettings
from llamarl.learning.values import CriticSettings, load_critic
from llamarl.models.build import Decoder
from llamarl.models.fsdp import local
from llamarl.models.loading import frozen_decoder
from llamarl.models.parity import Prompts, canary_sequences, marks_of
from llamarl.types import Group, Policy, ReferencePolicy

SHORT_S = 0.02  # a shorter wait for data does not count as one

log = logging.getLogger(__name__)

# Below this share of lr a step may be too small to change the generator's weights, so equal weights
# are no error.
LEAST_RATE = 0.01


@dataclass(kw_only=True, eq=False, repr=False)
class FSDPTrainer(Executor):
    """Trains the policy. Policy version v means that v steps (batches taken) are in the weights;
    step v makes version v + 1, in one update or several.

    replicate: copies of the model, each sharded over an equal share of the ranks. tensor_parallel:
    ranks, one after another, that share each layer and train on the same groups.
    own_reference: computes the reference logprobs of groups that come without them: with the
    decoder's adapters off, or with a frozen copy of the starting weights in the exported dtype,
    sharded like the policy.
    step_options(step): options of the loss that change from step to step.
    samples: makes of a step what people look at; None: nothing is kept for them.
    resets_reference(version): whether the reference takes that version's weights. shares_replicas:
    replicas of the generator take turns with it, on ranks that it has too. canary_prompts,
    canary_top: see llamarl.models.parity.
    evaluate_at(version): whether that version must be evaluated; checkpoint_at(version): whether to
    checkpoint it.
    """

    name = "trainer"
    consumes = (Group,)
    produces = (Policy,)
    offers = (ReferencePolicy,)
    takes_by_rank = True
    leads = True
    split_vocabulary = False  # the loss needs the whole head

    model_settings: TrainedModelSettings
    replicate: int = 1
    tensor_parallel: int = 1
    loss_fn: Callable
    settings: UpdateSettings
    buffer: GroupBuffer
    canary_prompts: Prompts
    canary_top: int
    evaluate_at: Callable[[int], bool]
    checkpoint_at: Callable[[int], bool]
    critic_settings: CriticSettings | None = None
    own_reference: Literal["none", "adapters_off", "sharded"] | None = None
    step_options: Callable[[int], dict[str, float]] = lambda step: {}
    samples: SampleMaker | None = None
    resets_reference: Callable[[int], bool] = lambda version: False
    shares_replicas: bool = False

    def __post_init__(self):
        self.stages_on_host = self.model_settings.cpu_offload
        self.version = 0
        self.done = False
        self._is_at_end = False  # nothing is left but the last save
        self._taken: list[int] | None = None  # the tickets of a step that has not begun
        self._published = -1
        self._frozen: list[torch.nn.Parameter] = []  # parameters of the trainer's own reference
        self._wait_since = time.monotonic()

    @staticmethod
    def adapt_decoder(decoder: Decoder) -> None:
        """Override this to change the decoder's forward: hooks on its modules, or other modules in
        their places that keep the parameters' names. Called once for the policy and once for a
        reference of the trainer's own, after the weights are loaded.

        Generator and Reference have the same method, and must make the same change: the generator
        samples from what the trainer scores.
        """

    # --- Life ---

    def setup(self) -> None:
        """Load the model, and make what trains it. Collective over the trainer's ranks."""
        self.model = TrainedModel(
            self.model_settings, self.group, lr=self.settings.lr, adapt=self.adapt_decoder
        )
        check_agreement(
            self.model.decoder,
            self.model_settings.path,
            self.group.device,
            getattr(torch, self.model_settings.compute_dtype),
        )
        self.critic = None
        if self.critic_settings is not None:
            self.critic = load_critic(self.critic_settings, self.model, self.group)
        reference = None
        if self.own_reference == "adapters_off":
            reference = self.model.decoder
        elif self.own_reference == "sharded":
            reference = self._load_reference()
        # The run's leader, which writes what is kept, so that no message is needed.
        is_watched = self.samples is not None and self.group.index == 0
        self._watch = StepWatch() if is_watched else None
        self._update = PolicyUpdate(
            self.model.decoder,
            self.model.optimizer,
            self.loss_fn,
            self.settings,
            group=self.group.process_group if self.group.size > 1 else None,
            device=self.group.device,
            critic=self.critic,
            reference=reference,
            step_options=self.step_options,
            watch=self._watch,
        )
        self.buffer.attach(self._update.ranks)
        self.weights = sender_of(self.outputs)
        for weights in self._senders:
            weights.bind(
                self.model.decoder.config, self.model.named_parameters, self.group.tensor_group
            )

    @property
    def _senders(self) -> list[WeightsSender]:
        """The sending ends of its channels of weights."""
        return [*senders_of(self.outputs, Policy), *senders_of(self.outputs, ReferencePolicy)]

    @property
    def _sender_to_reference(self) -> WeightsSender:
        return sender_of(self.outputs, ReferencePolicy)

    def _load_reference(self) -> Decoder:
        reference = frozen_decoder(
            self.model_settings.path,
            mesh=self.group.data_mesh(),
            device=self.group.device,
            dtype=getattr(torch, self.model_settings.dtype),
            tensor_parallel=self.model.decoder.tensor_parallel,
            cpu_offload=self.model_settings.cpu_offload,
            made_by=self.model_settings.made_by,
        )
        self.adapt_decoder(reference)
        self._frozen = list(reference.parameters())
        return reference

    def step(self) -> bool:
        """Take the groups of a step and train on them, publish a version, or save and end. Return
        whether anything was done. Collective over the trainer's ranks once a step begins.
        """
        arrived = self._receive()
        if self._published < self.version:
            self._publish(must_differ=False)
            return True
        if self.done:
            return arrived
        # Read this before taking, because the leader announces its last batch before its stop.
        stopping = self.control.stopping
        is_last = self.version >= self.settings.max_steps
        if self._taken is None and not is_last and (stopping or self._has_room()):
            has_waited = time.monotonic() - self._wait_since > SHORT_S
            self._taken = self.tickets.take(self.version, waited=has_waited)
        if self._taken is not None:
            if self.shares_replicas and not self.checkpoints.may_begin(self.version, self):
                return arrived
            tickets, self._taken = self._taken, None
            self._train(tickets)
            return True
        self._is_at_end = stopping or is_last
        if self._is_at_end and self.checkpoints.may_end(self.version, self):
            self._finish()
            return True
        return arrived

    def _has_room(self) -> bool:
        """Whether the weights of this step can be staged at once.

        A step must not wait for that, because a generator on this rank could not take earlier
        versions in meanwhile.
        """
        resets = self.resets_reference(self.version + 1)
        if resets and not self._sender_to_reference.has_room():
            return False
        return self.weights.has_room()

    def waiting_for(self) -> str | None:
        """Return what it waits for, in words that begin with the cause: begin, end, weights or
        data; None once it is done.
        """
        if self.done:
            return None
        if self._is_at_end or self._taken is not None:
            place = "end" if self._is_at_end else "begin"
            return (
                f"{place}: all trainer ranks, {list(self.group.ranks)}, to come to the {place} of "
                f"step {self.version} with all that they share"
            )
        if self.version < self.settings.max_steps and not self._has_room():
            return f"weights: not all versions before {self.version} have been received"
        return (
            f"data: the groups of step {self.version} ({len(self.buffer)} here) from the reward; "
            f"{self.tickets.waits_for()}"
        )

    # --- One step ---

    def _receive(self) -> bool:
        """Move groups that have come into the buffer, and tell the ledger. True if any came."""
        groups = self.inputs.of(Group).take()
        if groups:
            self.buffer.put(groups)
            verdicts = {g.ticket: verdict_of(g) for g in groups}
            self.tickets.finish([g.ticket for g in groups], verdicts)
        self.buffer.drop(self.tickets.given_back())
        return bool(groups)

    def _train(self, tickets: list[int]) -> None:
        """Make one step on the groups of these tickets, publish its version and report its row."""
        self.claim_device()
        waited_s = time.monotonic() - self._wait_since
        groups = self.buffer.take(tickets, self.version)
        try:
            row = self._update.run(groups, self.version, self._is_given_up)
        except StepAborted:
            self.buffer.untake(groups)
            self.tickets.untake(self.version)
            self._finish()
            return
        options = self.step_options(self.version)
        reported: dict[str, float | None] = {f"loss/{n}": value for n, value in options.items()}
        ranks = self._update.ranks  # collective
        if senders_of(self.outputs, ReferencePolicy):
            newest = max((g.ref_version for g in groups), default=0)
            reported["reference/version"] = ranks.max(version=newest)["version"]
        reported |= self.buffer.metrics(ranks)
        reported |= self.tickets.yield_row()
        self.version += 1
        reward = row["reward/mean"] if row["tokens/trained"] else None
        self.tickets.trained(math.nan if reward is None else reward)
        stall_s = self._publish(must_differ=self._must_differ(measured(row, "grad_norm")))
        if self.resets_reference(self.version):
            send_reset(self._sender_to_reference, self.version, self.control)
        if self.group.index == 0:
            self.metrics.report(
                self.version,
                {
                    **row,
                    **reported,
                    "policy_version": self.version,
                    "tickets/overcommit": self.tickets.overcommit,
                    "time/wait_for_data_s": waited_s,
                    "time/step_s": time.monotonic() - self._wait_since,
                    "weights/publish_stall_s": stall_s,
                    "weights/bytes": self.weights.bytes_per_sync,
                },
            )
        if self.samples is not None and self._watch is not None:
            seen = self._watch.take()
            make = partial(self.samples.sample, seen, self.version)
            self.metrics.keep_sample(self.version, make)
        if self.checkpoint_at(self.version) and self.version < self.settings.max_steps:
            self.checkpoints.save(self.version, self)
        self._wait_since = time.monotonic()

    def _is_given_up(self) -> bool:
        """Whether the step should end here, without an update. Called between two microbatches;
        also takes in groups that have come, which may make room for tickets.
        """
        self._receive()
        return self.control.ending

    def _must_differ(self, grad_norm: float) -> bool:
        """Whether the step that made this version must show in the generator's weights.

        Equal rewards leave a gradient of rounding alone, below the optimizer's eps; and a
        schedule's last rates may be too small for the generator's dtype.
        """
        is_above_rounding = grad_norm > self.model_settings.adam.eps
        return is_above_rounding and self.settings.rate(self.version - 1) > LEAST_RATE

    def _publish(self, *, must_differ: bool) -> float:
        """Publish the present version. Return the seconds that this held the rank up."""
        self.claim_device()
        sequences = canary_sequences(self.canary_prompts, self.version, first=self._published < 0)
        stall_s = self.weights.publish(
            self.version,
            evaluate=self.evaluate_at(self.version),
            must_differ=must_differ,
            canary=lambda: dataclasses.replace(
                canary_of(
                    self.model.decoder,
                    sequences,
                    self.group.device,
                    temperature=self.settings.temperature,
                    top=self.canary_top,
                ),
                marks=marks_of(self.model.shards, self.version),
            ).to_json(),
        )
        self._published = self.version
        return stall_s

    def _finish(self) -> None:
        """Save the last checkpoint: at a stop request, or after the last step."""
        self.claim_device()
        self.checkpoints.save(self.version, self, is_last=True)
        self.done = True

    # --- Checkpoints ---

    def state_dict(self) -> dict:
        """Return this rank's part of the model, the critic and the buffer."""
        is_first_peer = self.group.tensor_index == 0
        state = {"version": self.version, **self.model.state_dict()}
        state |= self.buffer.state_dict() if is_first_peer else {"buffered": []}
        if self.critic and self.group.replica == 0:
            state |= self.critic.state_dict(is_first_peer=is_first_peer)
        return state

    @torch.no_grad()
    def load_state_dict(self, parts: Iterable[Mapping]) -> None:
        """Load from all saved parts, however many ranks saved them: each rank takes the rows and
        groups that belong to it now.

        ValueError if it was saved with other adapters, or from a model of other shapes.
        """
        self.claim_device()
        parts = list(parts)
        self.model.load_state_dict(parts)
        self.version = int(parts[0]["version"])
        if self.critic:
            self.critic.resume(parts)
        buffered = list(chain.from_iterable(part["buffered"] for part in parts))
        g = self.group
        self.buffer.load(
            parts,
            self.tickets.reconcile(buffered),
            lambda ticket: dp_rank_of(ticket, g.data_size) == g.data_index,
        )
        self._published = -1

    @property
    def export_bytes(self) -> int:
        """Return about how many bytes `export` writes."""
        return self.model.export_bytes

    def export(self, out: str | None) -> None:
        """Collective over the first replica: write the policy, see TrainedModel.export."""
        self.model.export(out)

    def offloadable(self) -> list[torch.Tensor]:
        """Return weights, their average and the optimizer's moments. Gradients do not outlive a
        step.
        """
        tensors = [*self.model.tensors(), *map(local, self._frozen)]
        if self.critic:
            tensors += self.critic.offloadable()
        return tensors

    def teardown(self) -> None:
        """Close the channels of weights."""
        if hasattr(self, "outputs"):
            for weights in self._senders:
                weights.close()
