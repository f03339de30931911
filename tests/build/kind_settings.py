"""The settings of a scorer, with the values of conf/reward/KIND.yaml unless others are given."""

from __future__ import annotations

from pathlib import Path

from llamarl.scoring.kinds.encoder import EncoderKindSettings
from llamarl.scoring.kinds.judge import JudgeKindSettings
from llamarl.scoring.kinds.model import ModelKindSettings
from llamarl.scoring.kinds.novelty import NoveltyKindSettings


def model_settings(path: Path | str = "", **changes) -> ModelKindSettings:
    """A decoder of float32 weights with one label."""
    values = {
        "path": str(path),
        "label": None,
        "dtype": "float32",
        "microbatch_tokens": 8192,
        "scale": 1.0,
        "shift": 0.0,
    }
    return ModelKindSettings("model", **{**values, **changes})


def encoder_settings(path: Path | str, **changes) -> EncoderKindSettings:
    """An encoder that reads completions of 32 tokens at most, three at a time."""
    values = {
        "path": str(path),
        "label": None,
        "output": "logit",
        "reads": "completion",
        "dtype": "float32",
        "max_tokens": 32,
        "batch_size": 3,
    }
    return EncoderKindSettings("encoder", **{**values, **changes})


def judge_settings(url: str = "http://127.0.0.1:1/v1", **changes) -> JudgeKindSettings:
    """A judge that is asked for scores from 1 to 10."""
    values = {
        "url": url,
        "model": "wise",
        "api_key_env": None,
        "ask": "score",
        "template": None,
        "lowest": 1.0,
        "highest": 10.0,
        "max_parallel": 16,
        "timeout_s": 60.0,
        "max_retries": 5,
        "max_tokens": 1024,
        "temperature": 0.0,
    }
    return JudgeKindSettings("judge", **{**values, **changes})


def novelty_settings(history: int = 100, nearest: int | None = None) -> NoveltyKindSettings:
    """Novelty by an embedder that the test gives."""
    return NoveltyKindSettings("novelty", "start", history, nearest)
