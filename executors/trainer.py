"""FSDPTrainer: takes the groups of a step, makes its optimizer updates, publishes the new weights,
checkpoints when due.

loop step    consumes                     waits for                          unblocked by
take         groups in the buffer         a finished set for step v          groups from the reward; the ledger
                                          room for its weights               the generators' receipt of older weights
train        that batch                   -                                  -
publish      -                            a free staging slot                the generators' receipt of older weights
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from llamarl.checkpoint.parts import box_of
from llamarl.comm.channel import dp_rank_of
from llamarl.ddma.channel import REFERENCE_WEIGHTS, RESET
from llamarl.executor import Executor
from llamarl.learning.buffer import GroupBuffer
from llamarl.learning.ema import WeightAverage
from llamarl.learning.optim import MOMENTS, build_optimizer, moment, moment_scale, settle_moments
from llamarl.learning.update import PolicyUpdate, StepAborted, UpdateSettings
from llamarl.learning.values import Critic, CriticSettings
from llamarl.models.fsdp import (
    held_box,
    is_split,
    local,
    whole_parameters,
)
from llamarl.models.hf import export, named_parameters_hf
from llamarl.models.lora import Lora, PolicyWeights
from llamarl.models.parity import Prompts, canary_sequences
from llamarl.models.sharding import Box, overlap, parameter_shapes
from llamarl.models.tp import TensorParallel
from llamarl.models.training import training_decoder
from llamarl.types import Group

EMA = "_ema"  # behind the name of an exported directory: the averaged weights
_OTHER_MODEL = ": it is another model's; resume with the model.path that it was trained from"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """AdamW's own knobs; see build_optimizer."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    kind: str = "adamw"


