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
from tests.build.rows import write_rows

NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><!-- &amp;"


def seen(*, samples=(), outcome=None, silent_s=0.0, **values):
    """A run with these columns; `__` stands for a slash, and a number for as many as are needed."""
    num_rows = max((len(value) for value in values.values() if np.ndim(value)), default=30)
    columns = {"step": np.arange(1.0, num_rows + 1)}
    for name, value in values.items():
        value = np.broadcast_to(np.asarray(value, float), num_rows).copy()
        columns[name.replace("__", "/")] = value
    return Observed(columns=columns, samples=samples, outcome=outcome, silent_s=silent_s)


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


SPIKE = np.where(np.arange(30) == 12, 400.0, 2.0)
STILL = {"reward__mean": swinging(0.0), "reward__std": 0.4}
# What is wrong, in a run that says so, and in the same just within the threshold.
CASES = [
    ("failed", seen(outcome={"ended": "failed", "step": 3}), seen(outcome={"ended": "finished"})),
    ("is open far", seen(silent_s=31.0, time__step_s=2.0), seen(silent_s=29.0, time__step_s=2.0)),
    ("took far longer", seen(time__step_s=SPIKE), seen(time__step_s=np.minimum(SPIKE, 19.0))),
    (
        "other tokens",
        seen(tokens__reencode_mismatch=[0.0] * 29 + [1.0]),
        seen(tokens__reencode_mismatch=0.0),
    ),
    ("cannot be scored", seen(reward__error_rate=0.06), seen(reward__error_rate=0.04)),
    (
        "teach nothing",
        seen(samples=[sample_of(1, taught=[True] + [False] * 5)]),
        seen(samples=[sample_of(1, taught=[True] + [False] * 3)]),
    ),
    ("teach nothing", seen(reward__std=[0.0] * 29 + [0.5]), seen(reward__std=[0.5] * 30)),
    (
        "are cut off",
        seen(completion__truncated_fraction=0.3),
        seen(completion__truncated_fraction=0.2),
    ),
    (
        "ended by a deadline",
        seen(completion__deadline_truncated_fraction=0.15),
        seen(completion__deadline_truncated_fraction=0.05),
    ),
    ("Entropy is near 0", seen(entropy=0.01), seen(entropy=0.03)),
    ("Lag grows", seen(lag__mean=rising(0.25)), seen(lag__mean=rising(0.15))),
    ("disagree", seen(ratio__mean=0.4), seen(ratio__mean=1.9)),
    ("cap acts", seen(ratio__capped_fraction=0.4), seen(ratio__capped_fraction=0.2)),
    # First and newest ten rows: means 0.5 and 0.5, or 0.5 and 0.6, each with deviation 0.105.
    (
        "has not moved in 40 steps",
        seen(**STILL),
        seen(reward__mean=swinging(0.1), reward__std=0.4),
    ),
    (
        "Entropy has grown",
        seen(reward__mean=swinging(0.3), entropy=risen(2.0, 3.6)),
        seen(reward__mean=swinging(0.3), entropy=risen(2.0, 3.4)),
    ),
    (
        "has fallen",
        seen(eval__accuracy=[0.9] * 29 + [0.75]),
        seen(eval__accuracy=[0.9] * 29 + [0.85]),
    ),
]


@pytest.mark.parametrize("title, beyond, within", CASES)
def test_an_alarm_is_given_beyond_its_threshold_and_not_within(title, beyond, within):
    (alarm,) = alarms_of(beyond)
    assert title in alarm.title
    assert alarm.figure and alarm.threshold and alarm.remedy
    assert not alarms_of(within)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(seen(reward__mean=swinging(0.0)[:39], reward__std=0.4), id="39 steps"),
        pytest.param(seen(**STILL, eval__reward=[0.1] + [0.2] * 39), id="harder held-out prompts"),
        pytest.param(
            seen(reward__mean=swinging(0.0), entropy=risen(2.0, 3.6)), id="entropy without reward"
        ),
        pytest.param(
            seen(reward__mean=swinging(0.3), entropy=risen(0.3, 0.9)), id="a small entropy"
        ),
        pytest.param(
            seen(reward__error_rate=np.where(np.arange(60) < 60 - RECENT, 1.0, 0.0)), id="long past"
        ),
        pytest.param(seen(lag__mean=rising(0.15, 0.0, RECENT)), id="a small lag"),
    ],
)
def test_there_is_no_alarm_where_a_figure_says_nothing(run):
    assert not alarms_of(run)


def test_the_open_step_names_who_waited_for_what():
    waits = {"time__step_s": 2.0, "generator__idle_fraction__tickets": 0.6}
    (alarm,) = alarms_of(seen(**waits, silent_s=100.0))
    assert alarm.title.startswith("Step 31 ") and "generator for tickets" in alarm.remedy
    assert alarm.figure == "100 s since the last row"
    assert not alarms_of(seen(**waits, silent_s=1e6, outcome={"ended": "finished"}))


def test_equal_rewards_are_one_alarm_alone():
    (alarm,) = alarms_of(seen(reward__mean=swinging(0.0), reward__std=0.0))
    assert alarm.figure == "100% of the newest steps had one reward for all"


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
        assert not alarms_of(seen(**rows, reward__std=0.45))


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
    write_rows(directory / "metrics.jsonl", *rows)
    write_rows(directory / "samples.jsonl", *samples)
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
