"""Compare runs: `python recipes/compare.py RUN_DIR ...` prints a table and draws plots.

llamarl/observe/compare.py describes the words and the plots.
"""

import sys

from llamarl.observe.compare import main, parse

__all__ = ["main", "parse"]

if __name__ == "__main__":
    sys.exit(main())
