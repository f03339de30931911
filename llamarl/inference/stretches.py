"""Stretches: what running completions have grown by, for executors that read ahead."""

from __future__ import annotations

from collections.abc import Sequence

from llamarl.executor import RecordSender
from llamarl.inference.protocol import GenerationEngine, can_stream
from llamarl.tickets.prompts import AnyPrompts, chosen
from llamarl.types import Completion, Stretch


class StretchSender:
    """Sends the new tokens of an engine's completions to all ends.

    Decoding must not wait for a reader. While a channel is full nothing is sent: the tokens go with
    the next ones, and a completion that ends meanwhile gets no last stretch.
    """

    def __init__(
        self,
        ends: Sequence[RecordSender[Stretch]],
        engine: GenerationEngine,
        prompts: AnyPrompts,
        *,
        stream: int,
    ):
        assert not ends or can_stream(engine), (
            f"{type(engine).__name__} does not tell what it samples"
        )
        self._ends = ends
        self._engine = engine
        self._prompts = prompts
        self._stream = stream  # of the engine
        # How many tokens of each live completion were sent.
        self._sent: dict[tuple[int, int], int] = {}

    def send(self) -> None:
        """Send the new tokens of live completions."""
        if not self._has_room():
            return
        assert can_stream(self._engine), "asked when this was made"
        for new in self._engine.new_tokens(self._stream):
            prompt = chosen(self._prompts, new.ticket)
            self._sent[new.ticket, new.sample_index] = new.begin + new.token_ids.numel()
            self._put(Stretch(**new._asdict(), has_ended=False, prompt=prompt))

    def end(self, completion: Completion) -> None:
        """Send the last stretch of a completion, if there was one before."""
        sent = self._sent.pop((completion.ticket, completion.sample_index), None)
        if sent is None or not self._has_room():
            return
        self._put(
            Stretch(
                ticket=completion.ticket,
                sample_index=completion.sample_index,
                begin=sent,
                token_ids=completion.token_ids[sent:],
                has_ended=True,
                prompt=chosen(self._prompts, completion.ticket),
            )
        )

    def _has_room(self) -> bool:
        return bool(self._ends) and all(end.has_room() for end in self._ends)

    def _put(self, stretch: Stretch) -> None:
        for end in self._ends:
            end.put(stretch)
