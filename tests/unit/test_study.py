"""benchmarks/study.py without a job: verdicts, pairing, refusals, and how its runs go on."""

import json
from dataclasses import replace

import pytest

from llamarl.config.command_line import RED_TEAM, check_command_line, compose_config
from tests.house import ROOT

# The benchmark's own files, which are scripts: they find each other beside themselves.
with pytest.MonkeyPatch.context() as beside:
    beside.syspath_prepend(str(ROOT / "benchmarks"))
    import claims
    import studies
    import study as program
    import study_pages as pages
    import study_runs as runner
    import study_terms as terms
    import study_verdicts as verdicts
WHERE = {"cores": 2, "cpu": "a CPU", "torch": "2"}
ABOUT = {"date": "2026-11-24", "machine": WHERE}


def run_of(*accuracies, failed=None):
    """A run with a look a step, from step 0 on; its perplexity is 1 and a tenth of its step."""
    rows = []
    for step, accuracy in enumerate(accuracies):
        rows.append({"step": step, "eval/accuracy": accuracy, "eval/perplexity": 1 + step / 10})
    return terms.Run(tuple(rows), failed)


def question(**changed):
    asked = terms.Question(
        name="new less old",
        left=terms.Last("new", "eval/accuracy"),
        right=terms.Last("old", "eval/accuracy"),
        expect="more",
        margin=2.0,
        unit="points",
        times=100,
    )
    return replace(asked, **changed)


def study_of(**changed):
    """Two arms, three seeds; `new` must have learned."""
    made = terms.Study(
        name="example",
        paper="A paper",
        section="3",
        title="New is better",
        claim="new is better than old.",
        refuted_by="a gain of at most 2 points.",
        arms=(terms.Arm("new", ("lr=2",)), terms.Arm("old", ("lr=1",))),
        questions=(question(),),
        checks=(terms.Check("learned", terms.Last("new", "eval/accuracy"), "above", 0.5),),
        seeds=(0, 1, 2),
        common=("max_steps=2",),
        minutes=1,
        y="eval/accuracy",
    )
    return replace(made, **changed)


def by_seed(new, old):
    """The runs of each seed, whose last accuracies these are."""
    found = {}
    for seed, (first, second) in enumerate(zip(new, old)):
        found[seed] = {"new": run_of(0.4, first), "old": run_of(0.4, second)}
    return found


# --- Verdicts ---


def test_an_interval_is_of_the_paired_differences():
    runs = by_seed(new=(0.90, 0.80, 0.70), old=(0.80, 0.80, 0.60))
    found = verdicts.answer(question(), list(runs.values()))
    # Differences of 10, 0, 10 points: deviation 5.774, times 4.303 over the root of 3.
    assert found.mean == pytest.approx(20 / 3) and found.half == pytest.approx(14.34, abs=0.01)
    assert found.differences == pytest.approx((10.0, 0.0, 10.0))
    # Unpaired, the seeds' own spread would be in it.
    steady = by_seed(new=(0.90, 0.50, 0.10), old=(0.80, 0.40, 0.00))
    assert verdicts.answer(question(), list(steady.values())).half == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    "expect, margin, low, high, verdict",
    [
        ("more", 2.0, 2.1, 5.0, "held"),
        ("more", 2.0, 1.9, 5.0, "not answered"),
        ("more", 2.0, -3.0, 1.9, "smaller"),
        ("more", 2.0, -3.0, -0.1, "opposite"),
        ("less", 2.0, -5.0, -2.1, "held"),
        ("less", 2.0, -1.9, 3.0, "smaller"),
        ("less", 2.0, 0.1, 3.0, "opposite"),
        ("same", 2.0, -1.9, 1.9, "held"),
        ("same", 2.0, -1.9, 2.1, "not answered"),
        ("same", 2.0, 2.1, 3.0, "opposite"),
        ("same", 2.0, -3.0, -2.1, "opposite"),
        # A claim that allows a loss is opposite beyond it alone.
        ("more", -2.0, -1.5, -0.5, "held"),
        ("more", -2.0, -3.0, -1.0, "not answered"),
        ("more", -2.0, -5.8, -2.1, "opposite"),
    ],
)
def test_a_verdict_is_where_the_interval_lies_to_the_margin(expect, margin, low, high, verdict):
    assert verdicts.judge(expect, margin, low, high) == verdict


def test_all_questions_must_hold_and_one_may_be_opposite_or_too_small():
    all_hold = verdicts.all_hold
    assert all_hold(["held", "held"]) == "held"
    assert all_hold(["held", "not answered"]) == "not answered"
    assert all_hold(["held", "not answered", "opposite"]) == "opposite"
    assert all_hold(["held", "smaller", "not answered"]) == "smaller"
    assert all_hold(["smaller", "opposite"]) == "opposite"


