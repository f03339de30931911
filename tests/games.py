"""Environments for tests, which the workers of a pool import by path."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor


class Echo:
    """A dialogue of three turns, which answers with how much it has heard."""

    def init(self):
        self.heard = 0
        self.turns = 0
        return "12+", []

    def step(self, message):
        self.turns += 1
        self.heard += len(message["content"]) + 1
        return f"{self.heard}=", self.turns == 3, 0.25


class Silent(Echo):
    """It listens to three turns, says nothing, and rewards the second alone."""

    def step(self, message):
        self.turns += 1
        nothing = ["", [], [{"role": "user", "content": ""}]][self.turns % 3]
        return nothing, self.turns == 3, float(self.turns == 2)


class Held(Echo):
    """After HOLD_AFTER turns of a worker it makes a file HELD_FILE, and waits for as long as there
    is a file HOLD_FILE.
    """

    turns_of_worker = 0

    def step(self, message):
        Held.turns_of_worker += 1
        is_late = Held.turns_of_worker > int(os.environ["HOLD_AFTER"])
        while is_late and os.path.exists(os.environ["HOLD_FILE"]):
            open(os.environ["HELD_FILE"], "w").close()
            time.sleep(0.02)
        return super().step(message)


class Endless(Echo):
    """It goes on as long as it is let."""

    def step(self, message):
        messages, _, reward = super().step(message)
        return messages, False, [reward, reward]


class Noisy(Echo):
    """It says something else each time, whatever seed it is given."""

    def step(self, message):
        if message["content"] == "die":
            os._exit(3)
        return f"{int.from_bytes(os.urandom(6), 'big')}=", False, 0.0


class Talkative(Echo):
    """What it begins with may have no room; by the seed."""

    def init(self):
        super().init()
        return "1" * random.choice([2, 100]), []


class OwnDice:
    """It draws its question without the seed."""

    def reset(self):
        return f"{random.SystemRandom().randint(1, 10**9)}="

    def wait(self) -> str:
        """Wait."""
        return "1"

    def get_reward(self) -> float:
        return 1.0


class Shop:
    """Tools, over the rows of a file."""

    def reset(self, **row):
        self.row = row
        self.done = False
        self.asked = []
        return row.get("more")

    def add(self, first: int, second: int) -> int:
        """Add up two numbers."""
        self.asked.append(first)
        return first + second

    def throw(self) -> int:
        """Throw a die of very many sides."""
        return random.randint(1, 10**9)

    def leave(self) -> str:
        """Leave the shop."""
        self.done = True
        return "bye"

    def broken(self) -> str:
        """Fail."""
        raise RuntimeError("sold out")

    def hang(self) -> str:
        """Never answer."""
        while True:
            time.sleep(60)

    def die(self) -> str:
        """End the process."""
        os._exit(3)

    def hoard(self) -> str:
        """Hold a gigabyte."""
        self.held = bytearray(os.urandom(1 << 20) * 1024)
        return "held"

    def get_reward(self) -> float:
        return float(len(self.asked))


class Unsayable(Exception):
    """An exception without words."""

    def __str__(self):
        raise SystemExit("no words")


class Hostile(Shop):
    """Tools that a policy could end a run with."""

    def name_file(self) -> str:
        """Return a name of bytes that are no UTF-8."""
        return b"caf\xe9.txt".decode("utf-8", "surrogateescape")

    def repeat(self, text: str, times: int = 1) -> str:
        """Say a text again."""
        return text * times

    def fail(self) -> str:
        """Fail without a word."""
        raise Unsayable

    def quit(self) -> str:
        """End the process, if it is let."""
        sys.exit("bye")

    def leave_child(self) -> int:
        """Start a process that goes on."""
        return subprocess.Popen(["sleep", "4321"], start_new_session=True).pid

    def forge(self, line: str) -> str:
        """Write a line into every pipe of the process."""
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, line.encode() + b"\n")
            except OSError:
                pass
        return "forged"


class Server(Hostile):
    """It begins with a process of its own, which lives as long as it does."""

    def reset(self, **row):
        super().reset(**row)
        return str(self.leave_child())


class Pooled:
    """It computes in a pool of its own, whose processes start with its first task."""

    def reset(self, **row):
        self.pool = ProcessPoolExecutor(1)
        return "ready"

    def square(self, number: int) -> str:
        """Square a number."""
        return str(self.pool.submit(pow, number, 2).result())


class Waiting:
    """Its methods are async, and what one opens another uses."""

    async def reset(self, **row):
        self.answer = asyncio.get_running_loop().create_future()
        return "ready"

    async def ask(self, number: int) -> int:
        """Double a number."""
        self.answer.set_result(2 * number)
        return await self.answer

    async def get_reward(self) -> float:
        return float(await self.answer)


class Unrewarded:
    """It has a tool and no reward."""

    def reset(self) -> None:
        """Begin."""

    def look(self) -> str:
        """Look."""
        return "x"


class Refuses(Shop):
    """It cannot begin with some rows."""

    def reset(self, **row):
        if row["prompt"].startswith("9"):
            raise ValueError("no nines")
        return super().reset(**row)


def make_shop():
    """A factory that is no class."""
    return Shop()
