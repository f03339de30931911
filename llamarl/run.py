"""Starts jobs from Python, and reads what they leave. Imports no torch.

    import llamarl

    run = llamarl.train({"max_steps": 20, "trainer.lora.rank": 8}, ranks=2)
    run.frame()[["reward/mean", "eval/accuracy"]]
    run.plot()
    run.model_path    # a Hugging Face directory

A job runs in its own processes, and its output is printed here. Ctrl-C, or a notebook's interrupt,
stops it with a checkpoint. Pass a function by its import path, or as an object if other processes
can import it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamarl.checkpoint.latest import latest_in
from llamarl.config.command_line import (
    RED_TEAM,
    RL,
    JobKind,
    compose_config,
    read_all,
    words_from,
)
from llamarl.config.conversion import escaped, to_values
from llamarl.config.supervised import REWARD_MODEL, SFT
from llamarl.disk.files import RUNS, new_directory
from llamarl.errors import JobFailed
from llamarl.observe.ended import outcome_of
from llamarl.workers.ranks import Ranks, stopping

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from llamarl.config.schema import Config as AnyConfig

Settings = Mapping[str, object]
_SHOWN_LINES = 20  # of a failed job's output, in its error


class Run:
    """The directory of a run, which may still go on."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.outcome.get('ended', 'no outcome yet')})"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one a step (docs/columns.md). FileNotFoundError before the
        first.
        """
        from llamarl.observe.rows import FILE_NAME
        from llamarl.observe.sinks import read_rows

        return read_rows(self.path / FILE_NAME)

    def frame(self) -> pandas.DataFrame:
        """Return the rows as a table, by step."""
        import pandas

        return pandas.DataFrame(self.rows).set_index("step")

    @property
    def outcome(self) -> dict[str, Any]:
        """How it ended: {"ended": "finished", "step": 20, ...}; empty while it goes on."""
        return outcome_of(self.path) or {}

    @property
    def model_path(self) -> Path:
        """The newest exported model, a Hugging Face directory. FileNotFoundError if there is none
        yet.
        """
        if (self.path / "config.json").is_file():  # of a supervised job that has made all its steps
            return self.path
        newest = latest_in(self.path / "checkpoints")
        if newest is None:
            raise FileNotFoundError(f"{self.path}: no checkpoint is sealed yet")
        return newest / "hf"

    def report(self) -> Path:
        """Write RUN_DIR/report.html, and return its path."""
        from llamarl.observe.report import write_report

        return write_report(self.path)

    def plot(self, *columns: str) -> Figure:
        """Return the curves of these columns over steps; without any, what was learned."""
        from llamarl.observe.plots import LEARNED, Panel, draw
        from llamarl.observe.report import columns_of

        panel = Panel("", {name: name for name in columns}) if columns else LEARNED
        return draw(columns_of(self.rows), panel)


def config(settings: Settings | None = None, **keys: object) -> AnyConfig:
    """Return the checked configuration of the main job. ConfigError tells all that is wrong.

    config({"model.path": DIR}, max_steps=20, trainer={"lora": {"rank": 8}}).longest
    """
    return compose_config(words_from({**(settings or {}), **keys}))


def train(settings: Settings | AnyConfig | None = None, *, ranks: int = 1, **keys: object) -> Run:
    """Run the main job, recipes/llama_async.py. settings: nested or dotted keys of docs/keys.md, or
    what `config` returned. keys: more of them. ranks: processes on this host.

    ConfigError tells all that is wrong, before anything starts. JobFailed for a run that ends with
    an error. A run that is stopped returns as others do: its outcome says so.
    """
    return _run("train", RL, settings, ranks, keys)


def sft(settings: Settings | None = None, *, ranks: int = 1, **keys: object) -> Run:
    """Fine-tune on rows or on a task's answers, recipes/sft.py; as `train`."""
    return _run("sft", SFT, settings, ranks, keys)


def reward_model(settings: Settings | None = None, *, ranks: int = 1, **keys: object) -> Run:
    """Train a reward model from pairs, recipes/reward_model.py; as `train`."""
    return _run("reward-model", REWARD_MODEL, settings, ranks, keys)


def red_team(settings: Settings | None = None, *, ranks: int = 1, **keys: object) -> Run:
    """Train against a victim, recipes/red_team.py; as `train`."""
    return _run("red-team", RED_TEAM, settings, ranks, keys)


def evaluate(settings: Settings | None = None, **keys: object) -> list[dict[str, Any]]:
    """Answer held-out prompts, recipes/evaluate.py. Return an object for each answer, with
    "prompt", "completion" and "score" (docs/rewards.md). JobFailed with what cannot be used.
    """
    from llamarl.config.evaluation import EVALUATION

    values = {**(settings or {}), **keys}
    with tempfile.TemporaryDirectory() as folder:
        values.setdefault("out", str(Path(folder) / "evaluation.jsonl"))
        _start("evaluate", words_from(values, EVALUATION), 1)
        return [json.loads(line) for line in Path(str(values["out"])).read_text().splitlines()]


def _run(
    command: str,
    kind: JobKind,
    settings: Settings | AnyConfig | None,
    ranks: int,
    keys: Mapping[str, object],
) -> Run:
    """Check the settings, run the command in its directory, and return that."""
    if settings is not None and not isinstance(settings, Mapping):
        settings = {key: escaped(value) for key, value in to_values(settings).items()}
    words = words_from({**(settings or {}), **keys}, kind)
    _, (chosen,) = read_all(words, kind, ranks=(ranks, ranks))
    path = chosen.run_dir
    if path is None:
        path = str(new_directory(RUNS))
        name = "run_dir" if kind in (RL, RED_TEAM) else "out"
        words = [word for word in words if not word.startswith(f"{name}=")]
        words += words_from({name: path}, kind)
    _start(command, words, ranks)
    return Run(path)


def _start(command: str, words: list[str], num: int) -> None:
    """Run a command to its end, and show what it prints. JobFailed unless it ends well."""
    lines: list[str] = []

    def show(line: str) -> None:
        lines.append(line)
        del lines[:-_SHOWN_LINES]
        print(line, flush=True)

    ranks = Ranks([command, *words], num=num, show=show)
    with stopping(ranks):
        code = ranks.wait()
    if code:
        last = "\n".join(lines)
        raise JobFailed(f"llamarl {command} ended with exit code {code}. Its last lines:\n{last}")
