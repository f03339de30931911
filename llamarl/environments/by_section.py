"""The dialogues with several environments: to the engine they are like those with one.

    begin, hear, abort --> the Dialogues of the prompt's section --> poll --> GoOn, Over

With `reproducible` nothing goes on before all environments of all sections have answered, as with
one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llamarl.environments.dialogues import Dialogues, GoOn, Over
from llamarl.environments.pool import wait_for_any
from llamarl.inference.kept import Key
from llamarl.inference.sampler import SamplingParams
from llamarl.types import Completion, Prompt


class DialoguesBySection:
    """Keeps the dialogues of one replica, each with the environment of its prompt's section. What
    Dialogues has, this has too.

    by_section: the dialogues of each section. section_of: a prompt's.
    """

    def __init__(
        self,
        by_section: Mapping[str, Dialogues],
        *,
        section_of: Callable[[Prompt], str],
        reproducible: bool,
    ):
        self._by_section = dict(by_section)
        self._all = list(self._by_section.values())
        self._section_of = section_of
        self._reproducible = reproducible

    @property
    def num_open(self) -> int:
        """How many dialogues have not ended."""
        return sum(dialogues.num_open for dialogues in self._all)

    @property
    def num_opening(self) -> int:
        """How many dialogues wait for the first words of their environment."""
        return sum(dialogues.num_opening for dialogues in self._all)

    @property
    def num_acting(self) -> int:
        """How many environments are at work."""
        return sum(dialogues.num_acting for dialogues in self._all)

    def start(self) -> None:
        """Block until a worker of each has imported its environment. ValueError says what is wrong
        with it.
        """
        for dialogues in self._all:
            dialogues.start()

    def wait(self, timeout_s: float) -> None:
        """Block until an environment has answered, at most so long."""
        wait_for_any([dialogues.pool for dialogues in self._all], timeout_s)

    def begin(self, key: Key, prompt: Prompt, params: SamplingParams) -> Completion:
        """Begin a dialogue, and return its completion, which has no token yet."""
        return self._of(prompt).begin(key, prompt, params)

    def restore(
        self, key: Key, prompt: Prompt, params: SamplingParams, completion: Completion
    ) -> None:
        """Go on with a dialogue from its tokens: its environment is played again."""
        self._of(prompt).restore(key, prompt, params, completion)

    def hear(self, key: Key, completion: Completion) -> None:
        """Note that a dialogue's turn has ended; nothing if it was aborted."""
        for dialogues in self._all:
            dialogues.hear(key, completion)

    def abort(self, ticket: int | None, stream: int | None = None) -> None:
        """End the dialogues of a ticket and a stream (None: of any) that no engine is sampling."""
        for dialogues in self._all:
            dialogues.abort(ticket, stream)

    def poll(self) -> tuple[list[GoOn], list[Over]]:
        """Return what the engine is to sample next, and what has ended since the last call."""
        for dialogues in self._all:
            dialogues.take_answers()
        moves: list[GoOn] = []
        if not (self._reproducible and self.num_acting):
            for dialogues in self._all:
                moves += dialogues.pop_moves()
        return moves, self.pop_over()

    def pop_over(self) -> list[Over]:
        """Return what has ended since the last call."""
        over: list[Over] = []
        for dialogues in self._all:
            over += dialogues.pop_over()
        return over

    def close(self) -> None:
        """End all environments."""
        for dialogues in self._all:
            dialogues.close()

    def _of(self, prompt: Prompt) -> Dialogues:
        return self._by_section[self._section_of(prompt)]
