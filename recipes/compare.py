"""Compare runs: `python recipes/compare.py RUN_DIR ...` prints a table and draws plots.

llamarl/observe/comparison.py describes the words and the plots.
"""

import sys

from llamarl.observe.comparison import main, parse

__all__ = ["main", "parse"]

if __name__ == "__main__":
    sys.exit(main())
