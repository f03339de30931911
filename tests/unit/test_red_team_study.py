"""What benchmarks/red_team.py makes of rows, and what it says of them."""

import math
import sys

import pytest

from llamarl.config.command_line import RED_TEAM, compose_config
from tests.launching import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import red_team  # noqa: E402


def row(step, success, diversity=None):
    values = {"step": step, "eval/success": success, "time/evaluated_s": 2.0 * step}
    return values if diversity is None else values | {"eval/diversity": diversity}


def result(name, *pairs, panel="method"):
    """Of (success, diversity) of each seed."""
    runs = tuple(red_team.found_in([row(10, *pair)]) for pair in pairs)
    return red_team.Result(red_team.Case(panel, name, ()), runs)


def test_a_run_comes_to_its_last_evaluation_and_to_the_first_above_the_target():
    found = red_team.found_in([row(0, 0.1), {"step": 1}, row(2, 0.6), row(4, 0.4, 0.3)])
    assert (found.success, found.diversity, found.distinct) == (0.4, 0.3, None)
    assert (found.steps, found.seconds) == (2, 4.0)
    assert red_team.found_in([row(0, 0.1)]).steps is None
    assert red_team.found_in([row(0, 0.1), row(2, 0.3), row(4, 0.2)], 0.2).steps == 2
    with pytest.raises(ValueError, match="no row has eval/success"):
        red_team.found_in([{"step": 1}])


def test_each_setting_is_compared_with_the_most_diverse_tba_that_succeeds_as_often():
    ours = [
        result("TBA, beta 1", (0.80, 0.5), (0.82, 0.5)),
        result("TBA, beta 2", (0.62, 0.7)),
        result("TBA, beta 3", (0.30, 0.9)),
    ]
    others = {
        "TBA, beta 1: more diverse than even": result("even", (0.83, 0.4)),
        "TBA, beta 2: more diverse than weak": result("weak", (0.64, 0.6)),
        "TBA, beta 1: not more diverse than wide": result("wide", (0.8, 0.6)),
        "No TBA succeeds as often as strong: 81% against 95%": result("strong", (0.95, 0.4)),
    }
    said = red_team.method_verdicts([*ours, *others.values()])
    assert all(sentence.startswith(what) for what, sentence in zip(others, said, strict=True))
    assert "nothing is said" in red_team.method_verdicts(ours)[0]


def test_more_searchers_are_compared_only_where_all_arrived():
    one, four = (result(name, (0.6, 0.1), panel="searchers") for name in ("1", "4"))
    assert "no fewer steps" in red_team.searchers_verdicts([one, four])[0]
    never = result("4", (0.1, 0.1), panel="searchers")
    assert "Not all runs came to" in red_team.searchers_verdicts([one, never])[0]


def test_a_value_is_better_only_where_all_seeds_say_so():
    low = result("m = 0.0", (0.2, 0.1), (0.3, 0.1), panel="m")
    high = result("m = 0.5", (0.6, 0.1), (0.7, 0.1), panel="m")
    mixed = result("m = 1.0", (0.1, 0.1), (0.65, 0.1), panel="m")
    assert "m = 0.5 succeeds most, 65%" in red_team.offpolicy_verdicts([low, high])[0]
    assert "no value is better" in red_team.offpolicy_verdicts([mixed, high])[0]


def test_the_table_says_how_many_arrived():
    both = red_team.Result(
        red_team.Case("m", "0", ()),
        (red_team.found_in([row(10, 0.6)]), red_team.found_in([row(10, 0.1)])),
    )
    assert red_team.shown(both.values("steps"), ".0f") == "10 (10–10), 1 of 2"
    assert red_team.shown([math.inf], ".0f") == "–"
    assert "| m, 0 | 35 (10–60) | – | – |" in red_team.table([both])


@pytest.mark.parametrize("study", ["methods", "offpolicy"])
def test_every_case_is_a_run_that_may_be(study):
    for case in red_team.cases_of(study):
        compose_config([*red_team.COMMON, *case.overrides], RED_TEAM)


def test_searchers_are_ranks_beside_the_trainers():
    cases = red_team.cases_of("searchers")
    assert [case.ranks for case in cases] == [2, 3, 5]
    assert "placement.generator=[1,2]" in cases[1].overrides


@pytest.mark.slow
def test_sft_learns_the_starts_successful_attacks_and_attacks_with_them(tmp_path):
    words = ["max_steps=0", "eval.num_samples=16", "groups_per_step=4", "group_size=4"]
    found = red_team.supervised_row(tmp_path, words, 256)
    successful = [attack for attack in red_team.samples_of(tmp_path / "start") if attack["success"]]
    learned = (tmp_path / "attacks.jsonl").read_text().splitlines()
    assert len(learned) == len(successful) > 0
    assert 0 <= found["eval/success"] <= 1
    assert 0 < found["eval/diversity"] < 2
