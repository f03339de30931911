"""Comparing runs: hand arithmetic on hand-made metrics files; what cannot be compared is said."""

import functools
import math
import struct

import pytest

from llamarl.config.command_line import compose_config
from llamarl.config.conversion import save_config
from llamarl.observe import compare
from llamarl.observe.compare import ROOT_KL, load_runs, variants_of
from tests.build.rows import write_rows

EXACT = 1e-12


compose = functools.cache(compose_config)  # takes tenths of a second


@pytest.fixture
def make(tmp_path):
    """A run directory with these overrides and columns, a value a step; None: not in the row."""

    def made(name, *overrides, wall_s, **columns):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        save_config(compose(overrides), folder / "config.yaml")
        values = {name.replace("__", "/"): column for name, column in columns.items()}
        rows = []
        for step, wall in enumerate(wall_s):
            row = {"step": step, "time/wall_s": wall}
            row |= {name: column[step] for name, column in values.items()}
            rows.append({name: value for name, value in row.items() if value is not None})
        write_rows(folder / "metrics.jsonl", *rows)
        return folder

    return made


def png_size(file):
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


ACCURACY = "eval/reward"


@pytest.fixture
def three(make):
    """lr=1: seeds 0 and 1, the second twice as slow; lr=2, which gets nowhere."""
    rows = [
        ("a", 1, 0, 10, [0.1, 0.3, 0.5, 0.7, 0.6], [None, 0.1, 0.2, 0.3, 0.4]),
        ("b", 1, 1, 20, [0.1, 0.5, 0.5, 0.9, 0.9], [None, 0.3, 0.2, 0.5, 0.6]),
        ("c", 2, 0, 5, [0.1, 0.2, 0.3, 0.4, 0.3], [None, 0.1, 0.1, 0.1, 0.1]),
    ]
    folders = []
    for name, lr, seed, step_s, rewards, kl in rows:
        walls = range(0, 5 * step_s, step_s)
        words = (f"lr={lr}", f"seed={seed}")
        folders.append(make(name, *words, wall_s=walls, eval__reward=rewards, kl__ref=kl))
    return folders


def test_seconds_and_steps_to_a_target_are_those_of_its_first_row(three):
    variants, implied = variants_of(load_runs(three))
    assert (list(variants), implied) == (["lr 1.0", "lr 2.0"], [])
    one, two = variants.values()
    found = [compare.measure(run, ACCURACY, 0.5) for run in one]
    assert [figures.seconds for figures in found] == [20, 20]
    assert [figures.steps for figures in found] == [2, 1]
    assert [figures.final for figures in found] == [0.6, 0.9]
    assert [figures.best for figures in found] == [0.7, 0.9]
    assert [figures.kl for figures in found] == [0.4, 0.6]
    (run,) = two
    assert math.isnan(compare.measure(run, ACCURACY, 0.5).steps)
    assert compare.measure(run, ACCURACY, 0.4).seconds == 15
    assert compare.reachable(load_runs(three), ACCURACY) == 0.4


def test_the_table_has_means_and_who_did_not_get_there(three):
    variants, _ = variants_of(load_runs(three))
    head, one, two = compare.table(variants, ACCURACY, 0.65)
    assert "s to 0.65" in head
    for cell in (
        "0.750 (0.600 to 0.900)",
        "45.0 (30.0 to 60.0)",
        "3 (3 to 3)",
        "0.5000 (0.4000 to 0.6000)",
    ):
        assert cell in one
    assert "- (0 of 1)" in two
    _, one, _ = compare.table(variants, ACCURACY, 0.8)
    assert "60.0 (1 of 2)" in one


def test_a_band_is_over_what_all_runs_have(three):
    variants, _ = variants_of(load_runs(three))
    one = variants["lr 1.0"]
    x, y = compare.band([compare.path(run, "step", ACCURACY) for run in one])
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert y.tolist() == [[0.1, 0.3, 0.5, 0.7, 0.6], [0.1, 0.5, 0.5, 0.9, 0.9]]
    x, y = compare.band([compare.path(run, "time/wall_s", ACCURACY) for run in one], points=5)
    assert x.tolist() == [0, 10, 20, 30, 40]  # not to 80: one run ends at 40
    # On lines between rows: the slow one is at 0.3 after 10 s and at 0.5 from 20 to 40 s.
    assert y[0].tolist() == [0.1, 0.3, 0.5, 0.7, 0.6]
    assert y[1] == pytest.approx([0.1, 0.3, 0.5, 0.5, 0.5], abs=EXACT)


