"""Special tokens: only the chat template writes them. Texts of rows, users and completions can
only spell them.

    turns --chat template--> Shown(text, foreign) --SpecialTokens.ids--> token ids

A tokenizer reads `<|im_end|>` as the end of a turn wherever it occurs. We encode a text that
spells a special token in one of two other ways. If the whole text is somebody's, transformers
splits the special tokens. If a template surrounds it, we rename the template's special tokens, in
a copy of the tokenizer that knows only the new names. All other texts are encoded as usual.

Some tokenizers put a mark in front of a text (SentencePiece's `▁`). A text that follows another
must not have one, so we encode it with something in front and take that off again.

A token is special if the tokenizer declares it special or names it (eos_token and so on). Other
added tokens, such as Qwen's `<think>`, are words that a text may write.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from llamarl.models.directory import read_json

log = logging.getLogger(__name__)

Span = tuple[int, int]  # begin and end in a text, in characters
Turns = list[dict[str, str]]
PLAIN = -1  # in place of a token's id: some token of plain text
# Texts to stand for plain text in front of another. The first with which no merge is made is taken.
_FRONTS = ("\n", "=", "⟦")


@dataclass(frozen=True, slots=True)
class Shown:
    """A text of a template and others. foreign: the segments that others wrote and that could be
    part of a special token's spelling, in order.
    """

    text: str
    foreign: tuple[Span, ...] = ()

    def part(self, begin: int, end: int) -> Shown:
        """Return the text from begin to end."""
        cut = []
        for first, last in self.foreign:
            if first < end and last > begin:
                cut.append((max(first, begin) - begin, min(last, end) - begin))
        return Shown(self.text[begin:end], tuple(cut))

    def after(self, front: str) -> Shown:
        """Return the text with a template's text in front."""
        size = len(front)
        moved = tuple((begin + size, end + size) for begin, end in self.foreign)
        return Shown(front + self.text, moved)


