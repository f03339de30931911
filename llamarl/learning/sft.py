"""Supervised fine-tuning: rows of JSON lines become pairs of given and learned tokens, which are
packed and learned by their next tokens (NextToken).

    {"prompt": "1+1=", "completion": "2"}
    {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"},
    {"role": "user", ...}, ...]}

Given and learned text are tokenised apart, as in RL, where the prompt is tokens before the
completion is text. A prompt may be empty if the tokenizer begins a text with a token of its own.

Shapes: T packed tokens, N pairs, R trained rows (places whose label is learned), D model, V vocab.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor

from llamarl.learning.logprobs import Narrowing, make_head
from llamarl.learning.segments import sum_by
from llamarl.learning.supervised import RowsToRead, Sums, SupervisedData, read_data, read_examples
from llamarl.models.attention import PackedAttention
from llamarl.models.build import Decoder
from llamarl.tasks.base import CACHED_PROMPTS, PromptMaker, Task, messages_of, refused_by_template
from llamarl.tasks.files import check_keys
from llamarl.tasks.special import Spelled, end_token, reply_ids, shown_turns, special_tokens
from llamarl.types import Prompt
from llamarl.words.texts import answer_text

ANSWER_KEYS = ("completion", "answer")  # where the row says nothing else


@dataclass(frozen=True, slots=True)
class SFTPair:
    """A prompt and the completion to learn, or a conversation."""

    token_ids: Tensor  # [P + L] int64; the completion ends with the end-of-text token
    learned: Tensor  # [P + L] bool; the first token, which has nothing before it, is not


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Whole pairs end to end, shifted once, here: [10,11,12] with prompt 10,11 and [20,21] with
    prompt 20 become

    input_ids 10 11 20    labels 11 12 21    positions 0 1 0
    cu_seqlens 0 2 3      rows 1 2           pairs 0 1
    """

    input_ids: Tensor  # [T] int64
    labels: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    cu_seqlens: Tensor  # [N+1] int64
    rows: Tensor  # [R] int64, in order: the places whose label is learned
    pairs: Tensor  # [R] int64: whose a row is


def make_pair(prompt: Prompt, tokenizer, max_tokens: int, *, chat: bool = False) -> SFTPair:
    """Make the pair of a task's prompt: meta["solution"] if the task has worked solutions, else
    meta["answer"], then the end token.

    tokenizer: transformers'. chat: the prompt is a turn of its chat template. ValueError if there
    is no answer or no end token, or for a pair of more than max_tokens.
    """
    text = prompt.meta.get("solution", prompt.meta.get("answer"))
    if text is None:
        raise ValueError(
            "the task gives prompts without answers; choose one with answers, or name their key"
        )
    pair = answered(prompt.prompt_ids, answer_text(text), tokenizer, chat=chat)
    length = pair.token_ids.numel()
    if length > max_tokens:
        raise ValueError(
            f"a pair has {length} tokens, the model takes {max_tokens}: drop the one beginning "
            f"{prompt.text[:50]!r}"
        )
    return pair


def answered(prompt_ids: Tensor, text: str, tokenizer, *, chat: bool = False) -> SFTPair:
    """Make a pair of a prompt and the text to learn behind it, which ends with the end token; that
    of a turn, if the prompt is one of the chat template. ValueError if there is none, or as from
    `text_ids`.
    """
    check_end_token(tokenizer)
    completion = reply_ids(tokenizer, prompt_ids.tolist(), text, chat=chat)
    return pair_of(prompt_ids, torch.tensor(completion))


def pair_of(prompt_ids: Tensor, completion_ids: Tensor) -> SFTPair:
    """Make a pair of a prompt [P] and its completion [L], both int64. ValueError if one of them has
    no token.
    """
    if not prompt_ids.numel() or not completion_ids.numel():
        raise ValueError("a prompt or an answer without tokens has no log-probability")
    token_ids = torch.cat([prompt_ids, completion_ids])
    return SFTPair(token_ids, torch.arange(token_ids.numel()) >= prompt_ids.numel())


