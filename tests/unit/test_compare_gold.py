"""Comparing runs that a gold scorer has judged: KL by hand, and what is drawn over it."""

import math

import pytest

from llamarl.observe.compare import ROOT_KL, load_runs, variants_of
from tests.unit.comparing import EXACT, make, png_size, recipe

__all__ = ["make", "recipe"]  # fixtures

NUM_SEEDS = 2
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
    (run,) = load_runs([make("run", "reference=frozen", **JUDGED)])
    # sqrt(0.02 * 50) = 1, sqrt(0.05 * 80) = 2
    assert run.values(ROOT_KL)[0].tolist() == pytest.approx([0, 1, 2], abs=EXACT)


def test_a_reference_that_moves_gives_no_kl_to_the_first_policy(make):
    (run,) = load_runs([make("run", "reference=reset", **JUDGED)])
    assert ROOT_KL not in run.columns


def test_the_path_has_a_point_an_evaluation(make, recipe):
    (run,) = load_runs([make("run", "reference=frozen", **JUDGED)])
    assert recipe.path(run, "eval/perplexity", "eval/win_rate").tolist() == [
        [1.2, 1.5],
        [0.2, 0.4],
        [0, 2],
    ]


def test_the_table_has_what_gold_says_at_the_end(make, recipe):
    runs = load_runs([make("a", "lr=1", **JUDGED), make("b", "lr=2", wall_s=[0], eval__reward=[1])])
    variants, _ = variants_of(runs)
    head, one, two = recipe.table(variants, "eval/reward", 1.0)
    assert head.split("  ")[-1].strip() == "eval/perplexity at the end"
    assert "eval/gold at the end" in head and "eval/win_rate at the end" in head
    assert [cell for cell in one.split()][-3:] == ["-0.500", "0.400", "1.500"]
    assert [cell for cell in two.split()][-3:] == ["-", "-", "-"]
    assert math.isnan(recipe.measure(runs[1], "eval/reward", 1.0).gold)


def test_win_rate_and_gold_are_drawn(make, recipe, tmp_path, capsys):
    folders = [make("one", "lr=1", "reference=frozen", **JUDGED)]
    for seed in range(NUM_SEEDS):
        folders.append(make(f"s{seed}", "lr=2", f"seed={seed}", "reference=frozen", **JUDGED))
    out = tmp_path / "plots"
    assert recipe.main([*map(str, folders), f"out={out}"]) == 0
    assert capsys.readouterr().err == ""
    assert png_size(out / "win_rate.png")[0] == 1080 and png_size(out / "gold.png")[0] == 1650


def test_gold_without_a_reference_is_named_and_runs_without_gold_are_not(
    make, recipe, tmp_path, capsys
):
    without = {name: values for name, values in JUDGED.items() if name != "kl__ref"}
    plain = {name: values for name, values in JUDGED.items() if "eval__" not in name}
    folders = [
        make("gold", "lr=1", **without),
        make("plain", "lr=2", "reference=frozen", reward__mean=[None, 0, 1], **plain),
    ]
    out = tmp_path / "plots"
    command = [*map(str, folders), f"out={out}"]
    assert recipe.main([str(folders[0]), f"out={out}"]) == 0
    said = capsys.readouterr().err
    assert "gold: no √KL to the first policy, so eval/gold is not drawn over it" in said
    assert said.count("reference=frozen") == 2  # for the pareto plot too
    assert sorted(file.name for file in out.iterdir()) == ["progress.png", "win_rate.png"]
    assert recipe.main([*command[1:], "y=reward/mean"]) == 0
    assert capsys.readouterr().err == ""
