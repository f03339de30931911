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
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal

import torch

from llamarl.comm.channel import dp_rank_of
from llamarl.ddma.channel import send_reset, sender_of, senders_of
from llamarl.ddma.sender import WeightsSender
from llamarl.executor import Executor
from llamarl.learning.buffer import GroupBuffer
from llamarl.learning.ema import WeightAverage
from llamarl.learning.optim import build_optimizer, settle_moments
from llamarl.learning.samples import SampleMaker, StepWatch
from llamarl.learning.targets import verdict_of
from llamarl.learning.update import PolicyUpdate, StepAborted, UpdateSettings
from llamarl.learning.values import Critic, CriticSettings, OwnCritic, SharedCritic
from llamarl.models.build import Decoder
from llamarl.models.config import Lora
from llamarl.models.frozen import frozen_decoder
from llamarl.models.fsdp import held_box, is_split, local, whole_parameters
from llamarl.models.hf import export
from llamarl.models.lora import travelling
from llamarl.models.parity import Prompts, canary_sequences, marks_of
from llamarl.models.peft import export_adapted, load_adapter
from llamarl.models.sharded_state import (
    Shard,
    load_shards,
    optimizer_tensors,
    set_steps,
    steps_of,
)
from llamarl.models.sharding import Box, adapter_shapes, num_parameters, parameter_shapes
from llamarl.models.tp import TensorParallel
from llamarl.models.training import training_decoder
from llamarl.types import Group, Policy, ReferencePolicy

SHORT_S = 0.02  # a shorter wait for data does not count as one
EMA = "_ema"  # ends the name of the exported directory with the averaged weights
_SAVED_AS = {"weights": "model/", "moments": ""}  # prefixes, see llamarl.models.sharded_state

log = logging.getLogger(__name__)