class SpecialTokens:
    """Knows the special tokens of a tokenizer, and encodes texts that spell them."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        decoder = getattr(tokenizer, "added_tokens_decoder", {})
        added = decoder.values()
        words = {str(token) for token in added if token.special}
        words |= set(getattr(tokenizer, "all_special_tokens", ()))
        words.discard("")
        # The longest first, as the tokenizer takes them.
        self._words = sorted(words, key=lambda word: (-len(word), word))
        self._added = {index: str(token) for index, token in decoder.items()}
        self._pattern = _any_of(self._words)
        self._mark = f"⟦{secrets.token_hex(8)}:"  # which no text holds
        self._marks = re.compile(re.escape(self._mark) + r"(\d+)⟧")
        self._most = max(map(len, self._words), default=0)
        self._heads: set[str] = set()
        self._tails: set[str] = set()
        for word in words:
            for size in range(1, len(word)):
                self._heads.add(word[:size])
                self._tails.add(word[size:])
        self._firsts = {word[0] for word in words}
        self._lasts = {word[-1] for word in words}
        self._joined = "\0".join(self._words)
        self._normalize = None
        normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        # Those that the tokenizer looks for behind its normalizer.
        behind = [str(token) for token in added if token.special and token.normalized]
        if normalizer is not None and behind:
            self._normalize = normalizer.normalize_str
            # Some normalizers put a mark in front of a text, which a word within one has not.
            self._behind = _any_of([self._normalize(word).lstrip("▁ ") for word in behind])

    def spelling(self, text: str) -> str | None:
        """Return the first special token that a text spells; None: there is none."""
        if not self._words:
            return None
        found = self._pattern.search(text)
        if found is None and self._normalize is not None:
            found = self._behind.search(self._normalize(text))
        return found and found.group()

    def text_ids(self, text: str, *, add_special_tokens: bool, behind: int = PLAIN) -> list[int]:
        """Return the token ids of a text that is somebody's as a whole. add_special_tokens: add the
        tokens that the tokenizer puts around a text, but no end token; else the text follows the
        token `behind`. ValueError if the text has no other tokens than special ones.
        """
        word = self.spelling(text)
        if word is None and add_special_tokens:
            return self._usual_ids(text, add_special_tokens)
        if word is None:
            return self._following(lambda front: self._usual_ids(front + text, False), behind)

        def split(front: str) -> list[int]:
            return list(
                self._tokenizer.encode(
                    front + text, add_special_tokens=False, split_special_tokens=True
                )
            )

        ids = split("") if add_special_tokens else self._following(split, PLAIN)
        self._check(ids, 0, word)
        return self._surrounded(ids) if add_special_tokens else ids

    def _usual_ids(self, text: str, add_special_tokens: bool) -> list[int]:
        if not add_special_tokens:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        ids = list(self._tokenizer.encode(text))
        return ids[: len(ids) - self.num_ends]

    def _surrounded(self, ids: Sequence[int]) -> list[int]:
        """Add the tokens that the tokenizer puts around a text, but no end token."""
        before, after = self._around
        return [*before, *ids, *after[: len(after) - self.num_ends]]

    @cached_property
    def num_ends(self) -> int:
        """How many end tokens the tokenizer adds to every text (add_eos_token). A prompt has none,
        because what follows it would begin another text.
        """
        end = getattr(self._tokenizer, "eos_token_id", None)
        if end is None:
            return 0
        count = 0
        for token in reversed(self._tokenizer.encode("0")):
            if token != end:
                break
            count += 1
        return count

    def _following(self, encode: Callable[[str], list[int]], behind: int) -> list[int]:
        """Return the ids of a text that follows the token `behind`. encode(front): encodes the text
        with `front` before it.
        """
        if self._begins_marked:
            fronts = (self._added[behind],) if behind in self._added else _FRONTS
            for front in fronts:
                alone = self._usual_ids(front, False)
                ids = encode(front)
                if ids[: len(alone)] == alone:
                    return ids[len(alone) :]
        return encode("")

    @cached_property
    def _begins_marked(self) -> bool:
        """Whether the tokenizer puts a mark in front of a text that does not follow another."""
        bare = self._usual_ids("0", False)
        front = self._usual_ids(_FRONTS[0], False)
        return self._usual_ids(f"{_FRONTS[0]}0", False) not in (bare, [*front, *bare])

    def foreign_in(self, text: str, begin: int = 0, end: int | None = None) -> list[Span]:
        """Return the segments of text[begin:end], which is somebody's, that could be part of a
        special token's spelling: a whole one, or a segment at an edge that its neighbour completes.
        """
        if not self._words:
            return []
        end = len(text) if end is None else end
        core = text[begin:end].strip()  # a template may strip it
        if not core:
            return []
        first = text.index(core, begin)
        last = first + len(core)
        found = [match.span() for match in self._pattern.finditer(text, begin, end)]
        is_inside = len(core) < self._most and core in self._joined
        is_normalized = self._normalize and self._behind.search(self._normalize(core))
        if is_inside or is_normalized:
            return [(first, last)]
        tail = core[-self._most :]
        if any(sign in tail for sign in self._firsts):
            size = _longest(len(tail), lambda size: tail[-size:] in self._heads)
            found.append((last - size, last))
        head = core[: self._most]
        if any(sign in head for sign in self._lasts):
            size = _longest(len(head), lambda size: head[:size] in self._tails)
            found.append((first, first + size))
        return _merged(found)

    def shown(self, render: Callable[[Turns], str], turns: Turns, foreign: Sequence[list[Span]]):
        """Render turns in a chat template and find others' segments in the result. foreign: the
        segments of each turn's content. ValueError if the template changes them.
        """
        text = render(turns)
        pieces: list[str] = []
        marked = []
        for turn, spans in zip(turns, foreign):
            content = turn["content"]
            parts = []
            at = 0
            for begin, end in spans:
                parts += [content[at:begin], f"{self._mark}{len(pieces)}⟧"]
                pieces.append(content[begin:end])
                at = end
            marked.append({**turn, "content": "".join([*parts, content[at:]])})
        if not pieces:
            return Shown(text)
        with_marks = render(marked)
        found = self._filled(with_marks, pieces)
        if found.text == text:
            return found
        # The template changes a segment. That is harmless if no special token came or went by it.
        if self._pattern.findall(text) == self._pattern.findall(with_marks):
            return Shown(text)
        word = next(filter(None, map(self.spelling, pieces)), pieces[0])
        raise ValueError(
            f"the text spells the special token {word!r}, and the chat template changes the text, "
            "so that its own special tokens cannot be told from it; take it out"
        )

    def _filled(self, text: str, pieces: Sequence[str]) -> Shown:
        """Put the pieces in place of their marks in a text."""
        parts = []
        spans = []
        size = 0
        at = 0
        for mark in self._marks.finditer(text):
            piece = pieces[int(mark.group(1))]
            parts += [text[at : mark.start()], piece]
            size += mark.start() - at
            spans.append((size, size + len(piece)))
            size += len(piece)
            at = mark.end()
        return Shown("".join([*parts, text[at:]]), tuple(spans))

    def ids(
        self, shown: Shown, *, add_special_tokens: bool = False, behind: int | None = None
    ) -> list[int]:
        """Return the token ids of a template's text around others'. behind: the token before it;
        None: it is the beginning. ValueError if others' text would give special tokens.
        """
        if behind is None:
            return self._shown_ids(shown, add_special_tokens)
        return self._following(lambda front: self._shown_ids(shown.after(front), False), behind)

    def _shown_ids(self, shown: Shown, add_special_tokens: bool) -> list[int]:
        text = shown.text
        word = self._crossing(shown)
        if word is None:
            return self._usual_ids(text, add_special_tokens)
        backend, known = self._renamed(word)
        parts = []
        own: list[str] = []
        at = 0

        def renamed(found: re.Match[str]) -> str:
            own.append(found.group())
            return self._name(found.group())

        for begin, end in (*shown.foreign, (len(text), len(text))):
            parts += [self._pattern.sub(renamed, text[at:begin]), text[begin:end]]
            at = end
        encoded = backend.encode("".join(parts), add_special_tokens=False).ids
        ids = [known.get(token, token) for token in encoded]
        self._check(ids, self._num_special(self._tokenizer.convert_tokens_to_ids(own)), word)
        return self._surrounded(ids) if add_special_tokens else ids

    def _crossing(self, shown: Shown) -> str | None:
        """Return a special token whose spelling is partly somebody's text; None without one."""
        for begin, end in shown.foreign:
            near = shown.text[max(0, begin - self._most) : end + self._most]
            at = begin - max(0, begin - self._most)
            for found in self._overlapping(near, at, at + end - begin):
                return found
            word = self.spelling(shown.text[begin:end])
            if word is not None:
                return word
        return None

    def _overlapping(self, text: str, begin: int, end: int) -> list[str]:
        """Return the special tokens spelled anywhere in a text that reach into begin..end."""
        found = []
        for start in range(max(0, begin - self._most), end):
            match = self._pattern.match(text, start)
            if match and match.end() > begin:
                found.append(match.group())
        return found

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer adds before and after every text."""
        bare = self._tokenizer.encode("0", add_special_tokens=False)
        whole = self._tokenizer.encode("0", add_special_tokens=True)
        for begin in range(len(whole) - len(bare) + 1):
            if whole[begin : begin + len(bare)] == bare:
                return whole[:begin], whole[begin + len(bare) :]
        raise ValueError("the tokenizer changes a text when it adds special tokens to it")

    @cached_property
    def _guarded(self) -> set[int]:
        """The ids of special tokens that no text may give: all but the unknown token, which a model
        gives itself, and the padding token, which may be a word.
        """
        t = self._tokenizer
        harmless = {t.unk_token_id, t.pad_token_id} - {t.eos_token_id, t.bos_token_id}
        return set(t.convert_tokens_to_ids(self._words)) - harmless

    def check_like(self, ids: Sequence[int], like: Sequence[int], texts: Sequence[str]) -> None:
        """Raise ValueError if the ids of texts have more special tokens than those of harmless
        texts.
        """
        for word in filter(None, map(self.spelling, texts)):
            self._check(ids, self._num_special(like), word)

    def _num_special(self, ids: Sequence[int]) -> int:
        return sum(token in self._guarded for token in ids)

    def _check(self, ids: Sequence[int], num_own: int, word: str) -> None:
        """Raise ValueError if there are other special tokens than the template's."""
        num_found = self._num_special(ids)
        if num_found > num_own:
            raise ValueError(
                f"the text spells the special token {word!r}, and this tokenizer has no other "
                "tokens for that; take it out"
            )
        if num_found < num_own:
            raise ValueError(
                f"the text spells the special token {word!r}, and beside it the chat template's "
                "own special tokens cannot be encoded; take it out"
            )

    def _name(self, word: str) -> str:
        """Return the name that a template's special token has while it is encoded."""
        return f"{self._mark}{self._words.index(word)}⟧"

    def _renamed(self, word: str):
        """Return the tokenizer with its special tokens renamed, and its ids of added tokens ->
        those of the given tokenizer.
        """
        if not hasattr(self._tokenizer, "backend_tokenizer"):
            kind = type(self._tokenizer).__name__
            raise ValueError(
                f"the text spells the special token {word!r}, which {kind} cannot tell from one "
                "of the chat template's; take it out, or save the tokenizer as a tokenizer.json"
            )
        return self._renamed_backend

    @cached_property
    def _renamed_backend(self):
        from tokenizers import AddedToken, Tokenizer

        given = self._tokenizer.backend_tokenizer
        made = Tokenizer(given.model)  # shares the model
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(given, part) is not None:
                setattr(made, part, getattr(given, part))
        known = {}
        for index, token in sorted(given.get_added_tokens_decoder().items()):
            is_special = token.content in self._words
            name = self._name(token.content) if is_special else token.content
            renamed = AddedToken(
                name,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=is_special,
            )
            made.add_tokens([renamed])
            known[made.token_to_id(name)] = index
        return made, known


