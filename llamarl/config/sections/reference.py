"""The section `reference`: the policy that others are compared with, and what cannot go together
with it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from llamarl.config.sections.generator import find_reading_ahead
from llamarl.config.sections.loss import LossSettings, declares
from llamarl.config.sections.run import RunSettings
from llamarl.config.sections.trainer import TrainerSettings
from llamarl.words.fields import ByKind, Count, Flag, settings_dataclass
from llamarl.words.findings import Findings


@settings_dataclass
class ReferenceSettings:
    """Settings without a reference, or of one that the trainer itself asks before its update."""

    kind: Literal["none", "adapters_off", "sharded"]

    reset_every: ClassVar[None] = None
    placed: ClassVar[bool] = False  # whether it is an executor, on ranks of its own or shared
    replicate: ClassVar[int] = 1
    tensor_parallel: ClassVar[int] = 1
    stream: ClassVar[bool] = False
    piece_tokens: ClassVar[None] = None
    cache_tokens: ClassVar[None] = None


@settings_dataclass
class FrozenReferenceSettings:
    kind: Literal["frozen"]
    replicate: Count
    """Copies of the model, each sharded over an equal share of the ranks (FSDP2)."""
    tensor_parallel: Count
    """Ranks that share each layer. Each of these parts is sharded."""
    stream: Flag
    """Read completions while they are sampled, so that their logprobs are ready when they end
    (docs/rewards.md).
    """
    piece_tokens: Count | None
    """With stream: tokens of a completion that are read at a time; null: an eighth of
    max_new_tokens.
    """
    cache_tokens: Count | None
    """With stream: places of the K/V cache of a data-parallel rank; null: as many as the
    generators hold.
    """

    reset_every: ClassVar[None] = None
    placed: ClassVar[bool] = True


@settings_dataclass
class ResettingReferenceSettings:
    kind: Literal["reset"]
    reset_every: Count
    """rho, the steps after which the reference takes the policy's weights (TBA, section 6)."""
    replicate: Count
    """Copies of the model, each sharded over an equal share of the ranks (FSDP2)."""
    tensor_parallel: Count
    """Ranks that share each layer. Each of these parts is sharded."""
    stream: Flag
    """Only reference=frozen can: the version that scores a completion is known once its newest
    token is.
    """

    placed: ClassVar[bool] = True


AnyReferenceSettings = Annotated[
    ReferenceSettings | FrozenReferenceSettings | ResettingReferenceSettings, ByKind()
]


def find_reference(
    reference: AnyReferenceSettings,
    run: RunSettings,
    found: Findings,
    *,
    loss: LossSettings,
    trainer: TrainerSettings,
    buffer_kind: str,
) -> None:
    """Find what needs a reference if there is none, and what cannot go together with one."""
    if reference.kind == "none":
        _find_needed(found, loss=loss, trainer=trainer)
    if reference.kind == "adapters_off" and trainer.lora.rank == 0:
        found.add(
            "this reference is the trainer's weights without their adapters, but without "
            "adapters every weight is trained; trainer.lora.rank=16, or reference=frozen",
            "reference.kind",
            "trainer.lora.rank",
        )
    if reference.kind == "reset" and buffer_kind == "replay":
        found.add(
            "the buffer holds groups with logprobs of earlier references; reference=frozen, or "
            "buffer=fifo",
            "reference.reset_every",
            "buffer.kind",
        )
    if reference.kind == "reset" and run.offload:
        found.add(
            "the policy's weights travel to the reference while other executors have the device; "
            "offload=false, or reference=frozen",
            "reference.reset_every",
            "offload",
        )


def _find_needed(found: Findings, *, loss: LossSettings, trainer: TrainerSettings) -> None:
    """Find what compares with a reference."""
    coefs = {"trainer.reward_kl_coef": trainer.reward_kl_coef, "loss.kl_coef": loss.kl_coef}
    for key, coef in coefs.items():
        if coef > 0:
            remedy = f"reference=frozen, or {key}=0"
            found.add(f"a KL needs a reference; {remedy}", key, "reference.kind")
    if declares(loss.fn, "needs_reference"):
        found.add(
            "this loss compares with a reference; reference=frozen", "loss.fn", "reference.kind"
        )


def find_reference_stream(
    reference: AnyReferenceSettings,
    run: RunSettings,
    found: Findings,
    *,
    generator_kind: str,
    longest: int,
) -> None:
    """Find what keeps a reference from reading completions while they are sampled.

    longest: tokens of a prompt that is trained on and its completion at most.
    """
    if not reference.stream:
        return
    if isinstance(reference, ResettingReferenceSettings):
        found.add(
            "the newest token of a completion decides which reference scores it, and is not "
            "known while it is sampled; reference=frozen, or reference.stream=false",
            "reference.stream",
            "reference.kind",
        )
        return
    find_reading_ahead(
        reference,
        found,
        section="reference",
        reader="reference",
        generator_kind=generator_kind,
        offload=run.offload,
        longest=longest,
    )