def test_a_run_in_no_state_to_answer_leaves_its_study_without_an_answer():
    good = by_seed(new=(0.90, 0.91, 0.92), old=(0.80, 0.81, 0.82))
    assert verdicts.outcome(study_of(), good).verdict == "held"
    bad = by_seed(new=(0.90, 0.91, 0.45), old=(0.80, 0.81, 0.35))
    found = verdicts.outcome(study_of(), bad)
    assert found.answers[0].verdict == "held" and found.verdict == "not answered"
    assert "learned" in found.failed_checks[0] and found.failed_checks[0].endswith("seed 2")
    good[1]["old"] = run_of(0.4, 0.81, failed="NotFinite: step 2")
    found = verdicts.outcome(study_of(), good)
    assert found.verdict == "not answered" and "[old] did, of seed 1" in found.failed_checks[0]


def test_a_review_takes_a_verdict_away_and_changes_nothing_that_was_announced():
    plain = study_of()
    runs = by_seed(new=(0.90, 0.91, 0.92), old=(0.80, 0.81, 0.82))
    check = terms.Check("old has room", terms.Last("old", "eval/accuracy"), "below", 0.82)
    checked = replace(plain, review=terms.Review("All arms arrive.", checks=(check,)))
    assert verdicts.outcome(plain, runs).verdict == "held"
    found = verdicts.outcome(checked, runs)
    assert found.verdict == "not answered"
    assert "old has room" in found.failed_checks[0] and "seed 2" in found.failed_checks[0]
    assert pages.announcement(checked) == pages.announcement(plain)
    shown = pages.page(checked, pages.entry(checked, runs, ABOUT))
    assert "**Found after the runs**: All arms arrive." in shown
    unread = terms.Check("far", terms.Last("old", "kl/generator"), "above", 0.02)
    unread = replace(plain, review=terms.Review("", checks=(unread,)))
    assert verdicts.outcome(unread, runs).verdict == "not answered"
    assert "kl/generator" in unread.columns


def test_a_question_that_was_thought_of_after_the_runs_is_not_answered_by_them():
    later = question(name="what the paper says", margin=1.0)
    study = study_of(review=terms.Review("Another claim.", questions=(later,)))
    runs = by_seed(new=(0.90, 0.91, 0.92), old=(0.80, 0.81, 0.82))
    found = verdicts.outcome(study, runs)
    assert [answer.verdict for answer in found.answers] == ["held", "held"]
    assert found.verdict == "not answered"
    assert pages.telling(study, found)[0] == later


def test_nothing_is_said_before_all_announced_seeds_have_run():
    runs = by_seed(new=(0.90, 0.91), old=(0.80, 0.81))
    assert verdicts.outcome(study_of(), runs).verdict == "not tested yet"
    runs[2] = {"new": run_of(0.4, 0.92)}
    assert verdicts.outcome(study_of(), runs).verdict == "not tested yet"


def test_what_has_no_margin_or_no_verdict_is_refused():
    with pytest.raises(ValueError, match="nothing is the same"):
        question(expect="same", margin=0)
    with pytest.raises(ValueError, match="none of more, less, same"):
        question(expect="better")
    with pytest.raises(ValueError, match="no question decides"):
        study_of(questions=(question(decides=False),))
    with pytest.raises(ValueError, match="at least 2 seeds"):
        study_of(seeds=(0,))
    with pytest.raises(ValueError, match="two arms have one name"):
        study_of(arms=(terms.Arm("new"), terms.Arm("new")))


# --- Values ---