@lru_cache(maxsize=8)
def special_tokens(tokenizer) -> SpecialTokens:
    """Return the SpecialTokens of a tokenizer, which is not changed afterwards."""
    return SpecialTokens(tokenizer)


def text_ids(
    tokenizer, text: str, *, add_special_tokens: bool = False, behind: int = PLAIN
) -> list[int]:
    """Return the token ids of somebody's text, which gives no special token. add_special_tokens:
    the text is the beginning; else it follows the token `behind`. ValueError as from
    `SpecialTokens.text_ids`.
    """
    special = special_tokens(tokenizer)
    return special.text_ids(text, add_special_tokens=add_special_tokens, behind=behind)


@lru_cache(maxsize=8)
def turn_end(tokenizer) -> int | None:
    """Return the special token that the chat template writes behind a reply; None if there is
    none, or no template, or one that refuses a question and its reply.
    """
    from jinja2.exceptions import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        return None
    mark = "0answer0"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None
    special = special_tokens(tokenizer)
    word = special.spelling(text.rpartition(mark)[2])
    return None if word is None else tokenizer.convert_tokens_to_ids(word)


def stop_tokens(path: Path, tokenizer, *, chat: bool = True) -> tuple[int, ...]:
    """Return every token that ends a completion: the tokenizer's, those of generation_config.json
    or without that of config.json, as transformers has it, and with `chat` the one that the chat
    template ends a reply with. ValueError for a token that is no number.
    """
    ids = [tokenizer.eos_token_id]
    if chat:
        ids.append(turn_end(tokenizer))
    file = end_tokens_file(path)
    if file.is_file():
        more = read_json(file).get("eos_token_id")
        ids += more if isinstance(more, list) else [more]
        if not all(i is None or type(i) is int for i in ids):
            raise ValueError(
                f"{file}: eos_token_id={more!r}: need a token id, or a list of token ids"
            )
    return tuple(sorted({i for i in ids if i is not None}))


