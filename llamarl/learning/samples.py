"""SampleMaker: makes of a step's groups what people look at, as JSON values.

    {"step": 12, "groups": [...], "shown": [...]}

    groups  a line of numbers for each group of this rank, as GROUP_FIELDS says
    shown   some of these groups whole:

    {"ticket": 771, "prompt": "3+4=", "taught": true, "completions": [...]}

    and each of their completions:

    {"reward": 1.0, "shaped": 1.0, "parts": {"exact": 1.0, "format": 0.5}, "finish": "stop",
     "outcome": "score", "length": 2, "trained": true, "left_out": 0,
     "ids": [11, 2], "text": ["7", "<eos>"], "generator": [-0.1, -0.2], "trainer": [-0.1, -0.2],
     "lag": [[0, 2]], "sampled": [[true, 2]], "advantage": [[0.75, 2]], "turn_reward": [[0, 2]]}

What stays the same over many tokens is written as [value, how many tokens]. A logprob is null where
it was not computed. Of a group whose tokens are more than MOST_TOKENS only the best and the worst
completion have theirs, and of each at most half as many, from its beginning: `left_out` counts the
rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from llamarl.learning.targets import Targets
from llamarl.types import Group
from llamarl.words.choices import GROUP_FIELDS, part_column


@dataclass(frozen=True, slots=True)
class SeenGroup:
    """A group of a step, with what the trainer made of it."""

    group: Group
    targets: Targets | None  # None: it was left out of the update
    # [T] float32, under the weights that the step began with; NaN where they were not computed:
    # context, and completions that nothing is learned from
    trainer_logprobs: Tensor


class StepWatch:
    """Holds one step at a time, on one rank."""

    def __init__(self):
        self.see([], [], [], [], [])

    def see(
        self,
        groups: list[Group],
        trained: list[Group],
        targets: list[Targets],
        cuts: list[slice],
        logprobs: Sequence[list[tuple[Tensor, Tensor]]],
    ) -> None:
        """Keep a step's groups; those of them that are trained on, with their targets; the cuts of
        these into minibatches; and for each minibatch, by microbatch, the trainer's logprobs [R] of
        labels behind the places [R] of these among the completion tokens of its groups.
        """
        self._groups = groups
        self._trained = trained
        self._targets = targets
        self._cuts = cuts
        self._logprobs = logprobs

    def take(self) -> list[SeenGroup]:
        """Return the step's groups in their order, and forget them."""
        logprobs = self._by_group()
        seen = []
        number_of = {id(group): number for number, group in enumerate(self._trained)}
        for group in self._groups:
            number = number_of.get(id(group))
            if number is None:
                nothing = torch.full((group.token_ids.numel(),), math.nan)
                seen.append(
                    SeenGroup(
                        group=group,
                        targets=None,
                        trainer_logprobs=nothing,
                    )
                )
                continue
            one = SeenGroup(
                group=group, targets=self._targets[number], trainer_logprobs=logprobs[number]
            )
            seen.append(one)
        self.see([], [], [], [], [])
        return seen

    def _by_group(self) -> list[Tensor]:
        """Return the logprobs [T] of each group that is trained on."""
        found: list[Tensor] = []
        for cut, noted in zip(self._cuts, self._logprobs, strict=True):
            sizes = [group.token_ids.numel() for group in self._trained[cut]]
            logprobs_C = torch.full((sum(sizes),), math.nan)
            for places, logprobs in noted:
                logprobs_C[places.cpu()] = logprobs.float().cpu()
            found += logprobs_C.split(sizes)
        return found


MOST_GROUPS = 256  # that a step has a line of numbers of
MOST_TOKENS = 8192  # of a group whose tokens are all kept
PROMPT_TOKENS = 4096  # of a prompt, from its end
_BROKEN = "\ufffd"  # stands for bytes that are no whole character
_CHARACTER_TOKENS = 4  # a character has at most so many bytes, and so many tokens

Json = dict[str, Any]


