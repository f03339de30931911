"""Services: they get every row once and the samples, over a resume too, and end no run. Stand-ins
take the place of packages that are not installed.
"""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from llamarl.config.command_line import check_command_line
from llamarl.observe.columns import COLUMNS
from llamarl.observe.rows import RowWriter
from llamarl.observe.samples import SampleFile, SampleRhythm
from llamarl.observe.services import (
    MLflow,
    TensorBoard,
    Trackio,
    WandB,
    mlflow_name,
)
from llamarl.words.findings import ConfigError


def completion(text, reward):
    return {"text": list(text), "reward": reward}


SHOWN = [{"prompt": "1+1=", "completions": [completion("2", 1.0), completion("no", None)]}]
TABLE = [
    {"step": 2, "prompt": "1+1=", "completion": "2", "reward": 1.0},
    {"step": 2, "prompt": "1+1=", "completion": "no", "reward": None},
]


class Made:
    """What the stand-ins were asked to do."""

    def __init__(self):
        self.begun = []  # (project, name, id that is continued)
        self.rows = []
        self.tables = []
        self.num_ended = 0

    def log(self, values, step):
        table = values.pop("samples", None)
        self.rows.append((step, values))
        if table is not None:
            self.tables.append(table)

    def end(self):
        self.num_ended += 1


def wandb_of(made):
    package = ModuleType("wandb")

    def init(*, project, name, dir, config, id, resume):
        made.begun.append((project, name, id))
        assert resume == "allow" and config == {"lr": {"final": 1}}
        return SimpleNamespace(id=id or "abc123", log=made.log, finish=made.end)

    def table(columns, data):
        return [dict(zip(columns, row)) for row in data]

    package.init = init
    package.Table = table
    return {"wandb": package}


def trackio_of(made):
    package = ModuleType("trackio")

    def init(*, project, name, config, resume, embed, auto_log_gpu, auto_log_cpu):
        assert not (embed or auto_log_gpu or auto_log_cpu) and config == {"lr": {"final": 1}}
        made.begun.append((project, name, None if resume == "never" else name))

    package.init = init
    package.log = made.log
    package.finish = made.end
    package.Table = lambda data: data
    return {"trackio": package}


def mlflow_of(made):
    package, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")

    class Client:
        def __init__(self, uri):
            assert uri.startswith("file:///") and uri.endswith("/mine/mlruns")

        def get_experiment_by_name(self, project):
            self.project = project

        def create_experiment(self, project):
            assert project == self.project
            return "7"

        def create_run(self, experiment_id, run_name):
            assert experiment_id == "7"
            made.begun.append((self.project, run_name, None))
            return SimpleNamespace(info=SimpleNamespace(run_id="abc123"))

        def update_run(self, run_id, status):
            assert status == "RUNNING"
            made.begun.append(("mine", "mine", run_id))

        def log_batch(self, run_id, params=(), metrics=()):
            assert run_id == "abc123" and list(params) in ([], [("lr.final", "1")])
            if metrics:
                made.log({name: value for name, value, *_ in metrics}, step=metrics[0][3])

        def log_table(self, run_id, data, artifact_file):
            assert run_id == "abc123" and artifact_file == "samples.json"
            rows = zip(*data.values())
            made.tables.append([dict(zip(data, row)) for row in rows])

        def set_terminated(self, run_id):
            made.end()

    package.MlflowClient = Client
    entities.Metric = entities.Param = lambda *values: values
    return {"mlflow": package, "mlflow.entities": entities}


SERVICES = {"wandb": (WandB, wandb_of), "trackio": (Trackio, trackio_of)}
SERVICES["mlflow"] = (MLflow, mlflow_of)


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    """No variable of the user's sends anything anywhere, and none is left behind."""
    for name in ("TRACKING_URI", "DISABLE_TELEMETRY", "ALLOW_FILE_STORE"):
        monkeypatch.setenv(f"MLFLOW_{name}", "")
        monkeypatch.delenv(f"MLFLOW_{name}")
    for name in ("RETRIES", "TIMEOUT"):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name.replace('RETRIES', 'MAX_RETRIES')}", "1")
    monkeypatch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


def written(sink, run_dir, steps):
    """Rows of these steps, as RowWriter writes them: to the file, then to the sink."""
    for step in steps:
        row = {"step": step, "loss/value": step / 2, "kl/ref": None, "eval/left_out_reason": "a"}
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        sink.write(row)
    sink.close()


def rhythm():
    return SampleRhythm(SimpleNamespace(newest={"step": 2, "shown": SHOWN}), every=2)


