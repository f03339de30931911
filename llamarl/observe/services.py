"""Sinks of other programs: TensorBoard, Weights & Biases, Trackio and MLflow.

A package is imported, and its run begun, with the first row. So whatever fails there is a warning
of RowWriter and ends no run. config.sections.run finds packages that are not installed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llamarl.config.conversion import flat
from llamarl.config.sections.run import MetricsSettings
from llamarl.observe.console import RL_COLUMNS, Console
from llamarl.observe.rates import Row, step_of
from llamarl.observe.samples import SampleFile, SampleRhythm, table_of
from llamarl.observe.sinks import Sink, read_rows

_PARAMS_AT_ONCE = 100  # that MLflow takes


def numbers_of(row: Row) -> dict[str, float]:
    """Return the row's numbers by name, without its step."""
    found = {name: value for name, value in row.items() if isinstance(value, int | float)}
    found.pop("step")
    return found


class TensorBoard:
    """Writes scalars under RUN_DIR/tensorboard; a resumed run hides what an earlier one logged from
    its first row on.
    """

    def __init__(self, run_dir: str | Path):
        self._folder = Path(run_dir) / "tensorboard"
        self._writer: Any = None

    def write(self, row: Row) -> None:
        """Log the row's numbers at its step."""
        step = step_of(row)
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
        for name, value in numbers_of(row).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left, and close the file."""
        if self._writer is not None:
            self._writer.close()


class Service:
    """Sends rows and tables of samples to a run of a service, one a run directory.

    RUN_DIR/NAME_id holds the id of the service's run, so that a resumed run continues it. Rows that
    a resumed run repeats are not sent again. A service that refuses to begin is not asked again.
    Subclasses talk to one service: `begin`, `send` and `end`.
    """

    name: str

    def __init__(
        self,
        run_dir: str | Path,
        *,
        project: str,
        run_name: str | None = None,
        config: Mapping[str, object] | None = None,
        samples: SampleRhythm | None = None,
    ):
        self.run_dir = Path(run_dir).absolute()
        self.project = project
        self.run_name = run_name or self.run_dir.name
        self.config = dict(config or {})
        self._samples = samples
        self._id_file = self.run_dir / f"{self.name}_id"
        self._id = self._id_file.read_text().strip() if self._id_file.exists() else None
        self._newest_sent = -1  # step
        rows = self.run_dir / "metrics.jsonl"
        if self._id is not None and rows.exists():
            # Before the resumed run cuts the file back to its checkpoint.
            self._newest_sent = max(map(step_of, read_rows(rows)), default=-1)
        self._is_tried = False
        self._is_open = False

    def write(self, row: Row) -> None:
        """Send the row, and the newest sample if it is time."""
        if not self._is_tried:
            self._is_tried = True
            self._id = self.begin(self._id)
            self._is_open = True
            self._id_file.parent.mkdir(parents=True, exist_ok=True)
            self._id_file.write_text(self._id)
        step = step_of(row)
        if not self._is_open or step <= self._newest_sent:
            return
        sample = self._samples.due(step) if self._samples is not None else None
        self.send(step, numbers_of(row), table_of(sample) if sample is not None else [])

    def close(self) -> None:
        """Finish the run at the service."""
        if self._is_open:
            self.end()

    def begin(self, run_id: str | None) -> str:
        """Begin a run, or continue the one of this id. Return its id."""
        raise NotImplementedError

    def send(self, step: int, values: dict[str, float], table: list[dict]) -> None:
        """Log values at a step, and a table as table_of makes it, unless that is empty."""
        raise NotImplementedError

    def end(self) -> None:
        """Send what is left, and mark the run as finished."""
        raise NotImplementedError


class WandB(Service):
    """Sends to Weights & Biases."""

    name = "wandb"

    def begin(self, run_id: str | None) -> str:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=self.project,
            name=self.run_name,
            dir=str(self.run_dir),
            config=self.config,
            id=run_id,
            resume="allow",
        )
        return self._run.id

    def send(self, step: int, values: dict[str, float], table: list[dict]) -> None:
        logged: dict[str, object] = dict(values)
        if table:
            rows = [list(line.values()) for line in table]
            logged["samples"] = self._wandb.Table(columns=list(table[0]), data=rows)
        self._run.log(logged, step=step)

    def end(self) -> None:
        self._run.finish()


class Trackio(Service):
    """Sends to Trackio, which keeps its own folder on this machine (TRACKIO_DIR), or to where its
    variables say. It knows a run by its name, so the name is the id.
    """

    name = "trackio"

    def begin(self, run_id: str | None) -> str:
        import trackio

        self._trackio = trackio
        name = run_id or self.run_name
        trackio.init(
            project=self.project,
            name=name,
            config=self.config,
            resume="never" if run_id is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return name

    def send(self, step: int, values: dict[str, float], table: list[dict]) -> None:
        logged: dict[str, object] = dict(values)
        if table:
            logged["samples"] = self._trackio.Table(data=table)
        self._trackio.log(logged, step=step)

    def end(self) -> None:
        self._trackio.finish()


class MLflow(Service):
    """Writes to RUN_DIR/mlruns, or sends to MLFLOW_TRACKING_URI if that is set."""

    name = "mlflow"

    def begin(self, run_id: str | None) -> str:
        # MLflow reads these when it is imported. By default it would report its use to its makers,
        # refuse to write files, and keep a run waiting minutes for a server that does not answer.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri = os.environ.get("MLFLOW_TRACKING_URI") or (self.run_dir / "mlruns").as_uri()
        self._client = MlflowClient(uri)
        self._run_id = run_id or ""
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        experiment = self._client.get_experiment_by_name(self.project)
        if experiment is None:
            experiment_id = self._client.create_experiment(self.project)
        else:
            experiment_id = experiment.experiment_id
        run = self._client.create_run(experiment_id, run_name=self.run_name)
        self._run_id = run.info.run_id
        params = [Param(key, str(value)) for key, value in flat(self.config).items()]
        for first in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, params=params[first : first + _PARAMS_AT_ONCE])
        return self._run_id

    def send(self, step: int, values: dict[str, float], table: list[dict]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = []
        for name, value in values.items():
            metrics.append(Metric(mlflow_name(name), float(value), now_ms, step))
        self._client.log_batch(self._run_id, metrics=metrics)
        if table:
            columns = dict(zip(table[0], zip(*(line.values() for line in table))))
            self._client.log_table(self._run_id, data=columns, artifact_file="samples.json")

    def end(self) -> None:
        self._client.set_terminated(self._run_id)


def mlflow_name(column: str) -> str:
    """Return a column's name as MLflow takes it: a/b/c becomes a/b.c, because in files a/b may be
    no folder and a metric at once; "_" stands for characters that MLflow refuses.
    """
    group, slash, rest = column.partition("/")
    return re.sub(r"[^\w ./-]", "_", group + slash + rest.replace("/", "."))


SERVICES: dict[str, type[Service]] = {service.name: service for service in (WandB, Trackio, MLflow)}


def build_sinks(
    run_dir: str | Path,
    *,
    max_steps: int | None,
    metrics: MetricsSettings,
    columns: Sequence[str] = RL_COLUMNS,
    free_running: int | None = None,
    config: Mapping[str, object] | None = None,
    samples: SampleFile | None = None,
    show_every: int = 0,
) -> list[Sink]:
    """Build the console and the sinks that were asked for; RowWriter adds the JSONL file.

    columns: those that the console shows. samples: of which the console and the services show the
    newest every so many steps. free_running: of a run without a bound on lag, its sync period.
    """
    # Here: a process that writes no row needs no numpy.
    from llamarl.observe.alarms import LagWatch, LearningWatch, SignalWatch

    console = Console(max_steps=max_steps, columns=columns, samples=samples, show_every=show_every)
    sinks: list[Sink] = [console, SignalWatch(), LearningWatch()]
    if free_running is not None:
        sinks.append(LagWatch(free_running))
    if metrics.tensorboard:
        sinks.append(TensorBoard(run_dir))
    for name, service in SERVICES.items():
        if getattr(metrics, name):
            sinks.append(
                service(
                    run_dir,
                    project=metrics.project,
                    run_name=metrics.run_name,
                    config=config,
                    samples=SampleRhythm(samples, show_every),
                )
            )
    return sinks
