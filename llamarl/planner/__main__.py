"""The planner: what a run takes, before there is one.

python -m llamarl.planner simulate [KEY=VALUE ...]
"""

from __future__ import annotations

import sys

from llamarl.planner import simulate

COMMANDS = {"simulate": simulate.run}


def main(arguments: list[str]) -> int:
    """Run the command line. Return the exit status: 0, or 2 for what cannot be used."""
    if not arguments or arguments[0] not in COMMANDS:
        print(f"usage: python -m llamarl.planner {{{','.join(COMMANDS)}}} ...", file=sys.stderr)
        return 2
    return COMMANDS[arguments[0]](arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
