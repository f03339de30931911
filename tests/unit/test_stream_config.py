"""reward.stream and its keys: what is refused, and what is made of them."""

import pytest

from executors.build import build_stretches
from executors.generator import STRETCHES
from llamarl.config.command_line import ConfigError, check_command_line, compose_config
from llamarl.launch.scorers import stream_cache_tokens
from llamarl.models.config import tiny_directory

GIVEN = ("reward=model", f"reward.path={tiny_directory()}", "reward.stream=true")
PARTS = "reward.parts={brief: {kind: function}}"
LONGEST = compose_config(list(GIVEN)).longest


@pytest.mark.parametrize(
    "overrides, where, remedy",
    [
        (["reward.chunk_tokens=0"], "reward.chunk_tokens=0", "at least 1"),
        (["reward.chunk_tokens=4096"], "reward.chunk_tokens=4096", f"at most {LONGEST - 1}"),
        (["reward.cache_tokens=5"], "reward.cache_tokens=5", f"need at least {LONGEST}"),
        (["generator=vllm"], "reward.stream=true generator.kind=vllm", "generator=native"),
    ],
)
def test_what_cannot_stream_is_refused(overrides, where, remedy, monkeypatch):
    monkeypatch.setattr("llamarl.inference.vllm_engine.vllm_problem", lambda: None)
    with pytest.raises(ConfigError) as error:
        check_command_line([*GIVEN, *overrides], world_size=2)
    assert where in str(error.value) and remedy in str(error.value)


def test_parts_without_a_model_cannot_stream():
    with pytest.raises(ConfigError, match="no part is a model"):
        check_command_line(["reward=parts", PARTS, "reward.stream=true"], world_size=2)


def test_a_cache_holds_as_many_as_the_generators_unless_it_is_said():
    config = compose_config([*GIVEN, "generator.max_slots=10"])
    placement = {"generator": (1, 2, 3), "reward": (4, 5)}
    assert stream_cache_tokens(config, placement) == 15 * config.longest  # 30 in two caches
    config = compose_config([*GIVEN, "reward.cache_tokens=999"])
    assert stream_cache_tokens(config, placement) == 999


def test_stretches_have_a_channel_only_where_they_are_read():
    (channel,) = build_stretches(compose_config(list(GIVEN)), "generator", "reward")
    assert channel.name == STRETCHES
    assert build_stretches(compose_config([]), "generator", "reward") == []
