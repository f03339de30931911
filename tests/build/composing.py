"""Hydra's compose, which reads each file of conf/ once, and merges them once for each choice among
them.

Reading and merging these files takes most of the time of a command line, and they stay as they are
while tests run. The values of a command line are applied by Hydra's own function.
"""

from __future__ import annotations

import functools
import pickle

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, open_dict

from llamarl.config.files import CONF_DIR

compose = hydra.compose
load_config = ConfigRepository.load_config
_read: dict[tuple[str, str], bytes] = {}  # pickled, for that is copied faster than by deepcopy


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
    composed = pickle.loads(_chosen(config_name, lines)[return_hydra_config])
    ConfigLoaderImpl._apply_overrides_to_config(values, composed)
    return composed


@functools.cache
def _chosen(config_name: str, choices: tuple[str, ...]) -> tuple[bytes, bytes]:
    """Return the config without hydra's own section, and the config with it."""
    composed = compose(config_name, list(choices), return_hydra_config=True)
    whole = pickle.dumps(composed)
    with open_dict(composed):
        del composed["hydra"]
    return pickle.dumps(composed), whole


def quick_load(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
    """Load a file as ConfigRepository.load_config does; one of conf/ or of Hydra's own once."""
    source = repository._find_object_source(config_path, ObjectType.CONFIG)
    if source is None or (source.scheme() == "file" and source.path != str(CONF_DIR)):
        return load_config(repository, config_path)
    key = (source.path, config_path)
    if key not in _read:
        _read[key] = pickle.dumps(load_config(repository, config_path))
    return pickle.loads(_read[key])
