"""Frozen models over the ranks of an executor: sharded, split, or a copy on each. Every rank
computes its share of what is asked, and all get the whole answer.

    ShardedScorer     scores completions at their last tokens
    ShardedReference  gives the logprobs of their tokens

What is scored is packed without padding, each prompt once for all its completions.

Shapes: T tokens and S segments of a microbatch, N completions, C labels, P tokens of a prompt, L of
a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llamarl.comm.together import join_shares, own_share
from llamarl.executor import ExecutorGroup
from llamarl.inference.agreement import check_agreement
from llamarl.learning.collation import collate
from llamarl.learning.logprobs import LateEnds, group_to_score, label_logprobs
from llamarl.learning.packing import filler, pack
from llamarl.learning.segments import Segments
from llamarl.learning.targets import Targets
from llamarl.models.attention import PackedAttention
from llamarl.models.decoder import Decoder
from llamarl.models.fsdp import reshard
from llamarl.models.loading import decoder_over, load_scorer
from llamarl.models.scorer import label_of, scores_at
from llamarl.models.shape import AUTO, Lora
from llamarl.models.tp import TensorParallel
from llamarl.tasks.base import Tokenizer, text_of, with_system
from llamarl.tasks.special import chat_ids, text_ids
from llamarl.types import Group, Message, PackedBatch

if TYPE_CHECKING:
    from llamarl.scoring.kinds.model import ModelKindSettings


class Transcript:
    """Turns texts into token ids: as turns of a user and an assistant if `chat` is true and the
    tokenizer has a template, otherwise end to end.

    A conversation always goes through the template. Without a template it is read as a reward
    function reads it (text_of), with the completion as its last turn. End to end, the tokenizer's
    end token follows a completion that ended by itself; a template closes the assistant's turn in
    its own way.
    """

    def __init__(self, tokenizer: Tokenizer, *, chat: bool, system_prompt: str | None):
        self._tokenizer = tokenizer
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self.chat = chat and self._has_template
        self._system_prompt = system_prompt
        end = getattr(tokenizer, "eos_token_id", None)
        self._end = [] if end is None else [end]

    def ids(
        self, prompt: str | tuple[Message, ...], completion: str, *, has_ended: bool
    ) -> list[int]:
        """Return the token ids [P + L] of a prompt, a text or the turns of a conversation, and its
        completion. ValueError as from `chat_ids`.
        """
        answer = Message("assistant", completion)
        if isinstance(prompt, str) and self.chat:
            turns = with_system((Message("user", prompt), answer), self._system_prompt)
        elif isinstance(prompt, str):
            return self._end_to_end(prompt + completion, has_ended)
        elif not self._has_template:
            return self._end_to_end(text_of((*prompt, answer)), has_ended)
        else:
            turns = (*prompt, answer)
        return chat_ids(self._tokenizer, [turn.to_dict() for turn in turns], reply=False)

    def _end_to_end(self, text: str, has_ended: bool) -> list[int]:
        ids = text_ids(self._tokenizer, text, add_special_tokens=True)
        return ids + self._end if has_ended else ids


def same_tokens(one, other) -> bool:
    """Whether two tokenizers give their ids to the same tokens."""
    return one.get_vocab() == other.get_vocab()


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A request: the completions of one prompt that are to be scored. ValueError for a sequence
    without any token.
    """

    prompt_ids: Tensor  # [P] int64; [0] where the completions have no token in common
    completions: tuple[Tensor, ...]  # [L] int64 each

    def __post_init__(self):
        if not self.prompt_ids.numel() and not all(c.numel() for c in self.completions):
            raise ValueError("a sequence without tokens has no last one to be scored at")

    @property
    def num_tokens(self) -> int:
        """The tokens of the prompt and of all completions."""
        return self.prompt_ids.numel() + sum(c.numel() for c in self.completions)


def to_message(asked: Sequence[ScoreRequest]) -> Tensor:
    """Encode requests as one message of whole numbers [n] int64, for other ranks: for each prompt
    its length, how many completions it has and their lengths, then the tokens of all.
    """
    sizes = []
    tokens = []
    for one in asked:
        lengths = [completion.numel() for completion in one.completions]
        sizes += [one.prompt_ids.numel(), len(lengths), *lengths]
        tokens += [one.prompt_ids, *one.completions]
    head = torch.tensor([len(asked), *sizes], dtype=torch.int64)
    return torch.cat([head, *tokens])


