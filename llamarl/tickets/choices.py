"""The prompts that a sampler chose, by ticket, and what it has still to learn. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from llamarl.tickets.sampler import PromptSampler
from llamarl.types import Verdict


class PromptChoices:
    """A sampler's choices for the tickets that have not ended. sampler: None: a ticket's prompt is
    a function of its number, so there are none.

    Choices are made in the order of tickets, and kept until the ticket ends: with max_lag 0 they do
    not depend on who asks first, and a ticket that starts again has the prompt that it had.
    """

    def __init__(self, sampler: PromptSampler | None):
        self._sampler = sampler
        self._prompts: dict[int, int] = {}  # by ticket
        self._next = 0  # the first ticket without a choice
        # What came of the last step's groups, until it is trained on.
        self._unlearned: Mapping[int, Verdict] = {}

    def of(self, ticket: int) -> int | None:
        """Return the number of a ticket's prompt; None if no sampler chose it."""
        if self._sampler is None:
            return None
        while self._next <= ticket:
            busy = set(self._prompts.values())
            self._prompts[self._next] = self._sampler.choose(self._next, busy)
            self._next += 1
        return self._prompts.get(ticket)

    def ended(self, verdicts: Mapping[int, Verdict]) -> None:
        """Have the sampler learn what came of tickets that have ended, in their order."""
        for ticket in sorted(verdicts):
            prompt = self._prompts.pop(ticket, None)
            if self._sampler is not None and prompt is not None:
                self._sampler.learn(prompt, verdicts[ticket])

    def taken(self, verdicts: Mapping[int, Verdict]) -> None:
        """Note what came of a step's tickets, which end once it is trained on."""
        self.trained()
        self._unlearned = verdicts

    def trained(self) -> None:
        """End the tickets of the step that was taken last."""
        self.ended(self._unlearned)
        self._unlearned = {}

    def untaken(self) -> None:
        """Forget what `taken` noted: the step is given up."""
        self._unlearned = {}

    def state_dict(self) -> dict:
        """Return the choices, and all that the sampler has learned, as JSON values."""
        return {
            "next_choice": self._next,
            "choices": [[ticket, self._prompts[ticket]] for ticket in sorted(self._prompts)],
            "sampler": self._sampler.state_dict() if self._sampler else None,
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Go on from a ledger's state. What was started without a sampler has no choice, and no
        ticket before that ever has.
        """
        if self._sampler is None:
            return
        learned = state["sampler"]
        if learned is None or learned["num_prompts"] != self._sampler.num_prompts:
            self._prompts = {}  # another sampler's, or of other rows
            self._next = state["frontier"]
            return
        self._prompts = choices_of(state)
        self._next = state["next_choice"]
        self._sampler.load_state_dict(learned)


def choices_of(state: Mapping) -> dict[int, int]:
    """Return ticket -> prompt of a ledger's state, where a sampler chose."""
    return {ticket: prompt for ticket, prompt in state["choices"]}