@dataclass(eq=False)
class TokenTexts:
    """Tells each token's text, so that the texts in a row are the text of all.

    decode: gives the text of token ids, with special tokens. A character that several tokens make
    is the text of the last of them, and the others have none.
    """

    decode: Callable[[list[int]], str]
    _known: dict[int, str] = field(default_factory=dict)

    def of(self, token_ids: list[int]) -> list[str]:
        """Return the text of each token."""
        texts = []
        begun: list[int] = []  # of a character that is not whole
        for token_id in token_ids:
            text = self._alone(token_id)
            if not begun and _BROKEN not in text:
                texts.append(text)
                continue
            begun.append(token_id)
            together = self.decode(begun)
            if _BROKEN in together and len(begun) < _CHARACTER_TOKENS:
                texts.append("")
                continue
            texts.append(together)
            begun = []
        if begun:
            texts[-1] = self.decode(begun)
        return texts

    def _alone(self, token_id: int) -> str:
        """Return a token's text in the middle of others: some decoders drop a space at the
        beginning.
        """
        known = self._known.get(token_id)
        if known is None:
            twice = self.decode([token_id, token_id])
            once = self.decode([token_id])
            known = twice[len(once) :] if twice.startswith(once) else once
            self._known[token_id] = known
        return known


@dataclass(eq=False)
class SampleMaker:
    """Makes a step's sample.

    num_groups: how many groups are shown whole: by turns the one whose rewards are farthest apart,
    and the first by ticket, which is any. parts: the names of the reward's parts.
    """

    num_groups: int
    decode: Callable[[list[int]], str]
    parts: Sequence[str] = ()

    def __post_init__(self):
        self._texts = TokenTexts(self.decode)

    def sample(self, seen: list[SeenGroup], step: int) -> Json:
        """Return the sample of the step that made this policy version."""
        by_ticket = sorted(seen, key=lambda one: one.group.ticket)
        facts = facts_of(by_ticket, step - 1)
        lines = [one.line for one in facts[:MOST_GROUPS]]
        shown = []
        for number in self._chosen(facts):
            shown.append(self._whole(by_ticket[number], facts[number], step - 1))
        return {"step": step, "groups": lines, "shown": shown}

    def _chosen(self, facts: list[GroupFacts]) -> list[int]:
        """Return the places of the groups that are shown whole."""
        left = list(range(len(facts)))
        chosen: list[int] = []
        while left and len(chosen) < self.num_groups:
            takes_widest = len(chosen) % 2 == 0
            place = max(left, key=lambda number: facts[number].spread) if takes_widest else left[0]
            left.remove(place)
            chosen.append(place)
        return chosen

    def _whole(self, one: SeenGroup, facts: GroupFacts, version: int) -> Json:
        group = one.group
        num_tokens = group.token_ids.numel()
        lengths = group.lengths.tolist()
        rewards = group.rewards.tolist()
        shaped = [] if one.targets is None else one.targets.rewards.tolist()
        with_tokens = set(range(len(lengths)))
        most = num_tokens
        if num_tokens > MOST_TOKENS:
            with_tokens = set(best_and_worst(rewards, facts.trained))
            most = MOST_TOKENS // 2
        tokens = _Tokens(one, version)
        completions = []
        begin = 0
        for place, length in enumerate(lengths):
            num_kept = min(length, most) if place in with_tokens else 0
            columns = group.columns[place]
            given = {}
            for name in self.parts:
                column = part_column(name)
                if column in columns:
                    given[name] = _short(columns[column])
            has_reward = group.outcomes[place] == "score"
            is_trained = facts.trained[place] and one.targets is not None
            completion: Json = {
                "reward": _short(rewards[place]) if has_reward else None,
                "shaped": _short(shaped[place]) if is_trained else None,
                "parts": given,
                "finish": group.finish_reasons[place],
                "outcome": group.outcomes[place],
                "trained": is_trained,
                "length": length,
                "left_out": length - num_kept,
            }
            completion |= tokens.of(begin, begin + num_kept, self._texts)
            completions.append(completion)
            begin += length
        prompt_ids = group.prompt_ids[-PROMPT_TOKENS:].tolist()
        return {
            "ticket": group.ticket,
            "prompt": self.decode(prompt_ids),
            "taught": facts.taught,
            "completions": completions,
        }


