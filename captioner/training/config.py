"""Construction of a run's config from a YAML file or dictionary, and from its initial model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from captioner.errors import ConfigError, ModelError
from captioner.files import read_input
from captioner.inference.config_file import read_settings
from captioner.options import TrainConfig
from captioner.schema import build_options, checked_settings, different


def build_config(
    config: TrainConfig | Mapping[str, Any] | str | Path | None = None, **changes: Any
) -> TrainConfig:
    """Build a config from a YAML file, a dictionary or a config, with some settings replaced.

    If ``init_from`` names a model, missing settings of the decoder, the tokenizer and the search
    come from this model. All other missing settings have their defaults.

    Args:
        config: A path, a dictionary with the same structure as the YAML file, or a ``TrainConfig``.
            In a ``TrainConfig``, settings that equal the default count as missing.
        **changes: Settings that replace settings of ``config``. Only the named settings of a
            section change: ``training={"epochs": 3}``.

    Raises:
        ConfigError: The file is not valid YAML, or a setting is unknown or has a wrong value.
    """
    given: Any = _read_yaml(Path(config)) if isinstance(config, str | Path) else config
    if isinstance(given, TrainConfig):
        given = different(asdict(given), asdict(TrainConfig()))
    try:
        given = checked_settings(TrainConfig, given)
    except ConfigError as error:
        name = f"{config}: " if isinstance(config, str | Path) else ""
        raise ConfigError(f"{name}{error}") from error
    init_from = changes.get("init_from", given.get("init_from"))
    inherited: dict[str, Any] = {}
    if init_from:
        with contextlib.suppress(ModelError):  # reported later, when the model is loaded
            inherited = read_settings(init_from)
    return build_options(TrainConfig, TrainConfig(), inherited, given, changes)


def _read_yaml(path: Path) -> Any:
    return parse_yaml(read_input(path, "a YAML config file"), str(path))


def parse_yaml(text: str | bytes, source: str) -> Any:
    """Parse YAML text into dictionaries, lists, numbers and text.

    Args:
        text: The YAML text.
        source: Name of the text in error messages, such as the path of its file.

    Raises:
        ConfigError: The text is not valid YAML.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """A loader that reads 5e-4 as a number, as YAML 1.2 does. PyYAML reads it as text."""

    number = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        reason = re.sub(r'in "<(byte|unicode) string>", ', "at ", " ".join(str(error).split()))
        raise ConfigError(
            f"{source} is not valid YAML ({reason}); correct the YAML there"
        ) from error