def check_end_token(tokenizer) -> None:
    """ValueError if a tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer names no eos_token; set it in tokenizer_config.json")


def pack_pairs(pairs: list[SFTPair], device: str | torch.device = "cpu") -> PairBatch:
    """Pack one batch of at least one pair, each with a prompt of at least one token."""
    # The last token of a pair is only ever a label, the first one never.
    sizes = torch.tensor([p.token_ids.numel() - 1 for p in pairs])
    learned = torch.cat([p.learned[1:] for p in pairs])
    rows = learned.nonzero().squeeze(1)
    owners = torch.arange(len(pairs)).repeat_interleave(sizes)
    return PairBatch(
        input_ids=torch.cat([p.token_ids[:-1] for p in pairs]).to(device),
        labels=torch.cat([p.token_ids[1:] for p in pairs]).to(device),
        positions=torch.cat([torch.arange(size) for size in sizes]).to(device),
        cu_seqlens=F.pad(sizes.cumsum(0), (1, 0)).to(device),
        rows=rows.to(device),
        pairs=owners[rows].to(device),
    )


class NextToken:
    """The Objective of supervised fine-tuning (llamarl.learning.supervised). Its targets are the
    learned tokens, so a row counts by its length.
    """

    def num_tokens(self, pair: SFTPair) -> int:
        return pair.token_ids.numel() - 1  # the last one is only ever a label

    def num_targets(self, pair: SFTPair) -> int:
        return int(pair.learned.sum())

    def pack(self, pairs: Sequence[SFTPair], device: torch.device) -> PairBatch:
        if pairs:
            return pack_pairs(list(pairs), device)
        nothing = SFTPair(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool))
        return pack_pairs([nothing], device)

    def loss(self, decoder: Decoder, batch: PairBatch) -> tuple[Tensor, Sums, PackedAttention]:
        head = _head(decoder, batch)
        attention = PackedAttention(batch.cu_seqlens)
        logprobs_R, entropy_R = decoder(batch.input_ids, batch.positions, attention, head)
        loss = -logprobs_R.sum()
        sums = {"entropy": entropy_R.detach().sum()}
        balance = None if decoder.routing is None else decoder.routing.balance_loss()
        if balance is not None and torch.is_grad_enabled():  # held-out rows are measured without
            of_rows = balance * batch.rows.numel()
            loss = loss + of_rows
            sums["moe/balance_loss"] = of_rows.detach()
        return loss, sums, attention

    def measure(self, decoder: Decoder, batch: PairBatch) -> Sums:
        loss, _, _ = self.loss(decoder, batch)
        return {"loss": loss}

    def summary(self, sums: Mapping[str, float], num_targets: float) -> dict[str, float | None]:
        """Nats a held-out token, and the perplexity that they are."""
        loss = sums["loss"] / num_targets
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}


def _head(decoder: Decoder, batch: PairBatch) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    labels = batch.labels[batch.rows]
    narrowing = Narrowing.of(decoder.absent_rows, None, labels)
    return make_head(labels, batch.rows, narrowing=narrowing, logit_cap=decoder.logit_cap)


@torch.no_grad()
def completion_logprobs(decoder: Decoder, batch: PairBatch) -> Tensor:
    """[N] float64, nats, on the CPU: the log-probability of each pair's whole completion given its
    prompt, at temperature 1.
    """
    head = _head(decoder, batch)
    attention = PackedAttention(batch.cu_seqlens)
    logprobs_R, _ = decoder(batch.input_ids, batch.positions, attention, head)
    num_pairs = batch.cu_seqlens.numel() - 1
    return sum_by(logprobs_R.cpu().double(), batch.pairs.cpu(), num_pairs)


def read_pairs(
    path: str | Path,
    tokenizer,
    *,
    max_tokens: int,
    chat: bool = True,
    system_prompt: str | None = None,
    drop_long: bool = False,
) -> list[SFTPair]:
    """Read all rows of a file, tokenised; a row with "messages" is a conversation, any other has a
    prompt and an answer, under the first of ANSWER_KEYS that the row has.

    tokenizer: transformers'. chat: a prompt is a user turn of the tokenizer's chat template, if it
    has one. drop_long: rows of more than max_tokens are left out, with a warning; else they are bad
    rows. Errors as from `read_examples`.
    """
    check_end_token(tokenizer)
    maker = PromptMaker(
        tokenizer, chat=chat, system_prompt=system_prompt, max_prompt_tokens=max_tokens
    )

    spelled = Spelled(tokenizer)

    def to_pair(row: dict) -> SFTPair | None:
        if "messages" in row:
            pair = conversation_pair(row["messages"], tokenizer)
            spelled.note([message["content"] for message in row["messages"]])
        else:
            key = next((key for key in ANSWER_KEYS if key in row), ANSWER_KEYS[0])
            pair = _prompt_pair(row, key, tokenizer, maker)
            spelled.note([str(row["prompt"]), str(row[key])])
        if pair.token_ids.numel() > max_tokens and drop_long:
            return None
        if pair.token_ids.numel() > max_tokens:
            raise ValueError(
                f"{pair.token_ids.numel()} tokens, the model takes {max_tokens}; shorten the row "
                "or leave it out"
            )
        return pair

    return read_examples(path, to_pair, spelled=spelled, max_tokens=max_tokens)


def read_sft_data(task: RowsToRead, tokenizer) -> SupervisedData[SFTPair]:
    """Read the rows of task.path, and those held out, see read_data. Errors as from
    `read_pairs`.
    """
    read = partial(
        read_pairs,
        tokenizer=tokenizer,
        max_tokens=task.max_tokens,
        chat=task.chat,
        system_prompt=task.system_prompt,
        drop_long=task.drop_long,
    )
    return read_data(
        task,
        read,
        unit="rows",
        prompt_of=_prompt_of,
        content_of=_content_of,
    )


def _content_of(pair: SFTPair) -> str:
    """Return the tokens, and which of them are learned, as JSON."""
    return json.dumps(pair.token_ids.tolist()) + json.dumps(pair.learned.tolist())


def _prompt_of(pair: SFTPair) -> bytes:
    """Return what is given before the first token that is learned; all of a row where that is at
    most the token that begins a text.
    """
    given = int(pair.learned.long().argmax())
    ids = pair.token_ids[:given] if given > 1 else pair.token_ids
    return ids.numpy().tobytes()


def read_answers(
    task: Task,
    tokenizer,
    *,
    max_tokens: int,
    num_eval: int,
    fingerprints: dict[str, str],
    chat: bool = False,
) -> SupervisedData[SFTPair]:
    """Return a task's prompts with their targets. All are checked now, unless the task makes them
    on demand: then only the first is, and each other one at its step. chat: prompts are turns of
    the chat template.

    ValueError for a prompt without a target, or with more than max_tokens.
    """

    def pair(i: int) -> SFTPair:
        return make_pair(task.train_prompt(i), tokenizer, max_tokens, chat=chat)

    train: Sequence[SFTPair] = PairsOnDemand(task.num_train, pair)
    if task.train_digest:
        train = [pair(i) for i in range(task.num_train)]
    assert train[0].learned.any(), "a pair has an answer"
    asked = range(min(num_eval, task.num_eval))
    return SupervisedData(
        train=train,
        held_out=[make_pair(task.eval_prompt(j), tokenizer, max_tokens, chat=chat) for j in asked],
        fingerprints=fingerprints,
    )


class PairsOnDemand(Sequence[SFTPair]):
    """Pairs by number, which are made when they are asked for; the last ones are kept."""

    def __init__(self, size: int, make: Callable[[int], SFTPair]):
        self._size = size
        self._make = lru_cache(CACHED_PROMPTS)(make)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, place: int) -> SFTPair: ...

    @overload
    def __getitem__(self, place: slice) -> list[SFTPair]: ...

    def __getitem__(self, place: int | slice) -> SFTPair | list[SFTPair]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(self._size))]
        return self._make(range(self._size)[place])


def conversation_pair(messages: object, tokenizer) -> SFTPair:
    """Make a pair of a conversation in the tokenizer's chat template; each assistant turn is
    learned, up to and with the token that ends it.

    ValueError, saying what is wrong, for messages that are not right, or a template that is absent
    or shows an earlier turn otherwise once later ones follow.
    """
    messages = _checked_messages(messages)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "a conversation, but the tokenizer has no chat template; give rows a prompt and a "
            "completion"
        )

    def shown(count: int, reply: bool) -> str:
        with refused_by_template():
            return tokenizer.apply_chat_template(
                messages[:count], tokenize=False, add_generation_prompt=reply
            )

    with refused_by_template():
        marked = shown_turns(tokenizer, messages, reply=False)
    whole = marked.text
    ids_of = special_tokens(tokenizer).ids
    end = end_token(tokenizer, chat=True)
    at = 0
    ids: list[int] = []
    learned: list[bool] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        given = shown(i, reply=True)
        done = shown(i + 1, reply=False)
        if not (given.startswith(whole[:at]) and done.startswith(given) and whole.startswith(done)):
            raise ValueError(
                f"the chat template shows message {i + 1} otherwise once others follow it, so its "
                "tokens are not those of a reply; split the conversation into one row a reply"
            )
        context = ids_of(marked.part(at, len(given)), behind=ids[-1] if ids else None)
        front = next(reversed([*ids, *context]), None)
        reply = ids_of(marked.part(len(given), len(done)), behind=front)
        # What the template puts behind the end token is never sampled: it belongs to the next
        # turn's context.
        ends = [place for place, token in enumerate(reply) if token == end]
        size = ends[-1] + 1 if ends else len(reply)
        ids += context + reply
        learned += [False] * len(context)
        learned += [True] * size
        learned += [False] * (len(reply) - size)
        at = len(done)
    last = len(learned) - learned[::-1].index(True)
    if learned[0]:
        raise ValueError(
            "the chat template begins with the reply: its first token has nothing before it"
        )
    return SFTPair(torch.tensor(ids[:last]), torch.tensor(learned[:last]))


def _prompt_pair(row: dict, key: str, tokenizer, maker: PromptMaker) -> SFTPair:
    """Make the pair of a row with a prompt, and its answer under this key."""
    check_keys(row, "prompt", key)
    for needed in ("prompt", key):
        if not isinstance(row[needed], (str, int, float)):
            raise ValueError(f'"{needed}" must be text, this is {type(row[needed]).__name__}')
    answer = answer_text(row[key])
    if answer == "":
        raise ValueError(f'"{key}" must be text that is not empty')
    prompt_ids = maker.ids(str(row["prompt"]))
    if not prompt_ids:
        raise ValueError(
            '"prompt" is empty, and this tokenizer begins no text with a token of its own: '
            "the first token needs something to look at"
        )
    return answered(torch.tensor(prompt_ids), answer, tokenizer, chat=maker.shows_turns)


def _checked_messages(messages: object) -> list[dict]:
    """Returns them as they are, of which a template may read more. ValueError if there is no turn
    to learn.
    """
    roles = [message.role for message in messages_of(messages, "messages")]
    for one, other in itertools.pairwise(roles):
        if one == other == "assistant":
            raise ValueError("two assistant messages in a row; join them")
    if "assistant" not in roles:
        raise ValueError("no assistant message: there is nothing to learn")
    assert isinstance(messages, list), "messages_of refuses all else"
    return messages