def test_the_mean_path_is_over_equal_steps_though_kl_need_not_rise(three):
    variants, _ = variants_of(load_runs(three))
    paths = [compare.path(run, "kl/ref", ACCURACY) for run in variants["lr 1.0"]]
    xs, ys, steps = compare.mean_path(paths)
    assert steps.tolist() == [1, 2, 3, 4]  # step 0 has no KL
    assert xs == pytest.approx([0.2, 0.2, 0.4, 0.5], abs=EXACT)
    assert ys == pytest.approx([0.4, 0.5, 0.8, 0.75], abs=EXACT)


def test_many_noisy_rows_are_smoothed_in_plots_but_not_in_figures(make):
    noisy = [step % 2 for step in range(100)]
    runs = load_runs([make("noisy", wall_s=range(100), reward__mean=noisy)])
    values = compare.path(runs[0], "step", "reward/mean")[1]
    # Of five: two ones, or three.
    assert values[10:-10] == pytest.approx([0.4, 0.6] * 40, abs=EXACT)
    assert compare.measure(runs[0], "reward/mean", 1.0).steps == 1


def test_labels_tell_the_losses_and_what_follows_from_them_is_left_out(make):
    options = {"wall_s": [0, 1], "eval__reward": [0, 1]}
    ignored = ("threads=1", "checkpoint.every=7")
    for i, loss in enumerate(("ppo", "aipo")):
        for lag in (0, 4):
            words = (f"loss={loss}", f"max_lag={lag}", *ignored)
            make(f"sweep/{i}{lag}", *words, **options)
    make("sweep/same", "loss=aipo", "max_lag=0", "seed=3", "metrics.trace=false", **options)
    runs = load_runs([make("elsewhere", "loss=tba", **options).parent / "sweep"])
    variants, implied = variants_of(runs)
    assert [(label, len(runs)) for label, runs in variants.items()] == [
        ("aipo, max_lag 0", 2),
        ("aipo, max_lag 4", 1),
        ("ppo, max_lag 0", 1),
        ("ppo, max_lag 4", 1),
    ]
    assert {"loss.ratio_cap", "loss.clip_low"} <= set(implied)
    assert {"seed", "threads", "max_lag"}.isdisjoint(implied)
    looks = compare.looks(list(variants))
    colours = [look["color"] for look in looks]
    assert colours[0] == colours[1] != colours[2]
    assert [look["linestyle"] for look in looks] == ["-", "--", "-", "--"]


def test_presets_of_one_function_are_told_by_their_names(make):
    own = "tests.launching:with_beta"
    given = {"a": ["loss=cispo"], "b": ["loss=aipo"], "c": [f"loss.fn={own}", "loss.beta=1"]}
    runs = [make(name, *loss, wall_s=[0], eval__reward=[1]) for name, loss in given.items()]
    variants, _ = variants_of(load_runs(runs))
    assert list(variants) == ["aipo", "cispo", own]


def test_numbers_are_sorted_as_numbers_and_shaded(make):
    folders = []
    for n in (16, 2, 128):
        folders.append(make(str(n), f"groups_per_step={n}", wall_s=[0], eval__reward=[1]))
    labels = list(variants_of(load_runs(folders))[0])
    assert labels == ["groups_per_step 2", "groups_per_step 16", "groups_per_step 128"]
    sweep = load_runs([folders[0].parent])
    assert [run.path.name for run in sweep] == ["2", "16", "128"]
    assert len({look["color"] for look in compare.looks(labels)}) == 3


def test_the_recipe_prints_a_table_and_writes_the_plots(three, tmp_path, capsys):
    out = tmp_path / "plots"
    assert compare.main([*map(str, three), "target=0.5", f"out={out}"]) == 0
    printed = capsys.readouterr().out
    assert "20.0 (20.0 to 20.0)" in printed and "lr 2.0" in printed
    assert png_size(out / "progress.png")[0] == 1650 and png_size(out / "pareto.png")[0] == 1080


