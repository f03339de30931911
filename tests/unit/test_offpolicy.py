"""benchmarks/offpolicy.py without its runs: what it reads off rows, how it keeps runs, and that it
asks for jobs that exist.
"""

import importlib
import json
import math
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamarl.config.command_line import check_command_line

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NO_USAGE = SimpleNamespace(ru_utime=1.5, ru_stime=0.25)


@pytest.fixture
def modules(monkeypatch):
    """The benchmark's own files, which are scripts: they find each other beside themselves."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return SimpleNamespace(
        **{n: importlib.import_module(n) for n in ("forked", "offpolicy", "offpolicy_results")}
    )


def rows_of(accuracies, lags=None):
    """The start's row, of an evaluation alone; then a row a step, evaluated where an accuracy is
    given; ten seconds a step.
    """
    return [{"step": 0, "eval/accuracy": 0.3, "time/evaluated_s": 1.0}] + [
        {"step": i, "reward/mean": 0.5, "lag/mean": lag, "ratio/max": 1.0}
        | ({"eval/accuracy": a, "time/evaluated_s": 10.0 * i} if a is not None else {})
        for i, (a, lag) in enumerate(zip(accuracies, lags or [0.0] * len(accuracies)), start=1)
    ]


def curve_of(modules, name, *runs, panel="", study="lag"):
    results = modules.offpolicy_results
    made = [modules.forked.Run((), rows_of(a), None, 2.0, 1.0) for a in runs]
    return results.Curve(results.Case(study, panel, name, ()), tuple(made))


def test_a_target_is_reached_at_the_first_evaluation_that_shows_it(modules):
    rows = rows_of([None, 0.7, None, 0.8, None, 0.75, None, 0.9])
    results = modules.offpolicy_results
    assert [results.steps_to(rows, t) for t in (0.7, 0.8, 0.81, 0.9)] == [2, 4, 8, 8]
    assert [results.seconds_to(rows, t) for t in (0.7, 0.8, 0.81, 0.9)] == [20.0, 40.0, 80.0, 80.0]
    assert results.steps_to(rows, 0.91) == results.seconds_to(rows, 0.91) == math.inf


def test_lag_is_of_the_second_half(modules):
    run = modules.forked.Run((), rows_of([0.5] * 4, lags=[0.0, 1.0, 4.0, 3.0]), None, 0.0, 0.0)
    assert modules.offpolicy_results.settled_lag(run) == 3.5


def test_final_is_the_last_and_best_the_highest_accuracy(modules):
    run = modules.forked.Run((), rows_of([0.4, 0.8, None, 0.6, None]), None, 0.0, 0.0)
    assert (modules.offpolicy_results.final(run), modules.offpolicy_results.best(run)) == (0.6, 0.8)


def test_the_rate_is_the_soonest_to_the_target_then_the_best(modules):
    choose = modules.offpolicy_results.choose_rate
    slow, soon = (
        curve_of(modules, "lr 1e-5", [0.4, 0.5, 0.95]),
        curve_of(modules, "lr 1e-4", [0.4, 0.9, 0.2]),
    )
    assert choose([slow, soon]) == "1e-4"
    assert (
        choose([curve_of(modules, "lr 1e-5", [0.4, 0.8]), curve_of(modules, "lr 1e-4", [0.7, 0.6])])
        == "1e-5"
    )


def test_a_median_over_seeds_says_how_many_never_arrived(modules):
    median = modules.offpolicy_results.median
    assert median([30, 10, 20]) == "20 (10–30)"
    assert median([30, math.inf, 20]) == "30 (20–never)"
    assert median([30, math.inf, math.inf]) == "- (1 of 3)"
    assert median([30, math.inf]) == "- (1 of 2)"
    assert median([math.inf, math.inf]) == "-"


def test_panels_stand_in_the_order_of_their_numbers(modules):
    curves = [
        curve_of(modules, "aipo", [0.5], panel=p) for p in ("max_lag 16", "max_lag 2", "max_lag 0")
    ]
    rows = modules.offpolicy_results.tables(
        "lag", curves
    ).splitlines()  # nothing lagged: no column of lags
    cell = "| 50.0 (50.0–50.0) |"
    assert [rows[0], *rows[2:]] == [
        "| final accuracy, % | aipo |",
        *(f"| max_lag {n} {cell}" for n in (0, 2, 16)),
    ]
    rates = [
        curve_of(modules, f"lr {r}", [0.95], panel="tb", study="search")
        for r in ("1e-4", "3e-5", "1e-5")
    ]
    assert modules.offpolicy_results.tables("search", rates).splitlines()[0].split(" | ")[1:4] == [
        "lr 1e-5",
        "lr 3e-5",
        "lr 1e-4",
    ]


def test_a_table_says_what_lag_was_reached_and_where_runs_are_missing(modules):
    forked, results = modules.forked, modules.offpolicy_results
    runs = [
        forked.Run((), rows_of([0.5, a], lags=[0.0, lag]), failed, 2.0, 1.0)
        for a, lag, failed in ((0.8, 3.0, None), (0.9, 4.0, "NotFinite"))
    ]
    two = results.Curve(results.Case("lag", "max_lag 4", "aipo", ()), tuple(runs))
    one = results.Curve(results.Case("lag", "max_lag 0", "tba", ()), (runs[0],))
    assert results.tables("lag", [two, one]).splitlines()[2:] == [
        "| max_lag 0 |  | 80.0 (80.0–80.0) x1 | 3.0 (3.0–3.0) |",
        "| max_lag 4 | 85.0 (80.0–90.0); 1 diverged |  | 3.5 (3.0–4.0) |",
    ]


def test_the_soonest_loss_stands_first_and_one_that_never_arrives_shows_its_best(modules):
    curves = [
        curve_of(modules, n, a, panel="lr 3e-5", study="table")
        for n, a in (("tb", [0.4, 0.62]), ("aipo", [0.8, 0.9]))
    ]
    first, second = modules.offpolicy_results.tables("table", curves).splitlines()[2:]
    assert first.startswith(
        "| aipo | 3e-5 | 1 (1–1) | 2 (2–2) | 10 (10–10) | 20 (20–20) | 2 (2–2) | 90.0 "
    )
    assert second.startswith("| tb | 3e-5 | - | - | - | - | 2 (2–2) | 62.0 ")


def test_the_json_has_every_curve_on_a_line_and_no_training_of_the_start(modules, tmp_path):
    curve = curve_of(modules, "aipo", [None, 0.9], [0.8, None])
    modules.offpolicy_results.write_json(tmp_path / "x.json", [curve, curve], {"steps": 2})
    read = json.loads((tmp_path / "x.json").read_text())
    first, second = read["cases"][0]["runs"]
    assert (first["accuracy"], second["accuracy"]) == ([[0, 0.3], [2, 0.9]], [[0, 0.3], [1, 0.8]])
    assert (first["seconds"], first["lag"], first["reward"]) == (
        [1.0, 20.0],
        [0.0, 0.0],
        [0.5, 0.5],
    )
    assert (
        read["about"] == {"steps": 2} and len((tmp_path / "x.json").read_text().splitlines()) == 5
    )


def test_a_table_replaces_only_what_is_between_its_markers(modules, tmp_path):
    file = tmp_path / "page.md"
    file.write_text(
        "a\n<!-- table lag -->\nold\n<!-- end -->\nb\n<!-- table cap -->\nkept\n<!-- end -->\n"
    )
    modules.offpolicy_results.refresh(file, "lag", r"new \1")
    assert file.read_text() == (
        "a\n<!-- table lag -->\nnew \\1\n<!-- end -->\nb\n<!-- table cap -->\nkept\n<!-- end -->\n"
    )
    with pytest.raises(ValueError, match="table tba"):
        modules.offpolicy_results.refresh(file, "tba", "")


def test_differences_are_of_runs_of_the_same_seed(modules):
    results = modules.offpolicy_results
    curves = [
        curve_of(modules, "aipo", [0.9], [0.8], [0.7], panel="max_lag 0"),
        curve_of(modules, "aipo", [0.8], [0.8], [0.6], panel="max_lag 16"),
        curve_of(modules, "tba", [0.5], [0.6], panel="max_lag 0"),
        curve_of(modules, "tba", [0.7], panel="max_lag 16"),
    ]
    lines = results.paired("lag", curves).splitlines()
    assert lines[0] == "|  | points, minus max_lag 0 | seed by seed |"
    # Differences -10, 0, -10: deviation 5.77, times 4.30 over the root of 3.
    assert lines[2:] == [
        "| max_lag 16, aipo | -6.7 ± 14.3 | -10.0, +0.0, -10.0 |",
        "| max_lag 16, tba | - | - |",
    ]
    caps = [
        curve_of(modules, f"ratio_cap {c}", [a], [a], panel="lr 5e-5", study="cap")
        for c, a in (("4", 0.5), ("null", 0.6))
    ]
    assert results.paired("cap", caps).splitlines()[2:] == [
        "| lr 5e-5, ratio_cap 4 | -10.0 ± 0.0 | -10.0, -10.0 |"
    ]


def test_the_page_has_the_tables_that_its_json_comes_to(modules):
    results = modules.offpolicy_results
    page = (BENCHMARKS / "results" / "offpolicy.md").read_text()
    curves = results.read_json(BENCHMARKS / "results" / "offpolicy.json")
    studies = list(dict.fromkeys(curve.case.study for curve in curves))
    assert len(studies) == len(modules.offpolicy.STUDIES)
    for study in studies:
        found = results.page_tables(study, [curve for curve in curves if curve.case.study == study])
        for marker, table in found.items():
            assert f"<!-- table {marker} -->\n{table}\n<!-- end -->" in page, marker


def test_what_is_read_from_the_json_makes_the_same_tables(modules, tmp_path):
    results = modules.offpolicy_results
    curves = []
    for n, a in (("aipo", 0.9), ("tba", 0.8)):
        curves += [curve_of(modules, n, [0.5, a], panel=p) for p in ("max_lag 0", "max_lag 4")]
    results.write_json(tmp_path / "x.json", curves, {})
    assert results.page_tables(
        "lag", results.read_json(tmp_path / "x.json")
    ) == results.page_tables("lag", curves)


def finished(modules, folder, overrides, log, rows):
    scratch = modules.forked.store(folder, overrides).with_suffix("")
    (scratch / "run").mkdir(parents=True)
    (scratch / "log").write_text(log)
    (scratch / "run" / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def test_a_finished_run_is_found_by_its_overrides_in_any_order(modules, tmp_path):
    forked, rows = modules.forked, rows_of([0.4, 0.9])
    finished(modules, tmp_path, ("lr=1", "seed=0"), "", [{**r, "not/kept": 1} for r in rows])
    run = forked._finish(tmp_path, ("lr=1", "seed=0"), 0, NO_USAGE)
    assert (run.rows, run.failed, run.cpu_s) == (rows, None, 1.75)
    assert forked.load_run(tmp_path, ("seed=0", "lr=1")) == run
    assert forked.load_run(tmp_path, ("seed=1", "lr=1")) is None
    assert [f.name for f in tmp_path.iterdir()] == [forked.store(tmp_path, ("lr=1", "seed=0")).name]


def test_a_run_that_diverged_is_a_result_and_one_that_failed_is_not(modules, tmp_path):
    rows = rows_of([0.4])
    finished(modules, tmp_path, ("lr=9",), "Traceback\nllamarl.errors.NotFinite: step 3\n", rows)
    assert modules.forked._finish(tmp_path, ("lr=9",), 256, NO_USAGE).failed.endswith(
        "NotFinite: step 3"
    )
    finished(modules, tmp_path, ("lr=8",), "bad config, nothing started:\n", [])
    with pytest.raises(RuntimeError, match="(?s)lr=8 failed.*bad config"):
        modules.forked._finish(tmp_path, ("lr=8",), 512, NO_USAGE)
    assert modules.forked.load_run(tmp_path, ("lr=8",)) is None


def test_no_process_is_started_for_runs_that_are_kept(modules, tmp_path, monkeypatch):
    finished(modules, tmp_path, ("lr=1",), "", rows_of([0.4]))
    modules.forked._finish(tmp_path, ("lr=1",), 0, resource.getrusage(resource.RUSAGE_SELF))
    monkeypatch.setattr(modules.forked, "_fork", lambda *_: pytest.fail("made again"))
    modules.forked.make(tmp_path, [("lr=1",), ("lr=1",)], jobs=2)


@pytest.mark.slow
def test_every_study_asks_for_jobs_that_the_config_accepts(modules):
    o = modules.offpolicy
    rates = dict.fromkeys(o.ALL_LOSSES, o.RATE)
    cases = [
        *(c for c in o.lag_cases(64) if c.curve == "tba"),
        *(c for c in o.minibatch_cases(64) if c.curve == "tba"),
        *o.cap_cases(64)[:5],
        *o.sync_cases(64),
        *o.table_cases(96, rates),
        *o.tba_cases(96, rates),
    ]
    assert {c.curve for c in o.table_cases(96, rates)} == {
        f.stem for f in (BENCHMARKS.parent / "conf" / "loss").glob("*.yaml")
    }
    for overrides in dict.fromkeys(c.overrides for c in cases):
        assert check_command_line([*overrides, "seed=0"])  # ConfigError if it does not


def test_the_same_updates_are_made_of_any_number_of_minibatches(modules):
    for case in modules.offpolicy.minibatch_cases(64):
        values = dict(s.split("=") for s in case.overrides)
        updates = int(values["max_steps"]) * int(values["trainer.minibatches_per_step"])
        assert (updates, int(values["groups_per_step"])) == (64, 16 * case.updates_a_step)