class _Tokens:
    """A group's tokens, as lists."""

    def __init__(self, one: SeenGroup, version: int):
        group = one.group
        self._ids = group.token_ids.tolist()
        self._sampled = group.loss_mask.tolist()
        self._generator = group.generator_logprobs.tolist()
        self._trainer = one.trainer_logprobs.tolist()
        self._versions = group.policy_versions.tolist()
        self._turn_rewards = group.turn_rewards.tolist()
        self._advantages: list[float] = []
        if one.targets is not None:
            self._advantages = one.targets.advantages.tolist()
        self._version = version

    def of(self, begin: int, end: int, texts: TokenTexts) -> Json:
        """Return what is known of the tokens from one place to another."""
        sampled = self._sampled[begin:end]
        generator = []
        for logprob, is_sampled in zip(self._generator[begin:end], sampled):
            generator.append(_short(logprob) if is_sampled else None)
        lags = [self._version - version for version in self._versions[begin:end]]
        ids = self._ids[begin:end]
        return {
            "ids": ids,
            "text": texts.of(ids),
            "generator": generator,
            "trainer": [_short(logprob) for logprob in self._trainer[begin:end]],
            "lag": _runs(lags),
            "sampled": _runs(sampled),
            "advantage": _runs([_short(value) for value in self._advantages[begin:end]]),
            "turn_reward": _runs([_short(value) for value in self._turn_rewards[begin:end]]),
        }


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A group in a few numbers."""

    line: list[float | bool | None]  # by GROUP_FIELDS
    trained: list[bool]  # G
    taught: bool  # whether a token that was trained on has an advantage
    spread: float  # the deviation of the rewards that were trained on; -1 without any


def facts_of(seen: list[SeenGroup], version: int) -> list[GroupFacts]:
    """Return the numbers of groups, given the version that their step began with.

    The tensors of all groups are read together: one by one they would take longer than a step of a
    small model may.
    """
    if not seen:
        return []
    groups = [one.group for one in seen]
    lengths = torch.cat([group.lengths for group in groups])
    masks = torch.cat([group.loss_mask for group in groups])
    all_trained = torch.cat([group.trained for group in groups]).tolist()
    versions = torch.cat([group.policy_versions for group in groups])
    advantages = torch.cat([_advantages(one) for one in seen])
    completion_of = torch.arange(lengths.numel()).repeat_interleave(lengths)
    learns = completion_of[masks & (advantages != 0)]
    num_learning = learns.bincount(minlength=lengths.numel()).tolist()
    # Versions never fall within a completion, so its first token is its oldest.
    firsts = (lengths.cumsum(0) - lengths).clamp(max=max(0, versions.numel() - 1))
    oldest = versions[firsts].tolist() if versions.numel() else [version] * lengths.numel()
    begun = (lengths > 0).tolist()
    rewards = torch.cat([group.rewards for group in groups]).tolist()
    facts = []
    place = 0
    for group in groups:
        span = slice(place, place + len(group.outcomes))
        place = span.stop
        trained = all_trained[span]
        of_trained = [reward for reward, is_trained in zip(rewards[span], trained) if is_trained]
        first_versions = [v for v, has_tokens in zip(oldest[span], begun[span]) if has_tokens]
        taught = any(n for n, is_trained in zip(num_learning[span], trained) if is_trained)
        values: Json = {
            "ticket": group.ticket,
            "least": _short(min(of_trained)) if of_trained else None,
            "mean": _short(sum(of_trained) / len(of_trained)) if of_trained else None,
            "most": _short(max(of_trained)) if of_trained else None,
            "trained": sum(trained),
            "lag": version - min(first_versions, default=version),
            "taught": taught,
        }
        one = GroupFacts(
            line=[values[name] for name in GROUP_FIELDS],
            trained=trained,
            taught=taught,
            spread=_deviation(of_trained),
        )
        facts.append(one)
    return facts


def _advantages(one: SeenGroup) -> Tensor:
    """Return [T]: the advantages of a group's tokens, 0 if it was left out of the update."""
    if one.targets is None:
        return torch.zeros(one.group.token_ids.numel())
    return one.targets.advantages


def _deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of values; -1 if there are none."""
    if not values:
        return -1.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def best_and_worst(rewards: Sequence[float], trained: Sequence[bool]) -> tuple[int, ...]:
    """Return the places of the largest and the smallest reward among the trained completions, the
    first among equals; () if none is trained.
    """
    known = [place for place, is_trained in enumerate(trained) if is_trained]
    if not known:
        return ()
    best = max(known, key=lambda place: rewards[place])
    worst = min(known, key=lambda place: rewards[place])
    return (best, worst)


def _short(value: float) -> float | None:
    """Return a number in five digits; None for one that is none."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _runs(values: Sequence) -> list[list]:
    """Return values as [value, how many of it follow each other]."""
    return [[value, len(list(run))] for value, run in groupby(values)]
