"""The section `reference`: the policy that others are compared with, and what cannot go together
with it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, ClassVar, Literal

from llamarl.config.sections.generator import find_reading_ahead
from llamarl.config.sections.loss import LossSettings, declares
from llamarl.config.sections.run import RunSettings
from llamarl.config.sections.trainer import TrainerSettings
from llamarl.words.fields import ByKind, Count, Flag, Paths, Text, settings_dataclass
from llamarl.words.findings import Findings, did_you_mean


@settings_dataclass
class ReferenceSettings:
    """Settings without a reference, or of one that the trainer itself asks before its update."""

    kind: Literal["none", "adapters_off", "sharded"]

    given: ClassVar[dict[str, str]] = {}  # the directories of its models by key; {}: model.path
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
    path: Text | None
    """Directory of another model with the policy's tokenizer, such as a teacher (loss=distill);
    null: the model that training starts from.
    """
    teachers: Paths
    """With task=mixture: directories by the names of its parts, {a: DIR}. It scores a part's
    completions by this model, and other parts' by path.
    """
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

    @property
    def given(self) -> dict[str, str]:
        """The directories of its models by key; none: its model is that of model.path."""
        found = {}
        if self.path is not None:
            found["reference.path"] = self.path
        for part, path in self.teachers.items():
            found[f"reference.teachers.{part}"] = path
        return found


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

    given: ClassVar[dict[str, str]] = {}
    placed: ClassVar[bool] = True


_TEACHER = "reference=frozen reference.path=TEACHER"
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
        remedy = "reference=frozen"
        if loss.fn == "distill":
            remedy = _TEACHER
        found.add(f"this loss compares with a reference; {remedy}", "loss.fn", "reference.kind")


def find_teachers(
    reference: AnyReferenceSettings,
    found: Findings,
    *,
    loss: LossSettings,
    parts: Collection[str] | None,
) -> None:
    """Find a teacher that teaches nothing, and teachers that no part of the task has.

    parts: of a mixture; None for another task.
    """
    for key, path in reference.given.items():
        found.add_unless_model(path, key)
    if isinstance(reference, FrozenReferenceSettings) and reference.teachers:
        _find_parts(reference, found, parts=parts)
    if loss.fn != "distill":
        return
    if reference.kind == "reset":
        what = "the teacher would become the student at each reset"
        found.add(f"{what}; {_TEACHER}", "loss.fn", "reference.kind")
        return
    if reference.kind == "none" or reference.given:
        return
    if loss.ignores_rewards:
        what = "the teacher would be the model that training starts from, which teaches nothing"
        found.add(f"{what}; {_TEACHER}", "loss.fn", "reference.kind")


def _find_parts(
    reference: FrozenReferenceSettings, found: Findings, *, parts: Collection[str] | None
) -> None:
    """Find teachers of parts that are not there, and parts without a teacher."""
    if parts is None:
        what = "teachers are by the parts of a mixture; reference.path=DIR, or task=mixture"
        found.add(what, "reference.teachers", "task.kind")
        return
    for name in reference.teachers:
        if name not in parts:
            what = f"the task has no part of this name{did_you_mean(name, parts)}"
            found.add(what, f"reference.teachers.{name}")
    missing = [name for name in parts if name not in reference.teachers]
    if missing and reference.path is None:
        what = f"{' and '.join(missing)} of task.parts would have no teacher"
        remedy = f"reference.teachers.{missing[0]}=DIR, or reference.path=DIR for all others"
        found.add(f"{what}; {remedy}", "reference.teachers", "reference.path")
    if reference.stream:
        what = "completions are read ahead by one model alone; reference.stream=false"
        found.add(what, "reference.stream", "reference.teachers")


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
