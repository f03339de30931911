"""TrainedModel: a decoder with its optimizer, sharded over the ranks of an executor: loaded,
stepped, averaged, saved and exported.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from llamarl.executor import ExecutorGroup
from llamarl.learning.optim import AdamSettings, build_optimizer, settle_moments
from llamarl.models.build import Decoder, config_of
from llamarl.models.fsdp import local, whole_parameters
from llamarl.models.hf import export
from llamarl.models.loading import training_decoder
from llamarl.models.lora import travelling
from llamarl.models.peft import export_adapted, load_adapter
from llamarl.models.scorer import scorer_fields, settle_pad_token
from llamarl.models.shape import AUTO, Lora
from llamarl.models.sharded_state import (
    Shard,
    load_model,
    optimizer_tensors,
    saved_state,
    set_steps,
    shards_of,
    steps_of,
)
from llamarl.models.sharding import Box, num_parameters
from llamarl.models.tp import TensorParallel

EMA = "_ema"  # ends the name of the exported directory with the averaged weights
_SAVED_AS = {"weights": "model/", "moments": ""}  # prefixes, see llamarl.models.sharded_state

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModelSettings:
    """path, dtype: the directory that training starts from, and the dtype of an exported one.

    lora: train adapters alone, which start as those of the PEFT directory adapter_path, or, without
    one, as a product of 0. ema_decay: keep an exponential moving average of the weights, and export
    it too. score_seed: train a scorer, and draw its head from this seed unless the directory has
    one; None: train a language model. made_by: of config_of.
    """

    path: str
    dtype: str
    compute_dtype: str
    adam: AdamSettings
    activation_checkpointing: bool
    cpu_offload: bool = False
    lora: Lora | None = None
    adapter_path: str | None = None
    ema_decay: float | None = None
    score_seed: int | None = None
    made_by: str = AUTO


def load_decoder(settings: TrainedModelSettings, group: ExecutorGroup) -> Decoder:
    """Load the decoder that these settings train. Collective over the group. ValueError for several
    ranks of a model that reads each sequence by itself: they would gather its layers unlike times.
    """
    config = config_of(settings.path, settings.made_by)
    if config.is_read_alone and group.size > 1:
        raise ValueError(
            f"{settings.path}: layers of {config.architecture} carry a state, so that each "
            f"sequence is read by itself, and {group.size} ranks cannot share them; train on 1 rank"
        )
    return training_decoder(
        settings.path,
        mesh=group.data_mesh(),
        device=group.device,
        compute_dtype=getattr(torch, settings.compute_dtype),
        activation_checkpointing=settings.activation_checkpointing,
        tensor_parallel=TensorParallel.of(group, split_vocabulary=False),
        lora=settings.lora,
        cpu_offload=settings.cpu_offload,
        score_seed=settings.score_seed,
        made_by=settings.made_by,
    )


class TrainedModel:
    """A decoder and its AdamW over the ranks of `group`. Loading and exporting are collective.

    lr: of the optimizer, until a step sets another. adapt: changes the decoder's forward once its
    weights are loaded.
    """

    def __init__(
        self,
        settings: TrainedModelSettings,
        group: ExecutorGroup,
        *,
        lr: float,
        adapt: Callable[[Decoder], None] = lambda decoder: None,
    ):
        if settings.cpu_offload and group.device.type == "cpu":
            log.warning(
                "trainer.cpu_offload: this trainer computes on a CPU, so its weights are in host "
                "memory already; leave it out"
            )
        self.settings = settings
        self._group = group
        self.decoder = load_decoder(settings, group)
        if settings.adapter_path is not None:
            load_adapter(self.decoder, settings.adapter_path)
        adapt(self.decoder)
        # Listed now, because after a forward FSDP shows its root's gathered parameters.
        self.all_parameters = list(self.decoder.parameters())
        # What is trained, saved and sent.
        self.shards = shards_of(self.decoder, travelling(self.decoder))
        trained = [shard.parameter for shard in self.shards]
        self.optimizer = build_optimizer(trained, lr=lr, **dataclasses.asdict(settings.adam))
        self.average = None
        if settings.ema_decay is not None:
            self.average = WeightAverage(trained, self.optimizer, settings.ema_decay)

    @property
    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters by Hugging Face names: of adapters alone, if there are any."""
        return [(shard.name, shard.parameter) for shard in self.shards]

    def tensors(self) -> list[Tensor]:
        """Return what this rank holds between two steps: weights, their average and moments. Drops
        the gradients.
        """
        self.optimizer.zero_grad()
        tensors = [*self.all_parameters, *optimizer_tensors(self.optimizer)]
        if self.average:
            tensors += self.average.tensors()
        return [local(tensor) for tensor in tensors]

    # --- Checkpoints ---

    def state_dict(self) -> dict:
        """Return this rank's shards of the trained weights (float32), their average and Adam's
        moments, and the box of each. If several ranks hold the same tensor, only the first of them
        stores it.
        """
        state = {"lora": self._lora(), "adam_step": steps_of(self.optimizer)}
        shards = self.shards if self._group.replica == 0 else []
        is_first_peer = self._group.tensor_index == 0
        return state | saved_state(shards, self._state_of, is_first_peer=is_first_peer)

    def _state_of(self, shard: Shard) -> dict[str, Tensor]:
        state = shard.state(self.optimizer, **_SAVED_AS)
        if self.average:
            state[f"ema/{shard.name}"] = local(self.average.of(shard.parameter))
        return state

    @torch.no_grad()
    def load_state_dict(self, parts: Sequence[Mapping]) -> None:
        """Load this rank's shards from the parts of all ranks that saved, however many they were.

        ValueError if they were saved with other adapters, or from a model of other shapes.
        """
        for part in parts:
            if part.get("lora") != self._lora():
                raise ValueError(
                    f"the checkpoint was saved with trainer.lora={part.get('lora')}, this run has "
                    f"{self._lora()}: resume with the same, or start a run of its own from the "
                    "checkpoint's hf/ with model.path"
                )
        load_model(self.decoder, self.shards, parts, self._load_shard)
        settle_moments(self.optimizer)
        steps = max(float(part["adam_step"]) for part in parts)
        set_steps(self.optimizer, [shard.parameter for shard in self.shards], steps)
        has_average = any(name.startswith("ema/") for name in chain.from_iterable(parts))
        if self.average and not has_average:
            log.warning(
                "the checkpoint holds no average of the weights: it starts again from the weights "
                "of version %d",
                parts[0]["version"],
            )
            self.average.restart()

    def _load_shard(self, shard: Shard, part: Mapping, theirs: Box) -> None:
        shard.load(part, theirs, self.optimizer, **_SAVED_AS)
        averaged = f"ema/{shard.name}"
        if self.average and averaged in part:
            shard.copy_overlap(self.average.of(shard.parameter), part, averaged, theirs)

    def _lora(self) -> dict | None:
        """Return the adapters' settings as they come back from JSON; None without adapters."""
        lora = self.settings.lora
        if not lora:
            return None
        return {**dataclasses.asdict(lora), "targets": sorted(lora.targets)}

    # --- Export ---

    @property
    def export_bytes(self) -> int:
        """Return about how many bytes `export` writes."""
        copies = 2 if self.average else 1
        element_bytes = getattr(torch, self.settings.dtype).itemsize
        return num_parameters(self.decoder.config) * element_bytes * copies

    def export(self, out: str | None) -> None:
        """Collective over the first replica: write the model as a Hugging Face directory, and its
        average as OUT_ema if there is one. Rank 0 writes, one whole tensor at a time; nothing if
        out is None. OSError or SafetensorError from the disk.
        """
        if self._group.replica > 0:
            return
        try:
            self._write(lambda p: p, out)
        finally:
            # After an error of the disk too: other ranks take part in gathering the average.
            if self.average:
                self._write(self.average.of, None if out is None else out + EMA)

    def _write(self, value: Callable[[nn.Parameter], Tensor], out: str | None) -> None:
        """Write value(p) in each trained parameter's place."""
        s = self.settings
        weights = ((name, value(parameter)) for name, parameter in self.named_parameters)
        with whole_parameters(self.decoder, weights) as whole:
            if out is None or self._group.index > 0:
                return
            dtype = getattr(torch, s.dtype)
            config = self.decoder.config
            if s.lora is not None:
                export_adapted(dict(whole), s.lora, s.path, out, dtype=dtype)
                return
            fields = scorer_fields(config, s.path) if config.labels else None
            export(whole, s.path, out, dtype=dtype, fields=fields)
            if config.labels:
                settle_pad_token(out)


class WeightAverage:
    """The exponential moving average of the parameters that require a gradient, e <- d e + (1 - d)
    w after each optimizer.step(), from the initial weights on. In float32, sharded as they are;
    frozen parameters are their own average.

    decay d in [0, 1).
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, decay: float
    ):
        self.decay = decay
        trained = [p for p in parameters if p.requires_grad]
        self._averages: dict[Tensor, Tensor] = {p: p.detach().float().clone() for p in trained}
        optimizer.register_step_post_hook(lambda *_: self.update())

    @torch.no_grad()
    def update(self) -> None:
        """Make one step of the average."""
        weights = [local(p).float() for p in self._averages]
        torch._foreach_lerp_(self.tensors(), weights, 1 - self.decay)

    def of(self, parameter: Tensor) -> Tensor:
        """Return the average of a parameter: sharded like it, or itself if it is frozen."""
        return self._averages.get(parameter, parameter)

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the weights as they are."""
        for p, average in self._averages.items():
            local(average).copy_(local(p))

    def tensors(self) -> list[Tensor]:
        """Return this rank's parts of the averages."""
        return [local(e) for e in self._averages.values()]