def test_runs_without_kl_are_named_and_not_in_the_pareto_plot(make, tmp_path, capsys):
    folder = make("plain", wall_s=[0, 1], eval__reward=[0.5, 0.6])
    out = tmp_path / "plots"
    assert compare.main([str(folder), f"out={out}"]) == 0
    said = "plain: no KL to the reference, so eval/reward is not drawn over it; record it with "
    assert f"{said}reference=frozen" in capsys.readouterr().err
    assert [file.name for file in out.iterdir()] == ["progress.png"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["{run}", "y=eval/rewrd"], "no values of eval/rewrd; did you mean eval/reward?"),
        (["{run}", "x=kl/ref"], "no values of kl/ref; record it with reference=frozen"),
        (["{run}", "x=reward/mean"], "no row has all of reward/mean, eval/reward"),
        (["{empty}"], "no metrics.jsonl in it or in a directory of it"),
        (["y=eval/reward"], "required: set runs=RUNS"),
    ],
)
def test_what_cannot_be_compared_is_said_and_nothing_is_written(
    make, tmp_path, capsys, words, message
):
    run = make("run", wall_s=[0, 1], eval__reward=[0.5, None], reward__mean=[None, 0.3])
    (tmp_path / "empty").mkdir()
    words = [word.format(run=run, empty=tmp_path / "empty") for word in words]
    assert compare.main([*words, f"out={tmp_path / 'plots'}"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "plots").exists()


# --- Runs that a gold scorer has judged ---

JUDGED = {
    "wall_s": [0, 1, 2],
    "eval__reward": [0.1, None, 0.9],
    "eval__gold": [-1.0, None, -0.5],
    "eval__win_rate": [0.2, None, 0.4],
    "eval__win_rate_low": [0.1, None, 0.3],
    "eval__win_rate_high": [0.3, None, 0.5],
    "eval__perplexity": [1.2, None, 1.5],
    "completion__length_mean": [None, 50, 80],
    "kl__ref": [None, 0.02, 0.05],
}


def test_the_kl_is_of_a_whole_completion_and_nothing_before_the_first_step(make):
    frozen = make("frozen", "reference=frozen", **JUDGED)
    moves = make("moves", "reference=reset", **JUDGED)
    first, second = load_runs([frozen, moves])
    # sqrt(0.02 * 50) = 1, sqrt(0.05 * 80) = 2
    assert first.values(ROOT_KL)[0].tolist() == pytest.approx([0, 1, 2], abs=EXACT)
    assert ROOT_KL not in second.columns, "a reference that moves is not the first policy"


def test_the_table_has_what_gold_says_at_the_end(make):
    runs = load_runs([make("a", "lr=1", **JUDGED), make("b", "lr=2", wall_s=[0], eval__reward=[1])])
    variants, _ = variants_of(runs)
    head, one, two = compare.table(variants, "eval/reward", 1.0)
    assert head.split("  ")[-1].strip() == "eval/perplexity at the end"
    assert "eval/gold at the end" in head and "eval/win_rate at the end" in head
    assert one.split()[-3:] == ["-0.500", "0.400", "1.500"]
    assert two.split()[-3:] == ["-", "-", "-"]
    assert math.isnan(compare.measure(runs[1], "eval/reward", 1.0).gold)


def test_win_rate_and_gold_are_drawn(make, tmp_path, capsys):
    folders = []
    for name, *words in (("one", "lr=1"), ("s0", "lr=2", "seed=0"), ("s1", "lr=2", "seed=1")):
        folders.append(make(name, *words, "reference=frozen", **JUDGED))
    out = tmp_path / "plots"
    assert compare.main([*map(str, folders), f"out={out}"]) == 0
    assert capsys.readouterr().err == ""
    assert png_size(out / "win_rate.png")[0] == 1080 and png_size(out / "gold.png")[0] == 1650


def test_gold_without_a_reference_is_named_and_runs_without_gold_are_not(make, tmp_path, capsys):
    without = {name: values for name, values in JUDGED.items() if name != "kl__ref"}
    plain = {name: values for name, values in JUDGED.items() if "eval__" not in name}
    folders = [
        make("gold", "lr=1", **without),
        make("plain", "lr=2", "reference=frozen", reward__mean=[None, 0, 1], **plain),
    ]
    out = tmp_path / "plots"
    command = [*map(str, folders), f"out={out}"]
    assert compare.main([str(folders[0]), f"out={out}"]) == 0
    said = capsys.readouterr().err
    assert "gold: no √KL to the first policy, so eval/gold is not drawn over it" in said
    assert said.count("reference=frozen") == 2  # for the pareto plot too
    assert sorted(file.name for file in out.iterdir()) == ["progress.png", "win_rate.png"]
    assert compare.main([*command[1:], "y=reward/mean"]) == 0
    assert capsys.readouterr().err == ""