def from_message(words: Tensor) -> list[ScoreRequest]:
    """Decode a message of `to_message`."""
    number, *rest = words.tolist()
    place = 0
    lengths = []  # of each prompt: its own, then those of its completions
    for _ in range(number):
        end = place + 2 + rest[place + 1]
        lengths.append([rest[place], *rest[place + 2 : end]])
        place = end
    tokens = words[1 + place :]
    asked = []
    for own in lengths:
        prompt_ids, *completions = tokens[: sum(own)].split(own)
        asked.append(ScoreRequest(prompt_ids, tuple(completions)))
        tokens = tokens[sum(own) :]
    return asked


@dataclass(frozen=True, slots=True)
class ScoreBatch:
    """A microbatch: segments end to end, as in PackedBatch, but with every completion's last token.

    A prompt with a single completion is one segment together with it.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 at the start of each prompt
    cu_seqlens: Tensor  # [S+1] int64
    parents: Tensor  # [S] int64, a completion's prompt; -1 for a segment that continues none
    rows: Tensor  # [N] int64 into T: the last token of each completion
    places: Tensor  # [N] int64: places of the completions among all that were asked, end to end


def pack_scored(asked: Sequence[ScoreRequest], *, budget_tokens: int) -> list[ScoreBatch]:
    """Collate what is asked into microbatches of at most budget_tokens, on the CPU. Equal inputs
    give equal outputs.

    If a prompt's completions do not fit one microbatch, each microbatch with some of them computes
    the prompt once. A sequence over the budget gets a microbatch of its own. ValueError for a
    budget without room.
    """
    parts: list[_Part] = []
    first = 0
    for one in asked:
        parts += _cut(one, first, budget_tokens)
        first += len(one.completions)
    bins = collate([part.asked.num_tokens for part in parts], budget_tokens)
    batches = []
    for places in bins:
        batches.append(_build([parts[i] for i in places]))
    return batches


@torch.no_grad()
def score(decoder: Decoder, batch: ScoreBatch, device: torch.device) -> Tensor:
    """Return the scores [N, C] of a microbatch, float32, on the CPU. Collective over a sharded
    decoder's ranks.
    """
    attention = PackedAttention(batch.cu_seqlens.to(device), batch.parents.to(device))
    head = scores_at(batch.rows.to(device))
    scores_NC = decoder(batch.input_ids.to(device), batch.positions.to(device), attention, head)
    return scores_NC.float().cpu()


@dataclass(frozen=True, slots=True)
class _Part:
    """Completions of one prompt that go into a microbatch together."""

    asked: ScoreRequest
    places: list[int]


def _cut(asked: ScoreRequest, first: int, budget: int) -> list[_Part]:
    """Cut the completions of a prompt into parts of at most the budget, as far as possible."""
    sizes = [completion.numel() for completion in asked.completions]
    cuts = [[i] for i in range(len(sizes))]
    room = budget - asked.prompt_ids.numel()
    if room > 0 and asked.prompt_ids.numel():
        cuts = [sorted(cut) for cut in collate(sizes, room)]
    parts = []
    for cut in cuts:
        own = ScoreRequest(asked.prompt_ids, tuple(asked.completions[i] for i in cut))
        parts.append(_Part(own, [first + i for i in cut]))
    return parts


def _build(parts: list[_Part]) -> ScoreBatch:
    """Build the microbatch of these parts; without any it scores nothing, for a rank with fewer
    than its FSDP peers.
    """
    segments = Segments()
    rows = []
    places = []
    for part in parts:
        prompt_ids = part.asked.prompt_ids
        completions = part.asked.completions
        start = prompt_ids.numel()
        parent = -1
        if len(completions) == 1:
            start = 0
            completions = (torch.cat([prompt_ids, completions[0]]),)
        elif start:
            parent = segments.add(prompt_ids)
        end_of_prompt = segments.num_tokens - 1
        for completion in completions:
            if not completion.numel():
                rows.append(end_of_prompt)
                continue
            segments.add(completion, position=start, parent=parent)
            rows.append(segments.num_tokens - 1)
        places += part.places
    return ScoreBatch(
        **segments.packed(),
        rows=torch.tensor(rows, dtype=torch.int64),
        places=torch.tensor(places, dtype=torch.int64),
    )


class ShardedScorer:
    """A model over the ranks of an executor. Every call is collective over them. label: the number
    of the score that is used.
    """

    def __init__(self, settings: ModelKindSettings, group: ExecutorGroup):
        self._microbatch_tokens = settings.microbatch_tokens
        self._group = group
        self.decoder = load_scorer(
            settings.path,
            device=group.device,
            dtype=getattr(torch, settings.dtype),
            mesh=group.data_mesh() if group.size > 1 else None,
            tensor_parallel=TensorParallel.of(group),
        )
        check_agreement(self.decoder, settings.path, group.device, getattr(torch, settings.dtype))
        self.label = label_of(self.decoder.config.labels, settings.label)

    @property
    def tokens_a_round(self) -> int:
        """Packed tokens that fill one microbatch on each rank."""
        return self._microbatch_tokens * self._group.data_size

    def scores(self, asked: Sequence[ScoreRequest]) -> Tensor:
        """Return the scores [N] of all given completions, in order, on the CPU; the same on all
        ranks. Each rank computes its share.
        """
        batches = pack_scored(asked, budget_tokens=self._microbatch_tokens)
        scores_N = torch.zeros(sum(len(one.completions) for one in asked))
        for batch in own_share(batches, _build([]), self._group):
            scores_NC = score(self.decoder, batch, self._group.device)
            scores_N[batch.places] = scores_NC[:, self.label]
        reshard(self.decoder)
        join_shares(scores_N, self._group)
        return scores_N


class ShardedReference:
    """A frozen model over the ranks of an executor. Every call is collective over them.

    path: a Hugging Face directory. dtype: of its weights. temperature: that logits are divided by.
    microbatch_tokens: packed tokens a forward, per rank. late_ends: what completions could not have
    when they were sampled, out of this model's distribution too. lora: adapters beside its weights.
    made_by: of config_of.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: torch.dtype,
        temperature: float,
        microbatch_tokens: int,
        group: ExecutorGroup,
        late_ends: LateEnds | None = None,
        lora: Lora | None = None,
        made_by: str = AUTO,
    ):
        self._temperature = temperature
        self._late_ends = late_ends
        self._microbatch_tokens = microbatch_tokens
        self._group = group
        self.decoder = decoder_over(group, path, dtype=dtype, lora=lora, made_by=made_by)
        check_agreement(self.decoder, path, group.device, dtype)

    @torch.no_grad()
    def logprobs(self, asked: Sequence[ScoreRequest], *, together: bool) -> list[Tensor]:
        """Return for each prompt the logprobs [T] of its completions' tokens, end to end: float32,
        nats, on the CPU; the same on all ranks, of which each computes its share.

        together: a microbatch may hold completions of several prompts. Else the values of one do
        not depend on what is asked beside it.
        """
        groups = [group_to_score(one.prompt_ids, one.completions) for one in asked]
        sizes = [group.token_ids.numel() for group in groups]
        microbatches = self._packed(groups, together)
        nothing = (filler(), torch.zeros(0, dtype=torch.int64))
        logprobs_C = torch.zeros(sum(sizes))
        for microbatch, places in own_share(microbatches, nothing, self._group):
            logprobs_C[places] = label_logprobs(
                self.decoder,
                microbatch,
                self._group.device,
                temperature=self._temperature,
                late_ends=self._late_ends,
            )
        reshard(self.decoder)
        join_shares(logprobs_C, self._group)
        return list(logprobs_C.split(sizes))

    def _packed(self, groups: list[Group], together: bool) -> list[tuple[PackedBatch, Tensor]]:
        """Return microbatches, and where their labels are among the tokens of all groups."""
        found = []
        first = 0
        for batch in [groups] if together else [[group] for group in groups]:
            packing = pack(
                batch,
                [Targets.of(group, group.rewards) for group in batch],
                budget_tokens=self._microbatch_tokens,
                skip_zero_advantage=False,
            )
            for microbatch in packing.microbatches:
                found.append((microbatch, microbatch.places + first))
            first += sum(group.token_ids.numel() for group in batch)
        return found


def asked_of(group: Group) -> ScoreRequest:
    """Return the request for all completions of a group, whatever their rewards say."""
    return ScoreRequest(group.prompt_ids, group.token_ids.split(group.lengths.tolist()))
