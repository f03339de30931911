"""What is made of reward.stream, reference.stream and their keys, and what the report says of
them.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from executors.build import build_executors
from llamarl.comm.groups import World
from llamarl.config.command_line import compose_config
from llamarl.inference.cache import whole_blocks
from llamarl.launch.dry_run import dry_run
from llamarl.launch.graph import channels_between
from llamarl.launch.job import Job
from llamarl.launch.placement import Placement
from llamarl.launch.run_directory import RunDirectory
from llamarl.models.config import tiny_directory
from llamarl.observe.report import facts, streaming_verdict
from llamarl.types import Stretch
from tests.scorers import write_scorer

GIVEN = ("reward=model", f"reward.path={tiny_directory()}", "reward.stream=true")
REFERENCE = ("reference=frozen", "reference.stream=true")


def test_a_cache_holds_as_many_as_the_generators_unless_it_is_said():
    config = compose_config([*GIVEN, "generator.max_slots=10"])
    ranks = {"generator": (1, 2, 3), "reward": (4, 5), "reference": (4, 5)}
    placement = Placement(config, 6)
    placement.update(ranks)
    # 30 in two caches
    assert placement.stream_cache_tokens("reward") == 15 * whole_blocks(config.longest)
    config = compose_config([*GIVEN, *REFERENCE, "reward.cache_tokens=999"])
    placement = Placement(config, 6)
    placement.update(ranks)
    assert placement.stream_cache_tokens("reward") == 999
    slots = config.generator.max_slots
    rows = -(-3 * slots // 2)
    assert placement.stream_cache_tokens("reference") == rows * whole_blocks(config.longest)


@pytest.mark.parametrize(
    "overrides, wanted",
    [
        ([], []),
        (REFERENCE, [("stretches", "reference")]),
        ([*GIVEN, *REFERENCE], [("stretches", "reward"), ("reference_stretches", "reference")]),
    ],
)
def test_stretches_have_a_channel_only_where_they_are_read(overrides, wanted, tmp_path):
    write_scorer(tmp_path)
    of_scorer = [f"reward.path={tmp_path}"] if "reward=model" in overrides else []
    config = compose_config([*overrides, *of_scorer])
    job = Job(config, World(0, 1, torch.device("cpu")), RunDirectory(Path(), None))
    generator, reward, references, trainer = build_executors(config, job)
    channels = channels_between([generator, reward, *references, trainer])
    found = [(c.name, c.destination.name) for c in channels if c.carries is Stretch]
    assert found == wanted


def test_a_dry_run_says_what_the_caches_take(tmp_path, capsys):
    """Keys and values of four bytes: by layers, heads and their sizes 192 bytes a token of the
    scorer, 3,072 of the policy and of the reference.
    """
    write_scorer(tmp_path)
    scorer = ("reward=model", f"reward.path={tmp_path}", "reward.dtype=float32")
    caches = ("reward.cache_tokens=4194304", "reference.cache_tokens=8388608")
    world = World(0, 2, torch.device("cpu"))

    def said(*overrides):
        config = compose_config(["reference=frozen", *scorer, *overrides])
        dry_run(Job(config, world, RunDirectory(Path("."), None)))
        return capsys.readouterr().out

    with_both = said("reward.stream=true", "reference.stream=true", *caches)
    assert "stream   0.75 GiB a reward rank, for a cache of 4,194,304 tokens" in with_both
    assert "memory   reference: 24.01 GiB held" in with_both
    with_neither = said()
    assert "stream   " not in with_neither and "memory   reference: 0.01 GiB held" in with_neither


# --- The report ---


def columns(**changes):
    """Two rows: an answer of 100 tokens, at a millisecond a token."""
    given = {
        "step": [1, 2],
        "reward/prefilled_early": [0.9, np.nan],
        "reward/tail_s": [0.02, np.nan],
        "reward/evictions": [0, np.nan],
        "reward/model/seconds": [2, 4],
        "reward/model/tokens": [2000, 4000],
        "completion/length_mean": [100, 100],
    } | {name.replace("__", "/"): values for name, values in changes.items()}
    return {name: np.array(values, dtype=np.float64) for name, values in given.items()}


def test_a_short_tail_has_paid_and_without_streaming_nothing_is_said():
    said = dict(facts(columns()))["streaming to the scorer"]
    assert said == (
        "paid: 90% of a completion read before it ended; its score 0.02 s after (read alone: 0.1 s)"
    )
    without = columns()
    del without["reward/tail_s"]
    assert streaming_verdict(without) is None


@pytest.mark.parametrize(
    "changes, knob",
    [
        ({"reward__prefilled_early": [0.2, 0.4]}, "lower reward.piece_tokens"),
        (
            {"reward__prefilled_early": [0.2, 0.4], "reward__evictions": [0, 3]},
            "raise reward.cache_tokens",
        ),
        ({"reward__tail_s": [0.3, 0.3]}, "a rank of its own in placement.reward"),
    ],
)
def test_what_did_not_pay_names_the_key_to_turn(changes, knob):
    said = streaming_verdict(columns(**changes))
    assert said.startswith("did not pay") and knob in said