def test_values_are_read_off_looks():
    runs = {"a": run_of(0.3, 0.5, None, 0.9, 0.7)}
    of = ("a", "eval/accuracy")
    assert terms.Last(*of)(runs) == 0.7 and terms.Last(*of, 2)(runs) == 0.8
    assert terms.Last(*of, 9)(runs) is None
    assert terms.Start(*of)(runs) == 0.3 and terms.Start(*of, 2.0)(runs) == 0.6
    assert terms.Start("a", "z")(runs) is None
    assert terms.Gain(*of, 2)(runs) == pytest.approx(0.5) and terms.Gain(*of, 9)(runs) is None
    assert terms.Highest(*of)(runs) == 0.9 and terms.LookOfHighest(*of)(runs) == 2
    assert terms.Fall(*of)(runs) == pytest.approx(0.2)
    # Of the rows after the start 0.5, 0.9, 0.7: the second half begins with 0.9.
    assert terms.MeanOver(*of)(runs) == pytest.approx(0.8)
    assert terms.FirstAt(*of, 0.6)(runs) == 3 and terms.FirstAt(*of, 0.95)(runs) == 4
    assert terms.Minus(terms.Highest(*of), terms.Constant(0.4))(runs) == 0.5
    assert terms.Over(terms.Highest(*of), terms.Start(*of))(runs) == pytest.approx(3.0)
    assert terms.Over(terms.Highest(*of), terms.Constant(0.0))(runs) is None
    assert terms.Over(terms.Last(*of, 9), terms.Constant(1.0))(runs) is None
    # Perplexity is 1.1 at 0.5 and 1.3 at 0.9: 1.15 lies a quarter of the way.
    when = terms.When("a", "eval/accuracy", "eval/perplexity", 1.15)
    assert when(runs) == pytest.approx(0.6)
    assert terms.After(*of, 1)(runs) == 0.5
    assert terms.After(*of, 2)(runs) is None and terms.After(*of, 9)(runs) is None
    # Where another arm is after a step: at 0.6 after two, between 0.5 and 0.9 of `a`'s own.
    runs["b"] = run_of(0.3, 0.6)
    as_b = terms.When("a", "eval/perplexity", "eval/accuracy", terms.After("b", of[1], 1))
    assert as_b(runs) == pytest.approx(1.15)
    assert "where its eval/accuracy first is the eval/accuracy of [b] after step 1" in as_b.said
    unseen = terms.When("a", "eval/perplexity", "eval/accuracy", terms.After("b", of[1], 2))
    assert unseen(runs) is None
    # The means of two looks in a row are 0.4, 0.7 and 0.8, at steps 1, 3 and 4.
    when = terms.When("a", "step", "eval/accuracy", 0.7, over=2)
    assert when(runs) == pytest.approx(3) and "where its mean eval/accuracy of 2 steps" in when.said
    assert terms.When("a", "step", "eval/accuracy", 0.55, over=2)(runs) == pytest.approx(2)
    assert terms.When("a", "step", "eval/accuracy", 0.85, over=2)(runs) is None
    assert terms.When("a", "step", "eval/accuracy", 0.5, over=9)(runs) is None


def test_a_family_is_read_between_its_members_at_the_value_of_another():
    runs = {
        "low": terms.Run(({"step": 1, "x": 0.2, "y": 0.8},)),
        "high": terms.Run(({"step": 1, "x": 0.6, "y": 0.4},)),
        "other": terms.Run(({"step": 1, "x": 0.3},)),
    }
    assert terms.Between(("high", "low"), "y", "x", "other")(runs) == pytest.approx(0.7)
    runs["other"] = terms.Run(({"step": 1, "x": 0.7},))
    assert terms.Between(("high", "low"), "y", "x", "other")(runs) is None


# --- Runs ---


