"""Hydra's compose, which reads the files of conf/ once for each choice among them.

Reading and merging these files takes most of the time of a command line, and they stay as they are
while tests run. The values of a command line are applied by Hydra's own function.
"""

from __future__ import annotations

import copy
import functools

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from llamarl.config.files import CONF_DIR

compose = hydra.compose


def quick_compose(
    config_name: str, overrides: list[str] | None = None, return_hydra_config: bool = False
) -> DictConfig:
    """Compose as hydra.compose does. Hydra must be initialised with CONF_DIR."""
    words = overrides or []
    parsed = OverridesParser.create().parse_overrides(words)
    if any(one.is_hydra_override() for one in parsed):  # such as files of a user's own
        return compose(config_name, words, return_hydra_config)
    values = []
    choices = []
    for one in parsed:
        is_choice = (CONF_DIR / one.key_or_group).is_dir() and not isinstance(one.value(), dict)
        (choices if is_choice else values).append(one)
    lines = tuple(one.input_line for one in choices)
    composed = copy.deepcopy(_chosen(config_name, lines, return_hydra_config))
    ConfigLoaderImpl._apply_overrides_to_config(values, composed)
    return composed


@functools.cache
def _chosen(config_name: str, choices: tuple[str, ...], with_hydra: bool) -> DictConfig:
    return compose(config_name, list(choices), with_hydra)