class FSDPTrainer(Executor):
    """Policy version v is the number of steps, of batches taken, in the weights; step v makes v +
    1, in one update or several.

    replicate: copies of the model, each sharded over an equal share of the ranks. tensor_parallel:
    ranks, one after another, that share each layer and train on the same groups. lora: train
    adapters alone; generators, a reference that is reset and directories get merged weights.
    ema_decay: keep an exponential moving average of the weights, and export it too.
    step_options(step): options of the loss that change from step to step.
    resets_reference(version): whether the reference takes that version's weights. canary_prompts,
    canary_top: see llamarl.models.parity. evaluate_at(version): whether that version must be
    evaluated; checkpoint_at(version): whether to checkpoint it.
    """

    name = "trainer"
    leads = True

    def __init__(
        self,
        *,
        model_path: str,
        model_dtype: str,
        compute_dtype: str,
        replicate: int = 1,
        tensor_parallel: int = 1,
        activation_checkpointing: bool,
        cpu_offload: bool = False,
        loss_fn: Callable,
        update: UpdateSettings,
        buffer: GroupBuffer,
        adam: AdamSettings,
        canary_prompts: Prompts,
        canary_top: int,
        evaluate_at: Callable[[int], bool],
        checkpoint_at: Callable[[int], bool],
        critic: CriticSettings | None = None,
        lora: Lora | None = None,
        ema_decay: float | None = None,
        step_options: Callable[[int], dict[str, float]] = lambda step: {},
        resets_reference: Callable[[int], bool] = lambda version: False,
    ):
        self.model_path, self.model_dtype, self.compute_dtype = (
            model_path,
            model_dtype,
            compute_dtype,
        )
        self.replicate, self.tensor_parallel = replicate, tensor_parallel
        self.activation_checkpointing, self.loss_fn, self.settings, self.adam = (
            activation_checkpointing,
            loss_fn,
            update,
            adam,
        )
        self.lora, self.ema_decay, self.cpu_offload = lora, ema_decay, cpu_offload
        self.stages_on_host = cpu_offload
        self.canary_prompts, self.canary_top, self.critic_settings = (
            canary_prompts,
            canary_top,
            critic,
        )
        self.evaluate_at, self.checkpoint_at = evaluate_at, checkpoint_at
        self.step_options, self.resets_reference = step_options, resets_reference
        self.version = 0
        self.buffer = buffer
        self.done = False
        self._published = -1
        self._wait_since = time.monotonic()

    # -- life
    # ---------------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        g = self.group
        if self.cpu_offload and g.device.type == "cpu":
            log.warning(
                "trainer.cpu_offload: this trainer computes on a CPU, so its weights are in host memory anyway"
            )
        parts = TensorParallel(
            g.tensor_index, g.tensor_parallel, g.tensor_group, split_vocabulary=False
        )
        self.decoder = training_decoder(
            self.model_path,
            mesh=self.group.data_mesh(),
            device=self.group.device,
            compute_dtype=getattr(torch, self.compute_dtype),
            activation_checkpointing=self.activation_checkpointing,
            tensor_parallel=parts if parts.size > 1 else None,
            lora=self.lora,
            cpu_offload=self.cpu_offload,
        )
        # What is trained and saved, adapters and no frozen weights; and what the policy is to
        # everybody else.
        self._parameters = [
            (name, p) for name, p in named_parameters_hf(self.decoder) if p.requires_grad
        ]
        self._policy = PolicyWeights(self.decoder)
        self._shards = list(
            self.decoder.parameters()
        )  # as they are now: after a forward FSDP shows its root's gathered ones
        a = self.adam
        self.optimizer = build_optimizer(
            [p for _, p in self._parameters],
            lr=self.settings.lr,
            betas=(a.beta1, a.beta2),
            eps=a.eps,
            weight_decay=a.weight_decay,
            kind=a.kind,
        )
        self.critic = self._build_critic() if self.critic_settings else None
        self._average = None
        if self.ema_decay is not None:
            self._average = WeightAverage(
                (p for _, p in self._parameters), self.optimizer, self.ema_decay
            )
        self._update = PolicyUpdate(
            self.decoder,
            self.optimizer,
            self.loss_fn,
            self.settings,
            group=self.group.process_group if self.group.size > 1 else None,
            device=self.group.device,
            critic=self.critic,
            step_options=self.step_options,
        )
        self.weights = self.outputs["policy"]
        self.weights.bind(self.decoder.config, self._policy.parameters, self.group.tensor_group)
        self.reference_weights = self.outputs.get(REFERENCE_WEIGHTS)
        if self.reference_weights is not None:
            self.reference_weights.bind(
                self.decoder.config, self._policy.parameters, self.group.tensor_group
            )

    def _build_critic(self) -> Critic:
        return Critic(
            self.decoder.config.hidden_size,
            self.critic_settings,
            betas=(self.adam.beta1, self.adam.beta2),
            eps=self.adam.eps,
            mesh=self.group.data_mesh(),
            device=self.group.device,
        )

    def step(self) -> bool:
        arrived = self._receive()
        if self._published < self.version:
            self._publish(must_differ=False)
            return True
        if self.done:
            return arrived
        stopping = (
            self.control.stopping
        )  # looked at first: the leader's last batch is told before its word to stop
        tickets = None
        if self.version < self.settings.max_steps and (stopping or self._has_room()):
            tickets = self.tickets.take(
                self.version, waited=time.monotonic() - self._wait_since > 0.02
            )
        if tickets is not None:
            self._train(tickets)
            return True
        if stopping or self.version >= self.settings.max_steps:
            self._finish()
            return True
        return arrived

    def _has_room(self) -> bool:
        """Whether the weights of this step can leave.

        A step that waited for that would keep this rank's own generator from taking earlier ones
        in.
        """
        resets = self.reference_weights is not None and self.resets_reference(self.version + 1)
        return self.weights.has_room() and (not resets or self.reference_weights.has_room())

    def waiting_for(self) -> str | None:
        if self.done:
            return None
        if self.version < self.settings.max_steps and not self._has_room():
            return f"weights: the receipt of those before version {self.version} by the generators"
        return f"data: the groups of step {self.version} ({len(self.buffer)} here) from the reward; {self.tickets.waits_for()}"

    # -- one step
    # -----------------------------------------------------------------------------------------------------

    def _receive(self) -> bool:
        groups = [g for name in self.inputs for g in self.inputs[name].take()]
        if groups:
            self.buffer.put(groups)
            self.tickets.finish([g.ticket for g in groups])
        return bool(groups)

    def _train(self, tickets: list[int]) -> None:
        self.claim_device()
        began = time.monotonic()
        waited_s = began - self._wait_since
        groups = self.buffer.take(tickets, self.version)
        try:
            result = self._update.run(groups, self.version, lambda: self.control.ending)
        except StepAborted:
            self.buffer.untake(groups)
            self.tickets.untake(self.version)
            self._finish()
            return
        reported = self._reported(groups)
        self.version += 1
        self.tickets.trained(result.mean_reward if result.num_trained_tokens else math.nan)
        stall_s = self._publish(must_differ=result.grad_norm > 0)
        self._reset_reference()
        if self.group.index == 0:
            self.metrics.report(
                self.version,
                {
                    **result.metrics,
                    **reported,
                    "policy_version": self.version,
                    "tickets/overcommit": self.tickets.overcommit,
                    "time/wait_for_data_s": waited_s,
                    "time/step_s": time.monotonic() - began + waited_s,
                    "weights/publish_stall_s": stall_s,
                    "weights/bytes": self.weights.bytes_per_sync,
                },
            )
        if self.checkpoint_at(self.version) and self.version < self.settings.max_steps:
            self.checkpoints.save(self.version, self)
        self._wait_since = time.monotonic()

    def _reported(self, groups: list[Group]) -> dict[str, float | None]:
        """Metrics of the buffer, of scheduled options and of the reference. Collective where they
        need all ranks.
        """
        out: dict[str, float | None] = {
            f"loss/{name}": value for name, value in self.step_options(self.version).items()
        }
        ranks = self._update.ranks
        if self.reference_weights is not None:
            newest = max((g.ref_version for g in groups), default=0)
            out["reference/version"] = ranks.max(version=float(newest))["version"]
        sums, maxima = self.buffer.sums(self.version)
        if sums:
            out |= self.buffer.report(ranks.sum(**sums), ranks.max(**maxima))
        return out

    def _reset_reference(self) -> None:
        """Send these weights to the reference if it is to take them. Mail tells of it, in order
        with that of checkpoints.
        """
        if self.reference_weights is None or not self.resets_reference(self.version):
            return
        self.reference_weights.publish(self.version, must_load=True, must_differ=False)
        for rank in self.reference_weights.receivers if self.control.is_leader else ():
            self.control.post(rank, RESET, {"version": self.version})

    def _publish(self, *, must_differ: bool) -> float:
        self.claim_device()
        sequences = canary_sequences(self.canary_prompts, first=self._published < 0)
        self._policy.refresh()
        stall_s = self.weights.publish(
            self.version,
            evaluate=self.evaluate_at(self.version),
            must_differ=must_differ,
            canary=lambda: self._update.canary(sequences, top=self.canary_top).to_json(),
        )
        self._published = self.version
        return stall_s

    def _finish(self) -> None:
        """The last checkpoint: at a stop request, or after the last step."""
        self.claim_device()
        self.checkpoints.save(self.version, self)
        self.done = True

    # -- checkpoints
    # ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """This rank's shard: trained weights (float32) and their average, Adam's moments, the value
        head, the buffer; and which part of the model they are.

        What several ranks hold is stored by the first of them alone.
        """
        tensors: dict[str, torch.Tensor] = {}
        boxes: dict[str, list] = {}
        first_peer = self.group.tensor_index == 0
        for name, p in self._parameters if self.group.replica == 0 else []:
            if not (first_peer or is_split(self.decoder, name)):
                continue
            box = held_box(self.decoder, name, p)
            boxes[name] = [box.offsets, box.lengths]
            tensors[f"model/{name}"] = local(p)
            if self._average:
                tensors[f"ema/{name}"] = local(self._average.of(p))
            state = self.optimizer.state.get(p, {})
            for key in MOMENTS:
                if key in state:
                    tensors[f"{key}/{name}"] = moment(state[key])
                    if (scale := moment_scale(state[key])) is not None:
                        tensors[f"{key}_scale/{name}"] = scale
        steps = [float(s["step"]) for s in self.optimizer.state.values()]
        return {
            **tensors,
            **(
                self.critic.state_dict()
                if self.critic and first_peer and self.group.replica == 0
                else {}
            ),
            **(self.buffer.state_dict() if first_peer else {"buffered": []}),
            "boxes": boxes,
            "version": self.version,
            "lora": self._lora_state(),
            "adam_step": steps[0] if steps else 0.0,
        }

    @torch.no_grad()
    def load_state_dict(self, parts: Iterable[dict]) -> None:
        """From all ranks' parts, whatever their number was: each rank takes the rows and the groups
        that are its own now.

        ValueError if it was saved with other adapters than this run's, or from a model of other
        shapes.
        """
        self.claim_device()
        stored, adam_step, has_values, averaged = [], 0.0, False, False
        missing = {
            name: held_box(self.decoder, name, p).numel for name, p in self._parameters
        }  # elements
        for part in parts:
            if part.get("lora") != self._lora_state():
                raise ValueError(
                    f"the checkpoint was saved with trainer.lora={part.get('lora')}, this run has {self._lora_state()}: resume with "
                    "the same, or start a run of its own from the checkpoint's hf/ with model.path"
                )
            averaged |= any(key.startswith("ema/") for key in part)
            self.version, adam_step = int(part["version"]), float(part["adam_step"])
            self._check_fits(part["boxes"])
            for name, p in self._parameters:
                missing[name] -= self._load_box(p, name, part)
            has_values |= self.critic is not None and self.critic.load_state_dict(part)
            stored.append(part)
        if absent := [name for name, elements in missing.items() if elements]:
            raise ValueError(
                f"the checkpoint lacks {', '.join(absent[:5])}, or parts of it, which this run's model has{_OTHER_MODEL}"
            )
        settle_moments(self.optimizer)
        for _, p in self._parameters if adam_step else []:
            self.optimizer.state[p]["step"] = torch.tensor(adam_step, device=p.device)
        if self.critic and not has_values:
            warnings.warn("the checkpoint has no value head: this run's starts at 0", stacklevel=2)
        if self._average and not averaged:
            log.warning(
                "the checkpoint holds no average of the weights: it starts again from the weights of version %d",
                self.version,
            )
            self._average.restart()
        finished = self.tickets.reconcile(
            [ticket for part in stored for ticket in part["buffered"]]
        )
        self.buffer.load(stored, finished, self._is_mine)
        self._published = -1

    def _is_mine(self, ticket: int) -> bool:
        return dp_rank_of(ticket, self.group.data_size) == self.group.data_index

    def _check_fits(self, boxes: dict[str, list]) -> None:
        """ValueError if a saved part is of tensors that this model does not have, or of larger
        ones.
        """
        shapes, known = parameter_shapes(self.decoder.config), dict(self._parameters)
        for name, (offsets, lengths) in boxes.items():
            shape = shapes.get(name) or (tuple(known[name].shape) if name in known else None)
            if (
                shape is None
                or len(shape) != len(lengths)
                or any(o + n > m for o, n, m in zip(offsets, lengths, shape))
            ):
                raise ValueError(
                    f"the checkpoint's {name} does not fit this run's model, where its shape is {shape}{_OTHER_MODEL}"
                )

    def _load_box(self, parameter: torch.nn.Parameter, name: str, part: dict) -> int:
        """What a saved part holds of this rank's part of a parameter, and of its moments. Returns
        how many elements of it.
        """
        if name not in part["boxes"]:
            return 0
        mine, theirs = (
            held_box(self.decoder, name, parameter),
            Box(*map(tuple, part["boxes"][name])),
        )
        common = overlap(mine, theirs)
        here, there = common.within(mine), common.within(theirs)

        def take(tensor: torch.Tensor, key: str) -> None:
            if common.numel:  # else there is nothing to read
                local(tensor)[here].copy_(box_of(part, f"{key}/{name}", there))

        take(parameter, "model")
        if self._average and f"ema/{name}" in part:
            take(self._average.of(parameter), "ema")
        for key in MOMENTS:
            if f"{key}/{name}" in part:
                state = self.optimizer.state[parameter]
                if key not in state:
                    state[key] = torch.zeros_like(parameter)
                take(state[key], key)
                if mine == theirs and f"{key}_scale/{name}" in part:
                    state[f"{key}_scale"] = part[f"{key}_scale/{name}"]
        return common.numel

    @property
    def export_bytes(self) -> int:
        """About what `export` writes."""
        num_elements = sum(
            math.prod(shape) for shape in parameter_shapes(self.decoder.config).values()
        )
        copies = 2 if self._average else 1
        return num_elements * getattr(torch, self.model_dtype).itemsize * copies

    def export(self, out: str | None) -> None:
        """Collective over the first replica: write the policy as a Hugging Face directory, and its
        average as OUT_ema if there is one.

        Rank 0 writes, one tensor whole at a time; where out is None, nothing. OSError or
        SafetensorError from the disk, once both are through, so that no other rank waits for this
        one.
        """
        if self.group.replica > 0:
            return
        average = self._policy.with_values(self._average.of) if self._average else ()
        try:
            self._write(self._policy.with_values(lambda p: p), out)
        finally:
            self._write(average, out and out + EMA)

    def _write(self, weights: Iterable[tuple[str, torch.Tensor]], out: str | None) -> None:
        whole = whole_parameters(self.decoder, weights)
        try:
            if out is not None and self.group.index == 0:
                export(whole, self.model_path, out, dtype=getattr(torch, self.model_dtype))
        finally:
            for _ in whole:  # the other ranks take part in making each
                pass

    def _lora_state(self) -> dict | None:
        """As it comes back from JSON."""
        return (
            {**dataclasses.asdict(self.lora), "targets": sorted(self.lora.targets)}
            if self.lora
            else None
        )

    def offloadable(self) -> list[torch.Tensor]:
        """Weights, their average and the optimizer's moments; gradients end with the step."""
        self.optimizer.zero_grad(set_to_none=True)
        moments = [
            t
            for state in self.optimizer.state.values()
            for t in state.values()
            if isinstance(t, torch.Tensor)
        ]
        values = self.critic.offloadable() if self.critic else ()
        kept = [
            *values,
            *self._policy.buffers(),
            *(self._average.tensors() if self._average else []),
        ]
        return [*(local(t) for t in (*self._shards, *moments)), *kept]

    def teardown(self) -> None:
        for weights in (getattr(self, "weights", None), getattr(self, "reference_weights", None)):
            if weights is not None:
                weights.close()