class FakeMaker:
    """Writes a run's rows at once. Seed by seed and arm by arm it notes what it was asked for."""

    def __init__(self, *, stops_at=None, fails_at=None, diverges_at=None):
        self.asked = []
        self.stops_at = stops_at
        self.fails_at = fails_at
        self.diverges_at = diverges_at

    def __call__(self, piece, deadline):
        place = (piece.seed, piece.arm.name)
        self.asked.append(place)
        piece.run_dir.mkdir(parents=True, exist_ok=True)
        if place == self.stops_at:
            (piece.run_dir / "checkpoint").write_text("half")
            return False
        if place == self.fails_at:
            raise RuntimeError(f"{piece.title} failed")
        if place == self.diverges_at:
            (piece.run_dir.parent / "diverged").write_text("NotFinite: step 1")
        last = 0.9 if piece.arm.name == "new" else 0.8
        rows = [
            {"step": 0, "eval/accuracy": 0.4},
            {"step": 1, "eval/accuracy": last + piece.seed / 100, "other": 7, "time/wall_s": 2.5},
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (piece.run_dir / "metrics.jsonl").write_text(lines)
        return True


NUM_RUNS = 6  # of two arms and three seeds


def test_arms_take_turns_and_each_seed_begins_with_another(tmp_path):
    study = study_of()
    maker = FakeMaker()
    assert runner.make(study, tmp_path, {}, maker=maker)
    assert maker.asked == [
        *((0, "new"), (0, "old")),
        *((1, "old"), (1, "new")),
        *((2, "new"), (2, "old")),
    ]
    found = runner.loaded(study, tmp_path)
    assert sorted(found) == [0, 1, 2]
    assert found[2]["new"].rows[-1] == {"step": 1, "eval/accuracy": 0.92, "time/wall_s": 2.5}


def test_what_is_kept_is_not_made_again_and_what_was_stopped_goes_on_in_its_directory(tmp_path):
    study = study_of()
    first = FakeMaker(stops_at=(1, "old"))
    assert not runner.make(study, tmp_path, {}, maker=first)
    assert first.asked == [(0, "new"), (0, "old"), (1, "old")]
    stopped = runner.piece_of(study, study.arms[1], 1, tmp_path, {})
    assert (stopped.run_dir / "checkpoint").read_text() == "half"
    assert "resume=auto" in stopped.words
    second = FakeMaker()
    assert runner.make(study, tmp_path, {}, maker=second)
    assert second.asked == [(1, "old"), (1, "new"), (2, "new"), (2, "old")]
    assert not stopped.run_dir.exists()


def test_a_run_that_fails_ends_the_study_and_one_that_diverges_is_a_result(tmp_path):
    study = study_of()
    with pytest.raises(RuntimeError, match=r"\[old\] seed 0 failed"):
        runner.make(study, tmp_path, {}, maker=FakeMaker(fails_at=(0, "old")))
    assert runner.make(study, tmp_path, {}, maker=FakeMaker(diverges_at=(0, "old")))
    found = runner.loaded(study, tmp_path)
    assert found[0]["old"].failed == "NotFinite: step 1" and found[1]["old"].failed is None
    assert verdicts.outcome(study, found).verdict == "not answered"


# --- What was announced ---


def test_no_run_is_made_unless_the_committed_page_announces_these_settings(tmp_path):
    study = study_of()
    maker = FakeMaker()

    def conduct(text, announced=study):
        return program.conduct(
            announced, runs=tmp_path / "runs", folder=tmp_path, given={}, text=text, maker=maker
        )

    with pytest.raises(pages.NotAnnounced, match="no page of it is committed"):
        conduct(None)
    program.announce(study, tmp_path, "2026-11-24")
    text = (tmp_path / "example.md").read_text()
    wider = replace(study, questions=(question(margin=1.0),))
    for changed in (
        wider,
        replace(study, seeds=(0, 1)),
        replace(study, checks=()),
        replace(study, common=("max_steps=3",)),
        replace(study, arms=(terms.Arm("new", ("lr=3",)), study.arms[1])),
    ):
        with pytest.raises(pages.NotAnnounced, match="something else"):
            conduct(text, changed)
    assert maker.asked == []
    assert conduct(text)
    assert len(maker.asked) == NUM_RUNS


# --- Pages ---


def test_a_page_says_what_its_results_come_to(tmp_path):
    study = study_of()
    runs = by_seed(new=(0.90, 0.91, 0.92), old=(0.80, 0.81, 0.82))
    file = tmp_path / "example.json"
    pages.write_entry(file, pages.entry(study, runs, ABOUT))
    kept = pages.read_entry(study, tmp_path)
    assert pages.runs_of(kept)[1]["old"].rows[-1]["eval/accuracy"] == 0.81
    page = pages.page(study, kept)
    assert pages.announced_in(page) == pages.announcement(study)
    assert "## Held" in page and "+10.0 [+10.0, +10.0] points" in page
    assert pages.headline(study, verdicts.outcome(study, runs)).startswith(
        "New is better: held; +10"
    )
    pages.draw(study, kept, tmp_path / "example.png")
    assert (tmp_path / "example.png").stat().st_size > 1000


def test_pages_announce_what_their_settings_say_and_tell_what_their_results_come_to():
    for study in studies.STUDIES.values():
        text = pages.page_file(study).read_text()
        kept = pages.read_entry(study)
        if not pages.results_file(study).exists():
            assert pages.announced_in(text) == pages.announcement(study), study.name
        if kept is not None:
            assert text == pages.page(study, kept), study.name


def test_the_table_of_claims_is_that_of_the_results():
    text = claims.PAGE.read_text()
    assert claims.refreshed(text) == text
    with pytest.raises(ValueError, match="needs one"):
        claims.refreshed("no table")


def test_every_page_of_a_claim_exists():
    rows = list(claims.claims())
    assert not [row.page.name for row in rows if not row.page.exists()]
    names = [row.claim for row in rows]
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_every_arm_is_a_job_that_the_config_accepts(tmp_path):
    for study in studies.STUDIES.values():
        for arm in study.arms:
            if arm.made_by is not None or study.given:
                continue
            words = [*runner.words_of(study, arm, 0), *runner.ALWAYS]
            words.append(f"run_dir={tmp_path}")
            if study.recipe == "red_team.py":
                compose_config(words, RED_TEAM)
            else:
                assert check_command_line(words, world_size=arm.ranks)
