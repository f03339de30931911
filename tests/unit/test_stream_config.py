"""reward.stream and its keys: what is refused, and what is made of them."""

from pathlib import Path

import pytest
import torch

from executors.build import build_executors
from llamarl.comm.groups import World
from llamarl.config.command_line import RED_TEAM, ConfigError, check_command_line, compose_config
from llamarl.inference.cache import whole_blocks
from llamarl.launch.dry_run import dry_run
from llamarl.launch.graph import channels_between
from llamarl.launch.job import Job
from llamarl.launch.placement import Placement
from llamarl.launch.run_directory import RunDirectory
from llamarl.models.config import tiny_directory
from llamarl.types import Stretch
from tests.scorers import write_scorer

GIVEN = ("reward=model", f"reward.path={tiny_directory()}", "reward.stream=true")
PARTS = "reward.parts={brief: {kind: function}}"
LONGEST = compose_config(list(GIVEN)).longest


@pytest.mark.parametrize(
    "overrides, where, remedy",
    [
        (["reward.piece_tokens=0"], "reward.piece_tokens=0", "at least 1"),
        (["reward.piece_tokens=4096"], "reward.piece_tokens=4096", f"at most {LONGEST - 1}"),
        (["reward.cache_tokens=5"], "reward.cache_tokens=5", f"need at least {LONGEST}"),
        (["reward.piece_tokens=auto", "max_lag=0"], "reward.piece_tokens=auto max_lag=0", "null"),
        (["generator=vllm"], "reward.stream=true generator.kind=vllm", "generator=native"),
        (["offload=true", "max_lag=0"], "reward.stream=true offload=true", "offload=false"),
        (
            ["placement.reward=[0,1]", "placement.trainer=[0,1]", "max_lag=0"],
            "placement.reward=[0,1] placement.trainer=[0,1] reward.stream=true",
            "place them apart",
        ),
    ],
)
def test_what_cannot_stream_is_refused(overrides, where, remedy, monkeypatch):
    monkeypatch.setattr("llamarl.inference.vllm_engine.vllm_problem", lambda: None)
    with pytest.raises(ConfigError) as error:
        check_command_line([*GIVEN, *overrides], world_size=2)
    assert where in str(error.value) and remedy in str(error.value)


def test_a_reward_of_a_victims_answers_cannot_stream():
    with pytest.raises(ConfigError, match="begin only when an attack has ended"):
        check_command_line([*GIVEN], world_size=2, kind=RED_TEAM)


def test_parts_without_a_model_cannot_stream():
    with pytest.raises(ConfigError, match="only scorers of kind model read tokens ahead"):
        check_command_line(["reward=parts", PARTS, "reward.stream=true"], world_size=2)


REFERENCE = ("reference=frozen", "reference.stream=true")


@pytest.mark.parametrize(
    "overrides, where, remedy",
    [
        (
            ["reference=reset"],
            "reference.stream=true reference.kind=reset",
            "the newest token of a completion",
        ),
        (["generator=vllm"], "reference.stream=true generator.kind=vllm", "generator=native"),
        (["reference.piece_tokens=4096"], "reference.piece_tokens=4096", f"at most {LONGEST - 1}"),
        (["reference.cache_tokens=5"], "reference.cache_tokens=5", f"need at least {LONGEST}"),
        (["offload=true", "max_lag=0"], "reference.stream=true offload=true", "offload=false"),
        (
            ["placement.reference=[0,1]", "placement.trainer=[0,1]", "max_lag=0"],
            "placement.reference=[0,1] placement.trainer=[0,1] reference.stream=true",
            "place them apart",
        ),
        (["reference=none"], "reference.stream", "reference=frozen"),
    ],
)
def test_a_reference_that_cannot_stream_is_refused(overrides, where, remedy, monkeypatch):
    monkeypatch.setattr("llamarl.inference.vllm_engine.vllm_problem", lambda: None)
    with pytest.raises(ConfigError) as error:
        check_command_line([*REFERENCE, *overrides], world_size=2)
    assert where in str(error.value) and remedy in str(error.value)


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
    assert placement.stream_cache_tokens("reference") == rows * whole_blocks(LONGEST)


@pytest.mark.parametrize(
    "overrides, wanted",
    [
        ([], []),
        (GIVEN, [("stretches", "reward")]),
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
