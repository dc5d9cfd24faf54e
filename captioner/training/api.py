"""``captioner.train``: what ``captioner train`` does, as a function."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import logging
import os
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

from captioner.errors import ConfigError, OptionError
from captioner.extras import require_extra
from captioner.inference.model_config import read_search
from captioner.option_fields import OptionField, option_fields
from captioner.options import TrainConfig

if TYPE_CHECKING:  # importing torch takes a second
    from captioner.training.build import Setup
    from captioner.training.run import Progress

RUN_FILES = (
    "state.safetensors",
    "metrics.jsonl",
    "steps.jsonl",
    "config.yaml",
    "best",
    "samples",
    "tensorboard",
    "kept",
    "average",
)
"""Files and folders of a run, which ``force`` replaces."""


@dataclass(frozen=True)
class TrainingResult:
    """A finished run."""

    model_folder: Path
    """The best model, for ``captioner.load``."""
    score: float
    """Its validation score, which selected it: by default CIDEr, where 1.0 is 100 points; see
    ``training.select``. A loss is negated."""
    epoch: int
    """Its epoch, from 1."""
    metrics: list[dict[str, Any]]
    """All validations, oldest first: the rows of ``metrics.jsonl`` in the run folder."""


def train(
    config: TrainConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
    **changes: Any,
) -> TrainingResult:
    """Train a model; a warning is logged if the best one is of no use.

    Args:
        config: Settings: a YAML file, a dictionary of the same form, or a ``TrainConfig``. What is
            left out has its default; search options, the values of the model of ``init_from``.
        resume: Continue from the checkpoint in the run folder, or start if there is none.
        force: Start over and replace the run in the run folder.
        progress: Show progress and validations on standard error.
        **changes: Settings that replace those of ``config``: ``run_folder="runs/mine"``, or some of
            a section: ``training={"epochs": 3}``.

    Raises:
        CaptionerError: Settings, data or weights cannot be used, the run folder contains a run, or
            the state cannot be saved.
        KeyboardInterrupt: By Ctrl-C or a termination signal; ``resume`` continues.
    """
    settings = build_config(config, **changes)
    folder = Path(settings.run_folder)
    require_extra("train")
    resume = check_run_folder(folder, resume=resume, force=force)

    from captioner.training.build import prepare
    from captioner.training.loop import Interrupted, start
    from captioner.training.run import RunFolder, read_metrics

    with contextlib.nullcontext() if progress else _quiet():
        try:
            setup = prepare(settings)
            found = start(setup, folder, resume=resume)
        except Interrupted:
            raise KeyboardInterrupt(
                f"the state is saved in {folder}; continue with resume=True"
            ) from None
    metrics = read_metrics(folder)
    if problem := why_useless(setup, found, metrics):
        logging.getLogger(__name__).warning("%s", problem)
    best = RunFolder(folder, settings).best
    return TrainingResult(best, found.best, found.best_epoch + 1, metrics)


def why_useless(setup: Setup, progress: Progress, metrics: Sequence[Mapping[str, Any]]) -> str:
    """Why the best model of a finished run is of no use, and what to do; empty if it is of use.

    Args:
        setup: The run.
        progress: Its end.
        metrics: Its validations.
    """
    from captioner.training.loop import NO_SCORE

    config, epoch = setup.config.training, progress.best_epoch + 1
    row = next((row for row in metrics if row["epoch"] == epoch), {})
    photos = len(setup.validated)
    if row.get("empty_captions") == 1:
        problem = f"all captions of the {photos} validation photos are empty"
    elif config.select != "loss" and progress.best < NO_SCORE:
        problem = f"captions of the {photos} validation photos have nothing in common with theirs"
    else:
        return ""
    if photos == 1 and config.select == "CIDEr":
        return (
            "no model could be selected: the CIDEr of a single validation photo is always 0; "
            "validate on more photos, or give training.select loss"
        )
    return (
        f"the best model is of no use: {problem}; raise training.epochs or training.lr, or give "
        "init_from"
    )


def check_run_folder(folder: Path, *, resume: bool, force: bool) -> bool:
    """Check that a run may be written to a folder.

    Returns:
        Whether there is a checkpoint to resume from.

    Raises:
        OptionError: The folder contains a run that is neither resumed nor replaced.
    """
    resuming = resume and (folder / "state.safetensors").exists()
    used = any((folder / name).exists() for name in RUN_FILES)
    if used and not (resuming or force):
        raise OptionError(
            "{folder} already contains a run; give {resume} to continue it, {force} to start over, "
            "or another {run_folder}",
            folder=folder,
        )
    return resuming


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with Path(os.devnull).open("w") as null, contextlib.redirect_stderr(null):
        yield


# --- settings ------------------------------------------------------------------------------------


def build_config(
    config: TrainConfig | Mapping[str, Any] | str | Path | None = None, **changes: Any
) -> TrainConfig:
    """Build a config from a file, a dictionary or another config, with some settings replaced.

    Search options that are not given come from the model of ``init_from``, if there is one.

    Raises:
        ConfigError: The file cannot be read, or a setting is unknown or invalid.
        ModelError: The model of ``init_from`` cannot be read.
    """
    if isinstance(config, str | Path):
        config = _read_yaml(Path(config))
    if not (config is None or isinstance(config, Mapping | TrainConfig)):
        raise ConfigError(
            f"the training config is {config!r:.60}; give a YAML file, a dictionary or a "
            "TrainConfig"
        )
    given = [_as_dict(config), changes]
    init_from = ChainMap(changes, given[0]).get("init_from")
    inherited = {"search": read_search(init_from)[0]} if init_from else {}
    try:
        built: TrainConfig = _build(TrainConfig, [_as_dict(TrainConfig()), inherited, *given])
    except OptionError as error:
        raise ConfigError(error.spelled(lambda name: f"search.{name}")) from error
    return built


def _read_yaml(path: Path) -> Any:
    import yaml
    from jsonargparse import get_loader

    try:
        settings = get_loader("yaml")(path.read_text(encoding="utf-8"))  # reads 5e-4 as a number
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {path} ({reason}); give a YAML config file") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {reason}") from error
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(f"{path} contains no settings; give a YAML config file")
    return settings


def _as_dict(settings: Any) -> dict[str, Any]:
    """Settings of one level, by name."""
    if dataclasses.is_dataclass(settings):
        return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return dict(settings or {})


def _build(kind: Any, layers: Sequence[Mapping[str, Any]], prefix: str = "") -> Any:
    """An instance of a dataclass of options; a later layer replaces settings of an earlier one."""
    known = option_fields(kind)
    for name in chain(*layers):
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {prefix}{close[0]}?" if close else f"give {', '.join(known)}"
            raise ConfigError(f"unknown setting {prefix}{name}; {hint}")
    values: dict[str, Any] = {}
    for name in dict.fromkeys(chain(*layers)):
        given = [layer[name] for layer in layers if name in layer]
        section = known[name].type
        if not dataclasses.is_dataclass(section):
            values[name] = _converted(known[name], given[-1], prefix + name)
            continue
        parts: list[Mapping[str, Any]] = []
        for part in given:
            if isinstance(part, section):  # type: ignore[arg-type]
                parts = [_as_dict(part)]
            elif isinstance(part, Mapping):
                parts.append(part)
            else:
                raise ConfigError(f"{prefix}{name} is {part!r:.60}; give its settings by name")
        values[name] = _build(section, parts, f"{prefix}{name}.")
    return kind(**values)


def _converted(field: OptionField, value: Any, name: str) -> Any:
    """Paths as text, and a single text where a list is expected as a list."""
    if isinstance(value, Path):
        value = str(value)
    if get_origin(field.type) is list:
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list | tuple):
            return [str(part) if isinstance(part, Path) else part for part in value]
        if not (value is None and field.optional):
            raise ConfigError(f"{name} is {value!r:.60}; give a list")
    elif field.type is str and not (isinstance(value, str) or (value is None and field.optional)):
        raise ConfigError(f"{name} is {value!r:.60}; give text")
    return value
