"""Environments that benchmarks play (docs/data.md), in workers: standard library alone."""

import random
import re
import time

NUM_TURNS = 4
SAID = "5+6="  # between two turns
TOOL_S = 0.2  # of a slow tool


class Calculator:
    """Tools over a row: its sum of three numbers, of which the calculator adds up the first two."""

    def reset(self, prompt):
        """Take the numbers of "12+34+21="."""
        self.numbers = [int(number) for number in prompt.rstrip("=").split("+")]

    def add(self) -> str:
        """Add up the first two numbers, and return the shorter sum."""
        first, second, *others = self.numbers
        self.numbers = [first + second, *others]
        return "  " + "+".join(map(str, self.numbers)) + "="


class Sums:
    """Two sums, one after the other. A right answer is worth a half."""

    def init(self):
        """Ask for the first sum."""
        self.turns = 0
        return self._ask(), []

    def step(self, message):
        """Reward the answer, and ask for the second sum or end."""
        self.turns += 1
        reward = 0.5 if message["content"].strip() == self.answer else 0.0
        if self.turns == 2:
            return [], True, reward
        return self._ask(), False, reward

    def _ask(self) -> str:
        first, second = random.randint(10, 49), random.randint(10, 49)
        self.answer = str(first + second)
        return f"{first}+{second}="


class Talk:
    """A dialogue of NUM_TURNS turns, whatever the policy says in them."""

    def init(self):
        """Begin with a prompt of 48 characters."""
        self.turns = 0
        return "12+34=46" * 6, []

    def step(self, message):
        """Return four characters, or the end."""
        self.turns += 1
        return SAID, self.turns == NUM_TURNS, 0.0


class SlowTalk(Talk):
    """The same with a tool that takes its time, without the processor."""

    def step(self, message):
        """Return four characters, after a while."""
        time.sleep(TOOL_S)
        return super().step(message)


class Monologue(Talk):
    """The same prompt, and one turn."""

    def step(self, message):
        """Return the end."""
        return [], True, 0.0


class HigherLower:
    """Find a number from 1 to LARGEST in MOST_GUESSES turns, told which way it lies after each.

    By halves every number is found. A model that was not trained for it is shown a game, which was
    not played well, so that it answers with numbers.
    """

    LARGEST = 15
    MOST_GUESSES = 4

    def init(self):
        """Draw the number, show a game, and ask for the first guess."""
        self.number = random.randint(1, self.LARGEST)
        self.guesses = 0
        asked = f"umber from 1 to {self.LARGEST}?"
        shown = ["N" + asked, "3", "Higher.", "14", "Lower.", "9", "Yes. New n" + asked]
        messages = []
        for i, text in enumerate(shown):
            messages.append({"role": ("user", "assistant")[i % 2], "content": text})
        return messages, []

    def step(self, message):
        """Compare the guess. The reward is 1 for the number itself."""
        self.guesses += 1
        found = re.search(r"\d+", message["content"])
        guess = int(found.group()) if found else None
        if guess == self.number:
            return [], True, 1.0
        is_last = self.guesses == self.MOST_GUESSES
        if guess is None:
            return "Say a number.", is_last, 0.0
        return "Higher." if self.number > guess else "Lower.", is_last, 0.0
