"""Named runs: finished jobs that many tests read, each made once for all workers of a session.

    def test_lag_stays_within_its_bound(runs):
        assert max(row["lag/max"] for row in runs("asynchronous").rows[1:]) <= 1

A test only reads a named run. To go on with one, copy its directory.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.launching import SMALL, ForkedJob, Job, RunFolder

# What `set_words` asks of the policy, beside the task's own held-out prompts.
ASKED = ("12+34=", "23+41=", "55+16=", "70+11=")


class NamedRun(NamedTuple):
    """words: of the command line, after SMALL. after: the named run that it goes on from."""

    words: tuple[str, ...]
    ranks: int | None = None
    kind: type[Job] = ForkedJob
    asks_sets: bool = False
    after: str | None = None


BESIDE = ("eval.save_samples=true", "metrics.samples=0")
RUNS = {
    "synchronous": NamedRun(("max_lag=0",)),
    "two_ranks": NamedRun(("max_lag=0",), ranks=2, kind=Job),  # under torchrun, as users start it
    "asynchronous": NamedRun(("max_lag=1",), ranks=2),
    # The synchronous run again, in two halves, with sets of held-out prompts and without samples.
    "half": NamedRun(("max_lag=0", "max_steps=2", *BESIDE), asks_sets=True),
    "resumed": NamedRun(("max_lag=0", "resume=auto", *BESIDE), asks_sets=True, after="half"),
}


def set_words(folder: Path) -> str:
    """Return eval.sets of two kinds. The embedded model was taught sums: it answers with digits,
    which `digits` asks for (contains_words), and never with what `words` asks for (exact_match).
    """
    file = folder / "words.jsonl"
    rows = [{"prompt": prompt, "answer": "forty-six"} for prompt in ASKED]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    digits = 'kind: one_prompt, text: "12+34=", words: ["1","2","3","4","5","6","7","8","9"]'
    words = f"kind: jsonl, path: {file}"
    size = "max_prompt_tokens: 16"
    return f"eval.sets={{digits: {{{digits}, {size}}}, words: {{{words}, {size}}}}}"


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock that one worker has at a time."""
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


class Runs:
    """runs(name): a named run, which is made at the first call of all workers.

    folder: shared by the workers.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def __call__(self, name: str) -> RunFolder:
        named = RUNS[name]
        home = self.folder / name
        code = home / "code"
        if not code.exists() and named.after is not None:
            before = self(named.after)
        # Whoever waits here waits for a job, which has a deadline; the system frees the lock of a
        # worker that died.
        with locked(self.folder / f"{name}.lock"):
            if not code.exists():
                shutil.rmtree(home, ignore_errors=True)  # of a making that did not end
                home.mkdir()
                if named.after is not None:
                    shutil.copytree(before.run_dir, home / "run")
                code.write_text(str(self._make(named, home)))
        run = RunFolder(home / "run", home / "output")
        assert code.read_text() == "0", run.output
        return run

    def _make(self, named: NamedRun, home: Path) -> int:
        """Run the job, and keep its output. Return its exit code."""
        sets = (set_words(self.folder),) if named.asks_sets else ()
        words = (*SMALL, *named.words, *sets)
        with named.kind(*words, run_dir=home / "run", ranks=named.ranks) as job:
            code = job.wait()
            (home / "output").write_text(job.output)
        return code