def end_tokens_file(path: Path) -> Path:
    """Return the file of a model directory that lists end tokens beside the tokenizer's."""
    own = path / "generation_config.json"
    return own if own.is_file() else path / "config.json"


def reply_ids(tokenizer, prompt_ids: Sequence[int], text: str, *, chat: bool) -> list[int]:
    """Return the token ids of a text as if it had been sampled behind a prompt, with the end token
    if there is one. chat: the prompt is turns of the chat template. ValueError as from `text_ids`.
    """
    ids = text_ids(tokenizer, text, behind=int(prompt_ids[-1]) if len(prompt_ids) else PLAIN)
    end = end_token(tokenizer, chat=chat)
    return ids if end is None else [*ids, end]


def end_token(tokenizer, *, chat: bool) -> int | None:
    """Return the token that ends a learned reply: the template's if prompts are its turns and it
    has one, else the tokenizer's; None without either.
    """
    own = turn_end(tokenizer) if chat else None
    return getattr(tokenizer, "eos_token_id", None) if own is None else own


def shown_turns(
    tokenizer, turns: Turns, *, reply: bool, foreign: Sequence[list[Span]] | None = None
) -> Shown:
    """Show turns in the tokenizer's chat template. reply: up to where the assistant's turn begins.
    foreign: others' segments of each turn's content; None: all of it is theirs. ValueError as from
    `SpecialTokens.shown`.
    """
    special = special_tokens(tokenizer)
    if foreign is None:
        foreign = [special.foreign_in(turn["content"]) for turn in turns]

    def render(turns: Turns) -> str:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=reply)

    return special.shown(render, turns, foreign)


