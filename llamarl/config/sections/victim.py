"""The section `victim`: whom attacks are put to, and what cannot go together with it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from llamarl.words.fields import (
    AnyText,
    ByKind,
    Count,
    Flag,
    NonNegative,
    Number,
    PositiveShare,
    Text,
    settings_dataclass,
)
from llamarl.words.findings import Findings

ATTACK = "{attack}"  # what stands for it in a template


@settings_dataclass
class NoVictimSettings:
    kind: Literal["none"]

    placed: ClassVar[bool] = False  # whether it is an executor, on ranks of its own or shared


@settings_dataclass
class ModelVictimSettings:
    kind: Literal["hf"]
    path: AnyText | None
    """The victim's directory, with its tokenizer; null: the tiny model that comes with the
    package.
    """
    dtype: Literal["float32", "bfloat16"]
    """Type of its weights."""
    template: Text
    """What it reads of an attack, before its chat template."""
    chat: Flag
    """Show the attack as a user's turn of its chat template, if it has one."""
    system_prompt: AnyText | None
    """Its system turn; null: none."""
    replies: Count
    """M, the replies that are sampled for each attack. The attack's score is the mean of theirs."""
    max_prompt_tokens: Count
    """Tokens of an attack with all that is around it. A longer one is an error of the reward."""
    max_new_tokens: Count
    """Tokens of a reply at most."""
    temperature: NonNegative
    """Temperature of replies; 0: greedy, so that all replies to an attack are alike."""
    top_p: PositiveShare
    """Probability mass that replies are sampled from."""
    max_slots: Count
    """Replies that a rank decodes at once."""
    chunk_tokens: Count
    """Tokens of a reply between two looks at new attacks."""
    threshold: Number
    """An attack with a higher mean score is a success: reward/success, eval/success."""

    placed: ClassVar[bool] = True

    @property
    def longest(self) -> int:
        """Most tokens of an attack with its reply, as the victim reads them."""
        return self.max_prompt_tokens + self.max_new_tokens


AnyVictimSettings = Annotated[NoVictimSettings | ModelVictimSettings, ByKind()]


def placed_victim(victim: AnyVictimSettings) -> ModelVictimSettings:
    """Return the settings of the victim; None without one."""
    assert isinstance(victim, ModelVictimSettings), "there is no victim: victim=none"
    return victim


def find_victim(
    victim: AnyVictimSettings, found: Findings, *, attacks: bool, compared: list[str]
) -> None:
    """Find a victim that no attack is put to, attacks without a victim, and what cannot score its
    replies.

    attacks: the recipe puts completions to a victim. compared: keys of the judges that compare
    completions of a prompt.
    """
    if victim.placed and not attacks:
        found.add(
            "only recipes/red_team.py puts completions to a victim; start that, or victim=none",
            "victim.kind",
        )
    if attacks and not victim.placed:
        found.add(
            "this recipe attacks a victim, and there is none; victim=hf, or start "
            "recipes/llama_async.py",
            "victim.kind",
        )
    if isinstance(victim, NoVictimSettings):
        return
    found.add_unless_model(victim.path, "victim.path")
    if ATTACK not in victim.template:
        found.add(
            f"the template has no place for the attack; put {ATTACK} where it belongs",
            "victim.template",
        )
    for key in compared:
        found.add(
            "this judge compares completions of a prompt, and with a victim it would score "
            f"replies to one attack; {key}.ask=score",
            f"{key}.ask",
            "victim.kind",
        )