# Below this share of lr a step may be too small to change the generator's weights, so equal weights
# are no error.
LEAST_RATE = 0.01


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """AdamW's own knobs; see build_optimizer."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    kind: str = "adamw"


@dataclass(kw_only=True, eq=False, repr=False)
class FSDPTrainer(Executor):
    """Trains the policy. Policy version v means that v steps (batches taken) are in the weights;
    step v makes version v + 1, in one update or several.

    replicate: copies of the model, each sharded over an equal share of the ranks. tensor_parallel:
    ranks, one after another, that share each layer and train on the same groups. lora: train
    adapters alone. adapter_path: a PEFT directory that they start as; None: as a product of 0.
    critic_path: directory from which a separate value model starts; None: the critic is a head on
    the policy's trunk. critic_seed: draws that model's head if the directory has none.
    ema_decay: keep an exponential moving average of the weights, and export it too.
    own_reference: computes the reference logprobs of groups that come without them: with the
    decoder's adapters off, or with a frozen copy of the starting weights in model_dtype, sharded
    like the policy.
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

    model_path: str
    model_dtype: str
    compute_dtype: str
    replicate: int = 1
    tensor_parallel: int = 1
    activation_checkpointing: bool
    cpu_offload: bool = False
    loss_fn: Callable
    settings: UpdateSettings
    buffer: GroupBuffer
    adam: AdamSettings
    canary_prompts: Prompts
    canary_top: int
    evaluate_at: Callable[[int], bool]
    checkpoint_at: Callable[[int], bool]
    critic_settings: CriticSettings | None = None
    critic_path: str | None = None
    critic_seed: int = 0
    own_reference: Literal["none", "adapters_off", "sharded"] | None = None
    lora: Lora | None = None
    adapter_path: str | None = None
    ema_decay: float | None = None
    step_options: Callable[[int], dict[str, float]] = lambda step: {}
    samples: SampleMaker | None = None
    resets_reference: Callable[[int], bool] = lambda version: False
    shares_replicas: bool = False

    def __post_init__(self):
        self.stages_on_host = self.cpu_offload
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
        """Load the decoder, and make what trains it. Collective over the trainer's ranks."""
        if self.cpu_offload and self.group.device.type == "cpu":
            log.warning(
                "trainer.cpu_offload: this trainer computes on a CPU, so its weights are in host "
                "memory already; leave it out"
            )
        self.decoder = self._load_decoder(self.model_path, lora=self.lora)
        if self.adapter_path is not None:
            load_adapter(self.decoder, self.adapter_path)
        self.adapt_decoder(self.decoder)
        # What is trained, saved and sent.
        self._shards = [
            Shard(name, p, held_box(self.decoder, name, p)) for name, p in travelling(self.decoder)
        ]
        # Listed now, because after a forward FSDP shows its root's gathered parameters.
        self._all_parameters = list(self.decoder.parameters())
        trained = [shard.parameter for shard in self._shards]
        self.optimizer = self._optimizer_of(trained, self.settings.lr)
        critic = self.critic_settings
        self.critic = None if critic is None else self._load_critic(critic)
        self._reference = None
        if self.own_reference == "adapters_off":
            self._reference = self.decoder
        elif self.own_reference == "sharded":
            self._reference = self._load_reference()
        self._average = None
        if self.ema_decay is not None:
            self._average = WeightAverage(trained, self.optimizer, self.ema_decay)
        # The run's leader, which writes what is kept, so that no message is needed.
        is_watched = self.samples is not None and self.group.index == 0
        self._watch = StepWatch() if is_watched else None
        self._update = PolicyUpdate(
            self.decoder,
            self.optimizer,
            self.loss_fn,
            self.settings,
            group=self.group.process_group if self.group.size > 1 else None,
            device=self.group.device,
            critic=self.critic,
            reference=self._reference,
            step_options=self.step_options,
            watch=self._watch,
        )
        self.buffer.attach(self._update.ranks)
        self.weights = sender_of(self.outputs)
        for weights in self._senders:
            weights.bind(self.decoder.config, travelling(self.decoder), self.group.tensor_group)

    @property
    def _senders(self) -> list[WeightsSender]:
        """The sending ends of its channels of weights."""
        return [*senders_of(self.outputs, Policy), *senders_of(self.outputs, ReferencePolicy)]

    @property
    def _sender_to_reference(self) -> WeightsSender:
        return sender_of(self.outputs, ReferencePolicy)

    def _optimizer_of(
        self, parameters: Iterable[torch.nn.Parameter], lr: float
    ) -> torch.optim.Optimizer:
        return build_optimizer(parameters, lr=lr, **dataclasses.asdict(self.adam))

    def _load_critic(self, settings: CriticSettings) -> Critic:
        if self.critic_path is None:
            return SharedCritic(
                self.decoder.config.hidden_size,
                settings,
                betas=self.adam.betas,
                eps=self.adam.eps,
                mesh=self.group.data_mesh(),
                device=self.group.device,
            )
        trunk = self._load_decoder(self.critic_path, score_seed=self.critic_seed)
        return OwnCritic(trunk, settings, self._optimizer_of(trunk.parameters(), settings.lr))

    def _load_decoder(
        self, path: str, *, lora: Lora | None = None, score_seed: int | None = None
    ) -> Decoder:
        return training_decoder(
            path,
            mesh=self.group.data_mesh(),
            device=self.group.device,
            compute_dtype=getattr(torch, self.compute_dtype),
            activation_checkpointing=self.activation_checkpointing,
            tensor_parallel=self._peers(),
            lora=lora,
            cpu_offload=self.cpu_offload,
            score_seed=score_seed,
        )

    def _load_reference(self) -> Decoder:
        reference = frozen_decoder(
            self.model_path,
            mesh=self.group.data_mesh(),
            device=self.group.device,
            dtype=getattr(torch, self.model_dtype),
            tensor_parallel=self._peers(),
            cpu_offload=self.cpu_offload,
        )
        self.adapt_decoder(reference)
        self._frozen = list(reference.parameters())
        return reference

    def _peers(self) -> TensorParallel | None:
        return TensorParallel.of(self.group, split_vocabulary=self.split_vocabulary)

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
            result = self._update.run(groups, self.version, self._is_given_up)
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
        self.tickets.trained(result.mean_reward if result.num_trained_tokens else math.nan)
        stall_s = self._publish(must_differ=self._must_differ(result.grad_norm))
        if self.resets_reference(self.version):
            send_reset(self._sender_to_reference, self.version, self.control)
        if self.group.index == 0:
            self.metrics.report(
                self.version,
                {
                    **result.metrics,
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
        return grad_norm > self.adam.eps and self.settings.rate(self.version - 1) > LEAST_RATE

    def _publish(self, *, must_differ: bool) -> float:
        """Publish the present version. Return the seconds that this held the rank up."""
        self.claim_device()
        sequences = canary_sequences(self.canary_prompts, self.version, first=self._published < 0)
        stall_s = self.weights.publish(
            self.version,
            evaluate=self.evaluate_at(self.version),
            must_differ=must_differ,
            canary=lambda: dataclasses.replace(
                self._update.canary(sequences, top=self.canary_top),
                marks=marks_of(self._shards, self.version),
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
        """Return this rank's shard: trained weights (float32) and their average, Adam's moments,
        the critic's, the buffer; and which part of the model they are.

        If several ranks hold the same tensor, only the first of them stores it.
        """
        is_first_peer = self.group.tensor_index == 0
        is_first_replica = self.group.replica == 0
        state: dict = {
            "boxes": {},
            "version": self.version,
            "lora": self._lora_state(),
            "adam_step": steps_of(self.optimizer),
        }
        state |= self.buffer.state_dict() if is_first_peer else {"buffered": []}
        if not is_first_replica:
            return state
        if self.critic:
            state |= self.critic.state_dict(is_first_peer=is_first_peer)
        for shard in self._shards:
            if not is_first_peer and not is_split(self.decoder, shard.name):
                continue
            state["boxes"][shard.name] = [shard.box.offsets, shard.box.lengths]
            state |= shard.state(self.optimizer, **_SAVED_AS)
            if self._average:
                state[f"ema/{shard.name}"] = local(self._average.of(shard.parameter))
        return state

    @torch.no_grad()
    def load_state_dict(self, parts: Iterable[Mapping]) -> None:
        """Load from all saved parts, however many ranks saved them: each rank takes the rows and
        groups that belong to it now.

        ValueError if it was saved with other adapters, or from a model of other shapes.
        """
        self.claim_device()
        parts = list(parts)
        for part in parts:
            self._check_adapters(part)
            self.version = int(part["version"])
        config = self.decoder.config
        shapes = parameter_shapes(config) | adapter_shapes(config)
        load_shards(self._shards, parts, shapes=shapes, take=self._load_shard)
        settle_moments(self.optimizer)
        parameters = [shard.parameter for shard in self._shards]
        set_steps(self.optimizer, parameters, float(parts[0]["adam_step"]))
        if self.critic:
            self._load_critic_state(self.critic, parts)
        names = chain.from_iterable(parts)
        if self._average and not any(name.startswith("ema/") for name in names):
            log.warning(
                "the checkpoint holds no average of the weights: it starts again from the weights "
                "of version %d",
                self.version,
            )
            self._average.restart()
        buffered = list(chain.from_iterable(part["buffered"] for part in parts))
        g = self.group
        self.buffer.load(
            parts,
            self.tickets.reconcile(buffered),
            lambda ticket: dp_rank_of(ticket, g.data_size) == g.data_index,
        )
        self._published = -1

    def _load_shard(self, shard: Shard, part: Mapping, theirs: Box) -> None:
        shard.load(part, theirs, self.optimizer, **_SAVED_AS)
        averaged = f"ema/{shard.name}"
        if self._average and averaged in part:
            shard.copy_overlap(self._average.of(shard.parameter), part, averaged, theirs)

    def _load_critic_state(self, critic: Critic, parts: Sequence[Mapping]) -> None:
        """Load the critic. ValueError if a value model's weights are missing; a missing head starts
        at 0.
        """
        missing = critic.load_state_dict(parts)
        if missing and critic.trunk is not None:
            raise ValueError(
                f"the checkpoint lacks {missing} elements of this rank's value model "
                "(trainer.critic.trunk=own): it was saved without one, or with another"
            )
        if missing:
            message = "the checkpoint has no value head: this run's starts at 0"
            warnings.warn(message, stacklevel=2)

    def _check_adapters(self, part: Mapping) -> None:
        """Raise ValueError if a saved part has other adapters."""
        if part.get("lora") != self._lora_state():
            raise ValueError(
                f"the checkpoint was saved with trainer.lora={part.get('lora')}, this run has "
                f"{self._lora_state()}: resume with the same, or start a run of its own from the "
                "checkpoint's hf/ with model.path"
            )

    @property
    def export_bytes(self) -> int:
        """Return about how many bytes `export` writes."""
        copies = 2 if self._average else 1
        element_bytes = getattr(torch, self.model_dtype).itemsize
        return num_parameters(self.decoder.config) * element_bytes * copies

    def export(self, out: str | None) -> None:
        """Collective over the first replica: write the policy as a Hugging Face directory, and its
        average as OUT_ema if there is one.

        Rank 0 writes, one whole tensor at a time; nothing if out is None. OSError or
        SafetensorError from the disk is raised once both are gathered, so that no other rank is
        left waiting in a collective.
        """
        if self.group.replica > 0:
            return
        try:
            self._write(lambda p: p, out)
        finally:
            if self._average:
                self._write(self._average.of, None if out is None else out + EMA)

    def _write(self, value: Callable[[torch.nn.Parameter], torch.Tensor], out: str | None) -> None:
        """Write value(p) in each trained parameter's place."""
        weights = ((shard.name, value(shard.parameter)) for shard in self._shards)
        with whole_parameters(self.decoder, weights) as whole:
            if out is None or self.group.index > 0:
                return
            dtype = getattr(torch, self.model_dtype)
            if self.lora is None:
                export(whole, self.model_path, out, dtype=dtype)
            else:
                export_adapted(dict(whole), self.lora, self.model_path, out, dtype=dtype)

    def _lora_state(self) -> dict | None:
        """Return the adapters' settings as they come back from JSON; None without adapters."""
        if not self.lora:
            return None
        return {**dataclasses.asdict(self.lora), "targets": sorted(self.lora.targets)}

    def offloadable(self) -> list[torch.Tensor]:
        """Return weights, their average and the optimizer's moments. Gradients do not outlive a
        step.
        """
        self.optimizer.zero_grad(set_to_none=True)
        own = [*self._all_parameters, *self._frozen, *optimizer_tensors(self.optimizer)]
        tensors = [local(tensor) for tensor in own]
        if self.critic:
            tensors += self.critic.offloadable()
        if self._average:
            tensors += self._average.tensors()
        return tensors

    def teardown(self) -> None:
        """Close the channels of weights."""
        if hasattr(self, "outputs"):
            for weights in self._senders:
                weights.close()