def chat_ids(
    tokenizer, turns: Turns, *, reply: bool, foreign: Sequence[list[Span]] | None = None
) -> list[int]:
    """Return the token ids of turns in the tokenizer's chat template. foreign: others' segments of
    each turn's content; None: all of it is theirs. ValueError as from `SpecialTokens.shown` and
    `SpecialTokens.ids`.
    """
    special = special_tokens(tokenizer)
    if foreign is None:
        foreign = [special.foreign_in(turn["content"]) for turn in turns]
    if not any(foreign):
        ids = tokenizer.apply_chat_template(
            turns, add_generation_prompt=reply, tokenize=True, return_dict=False
        )
        return list(ids)
    return special.ids(shown_turns(tokenizer, turns, reply=reply, foreign=foreign))


class Spelled:
    """Counts how many rows of a file spell a special token."""

    def __init__(self, tokenizer):
        self._special = special_tokens(tokenizer)
        self._count = 0

    def note(self, texts: Sequence[str]) -> None:
        """Count a row with these texts."""
        self._count += any(self._special.spelling(text) is not None for text in texts)

    def warn(self, what: str, num_rows: int) -> None:
        """Warn if there are any."""
        warn_of_spelled(what, self._count, num_rows)


def warn_of_spelled(what: str, count: int, num_rows: int, first: str = "") -> None:
    """Warn how many rows of a file or a task spell a special token. first: where the first is."""
    if count:
        log.warning(
            "%s: %d of %d rows spell a special token in their texts%s; it is read as plain text, "
            "since only the chat template writes special tokens",
            what,
            count,
            num_rows,
            f", first {first}" if first else "",
        )


def _any_of(words: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, words)) or r"(?!)")


def _longest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest size, up to the most, that fits; 0: none does."""
    return next((size for size in range(most, 0, -1) if fits(size)), 0)


def _merged(spans: list[Span]) -> list[Span]:
    """Return the spans in order, without empty ones; overlapping ones are joined."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if begin == end:
            continue
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