@pytest.mark.parametrize("name", SERVICES)
def test_a_resumed_run_continues_the_services_run_and_repeats_no_row(
    tmp_path, monkeypatch, quiet, name
):
    kind, stand_in = SERVICES[name]
    made = Made()
    for module, package in stand_in(made).items():
        monkeypatch.setitem(sys.modules, module, package)
    run_dir = tmp_path / "mine"
    run_dir.mkdir()
    sinks = []
    for steps in ([1, 2, 3], [3, 4]):  # killed after step 3, resumed from a checkpoint of step 2
        config = {"lr": {"final": 1}}
        sinks.append(kind(run_dir, project="mine", config=config, samples=rhythm()))
        written(sinks[-1], run_dir, steps)
    first_id = (run_dir / f"{name}_id").read_text()
    assert first_id == ("mine" if name == "trackio" else "abc123")
    assert made.begun == [("mine", "mine", None), ("mine", "mine", first_id)]
    assert made.rows == [(step, {"loss/value": step / 2}) for step in (1, 2, 3, 4)]
    # The second start has its own rhythm: the newest sample is new to it.
    assert made.tables == [TABLE, TABLE] and made.num_ended == 2


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_that_refuses_to_begin_is_said_once_and_ends_no_run(
    tmp_path, monkeypatch, caplog, quiet, name
):
    kind, _ = SERVICES[name]
    monkeypatch.setitem(sys.modules, name, None)  # its import fails
    sink = kind(tmp_path, project="p")
    writer = RowWriter(tmp_path, [sink], eval_due=lambda step: False, first_step=1)
    for step in (1, 2, 3):
        writer.ingest(step, {"loss/value": 0.5})
        writer.flush()
    writer.close()
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(f"{kind.__name__} did not take a row (ModuleNotFoundError: ")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert not (tmp_path / f"{name}_id").exists()


def test_wandb_keeps_its_run_in_the_directory_of_the_run(tmp_path, quiet):
    pytest.importorskip("wandb")
    sink = WandB(tmp_path, project="p", run_name="named", samples=rhythm())
    written(sink, tmp_path, [1, 2])
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert folder.name.endswith((tmp_path / "wandb_id").read_text())
    assert list(folder.glob("files/media/table/samples*"))


def test_trackio_has_the_rows_and_the_table_on_this_machine(tmp_path, quiet):
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    for steps in ([1, 2], [2, 3]):
        sink = Trackio(tmp_path / "mine", project="p", samples=rhythm())
        (tmp_path / "mine").mkdir(exist_ok=True)
        written(sink, tmp_path / "mine", steps)
    logs = SQLiteStorage.get_logs("p", "mine")
    assert [(log["step"], log["loss/value"]) for log in logs] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert logs[1]["samples"]["_value"] == TABLE


def test_mlflow_has_the_rows_and_the_table_in_the_directory_of_the_run(tmp_path, quiet):
    pytest.importorskip("mlflow")
    for steps in ([1, 2], [2, 3]):
        config = {"lr": {"final": 1}}
        sink = MLflow(tmp_path, project="p", config=config, samples=rhythm())
        written(sink, tmp_path, steps)
    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "mlruns").as_uri())
    run = client.get_run((tmp_path / "mlflow_id").read_text())
    assert run.info.run_name == tmp_path.name and run.info.status == "FINISHED"
    assert run.data.params == {"lr.final": "1"}
    history = client.get_metric_history(run.info.run_id, "loss/value")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    table = json.loads(next((tmp_path / "mlruns").rglob("samples.json")).read_text())
    assert table["columns"] == list(TABLE[0]) and table["data"][0] == list(TABLE[0].values())


def test_names_of_columns_are_files_side_by_side_for_mlflow():
    columns = {*COLUMNS, "generator/idle_fraction", "generator/idle_fraction/no work"}
    names = {mlflow_name(column) for column in columns}
    assert "generator/idle_fraction.no work" in names and len(names) == len(columns)
    assert mlflow_name("lag/tokens/64+") == "lag/tokens.64_"
    folders = {name.rpartition("/")[0] for name in names}
    assert folders.isdisjoint(names)


@pytest.mark.parametrize("name", ["tensorboard", *SERVICES])
def test_a_folder_that_a_service_made_here_is_not_its_package(tmp_path, monkeypatch, name):
    """Such as wandb/ in the directory of an earlier program: Python imports it as a package."""
    (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError) as refused:
        check_command_line([f"metrics.{name}=true"])
    (problem,) = refused.value.problems
    assert problem.what == f"the package {name} is missing; pip install 'llamarl[{name}]'"


def test_tensorboard_gets_every_number_at_its_step_and_a_resume_replaces_later_ones(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for rows in (((1, 0.5), (2, 7.0), (3, 7.0)), ((2, 0.25),)):
        sink = TensorBoard(tmp_path)
        for step, loss in rows:
            sink.write({"step": step, "loss/value": loss, "kl/ref": None})
        sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss/value"]
    found = [(event.step, event.value) for event in events.Scalars("loss/value")]
    assert found == [(1, 0.5), (2, 0.25)]


def test_the_newest_sample_is_shown_every_so_often_and_once(tmp_path):
    samples = SampleFile(tmp_path)
    rhythm = SampleRhythm(samples, every=2)
    shown = []
    for step in range(1, 7):
        if step not in (4, 6):
            samples.keep(step, lambda: {"groups": [], "shown": []})
        due = rhythm.due(step)
        shown.append(None if due is None else due["step"])
    assert shown == [None, 2, None, 3, None, 5]
    assert SampleRhythm(samples, every=0).due(2) is None
