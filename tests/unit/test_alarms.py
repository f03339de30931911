"""The report: alarms with figure, threshold and remedy; and samples that no text of a model can
break out of.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from llamarl.observe import report
from llamarl.observe.alarms import RECENT, Observed, alarms_of
from llamarl.observe.report import write_report

NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><!-- &amp;"


def columns(num_rows=30, **values):
    """Columns of so many rows; `__` stands for a slash."""
    found = {"step": np.arange(1.0, num_rows + 1)}
    for name, value in values.items():
        found[name.replace("__", "/")] = np.broadcast_to(np.asarray(value, float), num_rows).copy()
    return found


def rising(slope, start=5.0, num_rows=30):
    return start + slope * np.arange(num_rows)


def swinging(gain, num_rows=40):
    """A reward that swings by 0.1 around 0.5, and from the middle of the run by so much more."""
    swing = np.where(np.arange(num_rows) % 2, 0.6, 0.4)
    return swing + gain * (np.arange(num_rows) >= num_rows // 2)


def risen(first, newest, num_rows=40):
    return np.where(np.arange(num_rows) < num_rows // 2, first, newest)


def sample_of(step, *, taught):
    lines = [[ticket, 0.0, 0.5, 1.0, 8, 0, is_taught] for ticket, is_taught in enumerate(taught)]
    return {"step": step, "every": 1, "groups": lines, "shown": []}


def titles(run):
    return [alarm.title for alarm in alarms_of(run)]


SPIKE = np.where(np.arange(30) == 12, 400.0, 2.0)
# What is wrong -> values that say so, and the same just within the threshold.
CASES = {
    "failed": ({"outcome": {"ended": "failed", "step": 3}}, {"outcome": {"ended": "finished"}}),
    "is open far beyond": (
        {"silent_s": 31.0, "columns": columns(time__step_s=2.0)},
        {"silent_s": 29.0, "columns": columns(time__step_s=2.0)},
    ),
    "took far longer": (
        {"columns": columns(time__step_s=SPIKE)},
        {"columns": columns(time__step_s=np.minimum(SPIKE, 19.0))},
    ),
    "other tokens": (
        {"columns": columns(tokens__reencode_mismatch=[0.0] * 29 + [1.0])},
        {"columns": columns(tokens__reencode_mismatch=0.0)},
    ),
    "cannot be scored": (
        {"columns": columns(reward__error_rate=0.06)},
        {"columns": columns(reward__error_rate=0.04)},
    ),
    "teach nothing": (
        {"samples": [sample_of(1, taught=[True] + [False] * 5)]},
        {"samples": [sample_of(1, taught=[True] + [False] * 3)]},
    ),
    "are cut off": (
        {"columns": columns(completion__truncated_fraction=0.3)},
        {"columns": columns(completion__truncated_fraction=0.2)},
    ),
    "ended by a deadline": (
        {"columns": columns(completion__deadline_truncated_fraction=0.15)},
        {"columns": columns(completion__deadline_truncated_fraction=0.05)},
    ),
    "Entropy is near 0": (
        {"columns": columns(entropy=0.01)},
        {"columns": columns(entropy=0.03)},
    ),
    "Lag grows": (
        {"columns": columns(lag__mean=rising(0.25))},
        {"columns": columns(lag__mean=rising(0.15))},
    ),
    "disagree": (
        {"columns": columns(ratio__mean=0.4)},
        {"columns": columns(ratio__mean=1.9)},
    ),
    "cap acts": (
        {"columns": columns(ratio__capped_fraction=0.4)},
        {"columns": columns(ratio__capped_fraction=0.2)},
    ),
    # First and newest ten rows: means 0.5 and 0.5, or 0.5 and 0.6, each with deviation 0.105.
    "has not moved in 40 steps": (
        {"columns": columns(40, reward__mean=swinging(0.0), reward__std=0.4)},
        {"columns": columns(40, reward__mean=swinging(0.1), reward__std=0.4)},
    ),
    "Entropy has grown": (
        {"columns": columns(40, reward__mean=swinging(0.3), entropy=risen(2.0, 3.6))},
        {"columns": columns(40, reward__mean=swinging(0.3), entropy=risen(2.0, 3.4))},
    ),
    "has fallen": (
        {"columns": columns(eval__accuracy=[0.9] * 29 + [0.75])},
        {"columns": columns(eval__accuracy=[0.9] * 29 + [0.85])},
    ),
}


@pytest.mark.parametrize("title", CASES)
def test_an_alarm_is_given_beyond_its_threshold_and_not_within(title):
    beyond, within = CASES[title]
    (alarm,) = alarms_of(Observed(**{"columns": columns()} | beyond))
    assert title in alarm.title
    assert alarm.figure and alarm.threshold and alarm.remedy
    assert not alarms_of(Observed(**{"columns": columns()} | within))


def test_the_open_step_names_who_waited_for_what():
    waits = {"time__step_s": 2.0, "generator__idle_fraction__tickets": 0.6}
    run = Observed(columns=columns(**waits), silent_s=100.0)
    (alarm,) = alarms_of(run)
    assert alarm.title.startswith("Step 31 ") and "generator for tickets" in alarm.remedy
    assert alarm.figure == "100 s since the last row"
    ended = Observed(columns=columns(**waits), silent_s=1e6, outcome={"ended": "finished"})
    assert not alarms_of(ended)


STILL = {"reward__mean": swinging(0.0), "reward__std": 0.4}


@pytest.mark.parametrize(
    "fine",
    [
        {name: value if np.isscalar(value) else value[:39] for name, value in STILL.items()},
        STILL | {"reward__std": 0.0},  # equal rewards are another alarm
        STILL | {"eval__reward": [0.1] + [0.2] * 39},  # harder prompts, and better answers
    ],
    ids=["39 steps", "no spread", "held-out prompts"],
)
def test_a_reward_may_be_still_where_that_says_nothing(fine):
    num_rows = len(fine["reward__mean"])
    assert not any("not moved" in title for title in titles(Observed(columns(num_rows, **fine))))


@pytest.mark.parametrize("gain, entropy", [(0.0, (2.0, 3.6)), (0.3, (0.3, 0.9))])
def test_an_entropy_may_grow_without_the_reward_and_where_it_is_small(gain, entropy):
    rows = columns(40, reward__mean=swinging(gain), entropy=risen(*entropy))
    assert not titles(Observed(rows))


# Of a run of the default job on two cores: the first step, and the mean of each ten steps.
DEFAULT_JOB = {
    "reward__mean": (0.49, 0.54, 0.73, 0.77, 0.82, 0.81, 0.82, 0.84, 0.87, 0.85, 0.86),
    "entropy": (0.32, 0.34, 0.30, 0.27, 0.25, 0.24, 0.22, 0.21, 0.21, 0.21, 0.21),
}


def test_a_job_that_learns_as_the_default_one_has_no_alarm_at_any_step():
    swing = np.where(np.arange(100) % 2, 0.02, -0.02)
    between = np.linspace(0, 10, 100)
    made = {name: np.interp(between, np.arange(11), values) for name, values in DEFAULT_JOB.items()}
    made["reward__mean"] += swing
    for num_rows in range(1, 101, 9):
        rows = {name: values[:num_rows] for name, values in made.items()}
        assert not titles(Observed(columns(num_rows, **rows, reward__std=0.45)))


def test_what_is_long_past_is_no_alarm():
    errors = np.where(np.arange(60) < 60 - RECENT, 1.0, 0.0)
    assert not titles(Observed(columns=columns(60, reward__error_rate=errors)))


def test_a_lag_that_is_small_may_grow():
    assert not titles(Observed(columns=columns(num_rows=RECENT, lag__mean=rising(0.15, 0.0, 20))))


def test_without_samples_steps_of_one_reward_tell_that_nothing_is_taught():
    deviations = [0.0] * 29 + [0.5]
    (alarm,) = alarms_of(Observed(columns=columns(reward__std=deviations)))
    assert alarm.figure == "95% of the newest steps had one reward for all"


# --- The page ---


def token_values(text, *, reward, sampled=True):
    size = len(text)
    logprobs = [-0.5] * size if sampled else [None] * size
    return {
        "reward": reward,
        "shaped": reward,
        "parts": {"exact": reward},
        "finish": "stop",
        "outcome": "score",
        "trained": True,
        "length": size,
        "left_out": 0,
        "ids": list(range(size)),
        "text": list(text),
        "generator": logprobs,
        "trainer": logprobs,
        "lag": [[1, size]],
        "sampled": [[sampled, size]],
        "advantage": [[reward - 0.5, size]],
        "turn_reward": [[0.0, size]],
    }


def shown_sample(step, text=HOSTILE):
    completions = [token_values(text, reward=1.0), token_values("no", reward=0.0)]
    group = {"ticket": 7, "prompt": text, "taught": True, "completions": completions}
    return sample_of(step, taught=[True, False]) | {"shown": [group]}


def run_with(directory, samples):
    directory.mkdir(exist_ok=True)
    rows = [{"step": step, "loss/value": 0.5, "time/step_s": 1.0} for step in range(1, 5)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "".join(json.dumps(sample) + "\n" for sample in samples)
    (directory / "samples.jsonl").write_text(text)
    return directory


def test_no_text_of_a_model_is_html_in_the_page(tmp_path):
    page = write_report(run_with(tmp_path, [shown_sample(3)])).read_text()
    assert HOSTILE not in page and "<img src=x" not in page
    (data,) = re.findall(r"id='samples-data'>(.*?)</script>", page, re.DOTALL)
    texts = json.loads(data)["samples"][0]["shown"][0]
    assert texts["prompt"] == HOSTILE  # nothing of it is lost
    assert "innerHTML" not in page and "default-src 'none'" in page


def test_a_run_that_is_silent_is_an_open_step(tmp_path):
    directory = run_with(tmp_path, [])
    written = os.stat(directory / "metrics.jsonl").st_mtime
    late = write_report(directory, clock=lambda: written + 60).read_text()
    early = write_report(directory, clock=lambda: written + 20).read_text()
    assert "Step 5 is open" in late and "Step 5 is open" not in early


def test_a_page_holds_so_many_samples_and_the_newest(tmp_path, monkeypatch):
    samples = [shown_sample(step) for step in range(1, 21)]
    monkeypatch.setattr(report, "MOST_BYTES", len(json.dumps(samples[:6])))
    page = write_report(run_with(tmp_path, samples)).read_text()
    (data,) = re.findall(r"id='samples-data'>(.*?)</script>", page, re.DOTALL)
    steps = [sample["step"] for sample in json.loads(data)["samples"]]
    assert steps == [4, 8, 12, 16, 20] and "5 of 20 kept steps" in page


@pytest.mark.skipif(NODE is None, reason="there is no Node.js here")
@pytest.mark.parametrize(
    "text, shown",
    [
        ("plain é 中 ⏎\n\t", "plain é 中 ⏎\n\t"),
        ("a\u202e\u200b\0\x1b\U000e0041", "a⟨U+202E⟩⟨U+200B⟩⟨U+0000⟩⟨U+001B⟩⟨U+E0041⟩"),
    ],
)
def test_the_page_writes_out_characters_that_nobody_would_see(text, shown):
    script = (Path(report.__file__).parent / "viewer.js").read_text()
    (function,) = re.findall(r"^  function visible.*?^  }\n", script, re.DOTALL | re.MULTILINE)
    command = f"{function}; process.stdout.write(visible({json.dumps(text)}))"
    done = subprocess.run([NODE, "-e", command], capture_output=True, check=True, timeout=60)
    assert done.stdout.decode() == shown
    assert script.count("node.textContent = visible(text)") == 1


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
@pytest.mark.parametrize("colour", ["advantage", "__proto__", "nothing"])
def test_a_browser_shows_the_samples_without_an_error(tmp_path, colour):
    page = write_report(run_with(tmp_path, [shown_sample(2), shown_sample(3)]))
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--v=0",
        "--virtual-time-budget=3000",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        f"file://{page}#colour={colour}&step=2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    assert "step 2, 1 of 2 that fit" in done.stdout
    assert "best: completion 1, reward 1" in done.stdout
    assert "worst: completion 2, reward 0" in done.stdout
    assert '<img src="x"' not in done.stdout and "<title>owned" not in done.stdout
