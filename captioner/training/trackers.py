"""Experiment trackers for curves and sample images: TensorBoard, or another of accelerate's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers
from accelerate.utils import LoggerType
from PIL import Image

from captioner.errors import ConfigError
from captioner.training.run import RunFolder, read_steps

PROJECT = "captioner"


class Trackers:
    """All trackers of a run; a context manager."""

    def __init__(self, names: Sequence[str], folder: RunFolder, *, active: bool = True) -> None:
        """Check that the trackers are available.

        Args:
            names: From the config; empty for no tracking.
            folder: Holds TensorBoard's logs; its metrics so far are logged again on resume.
            active: False in all but one process of a run.

        Raises:
            ConfigError: A tracker is unknown or not installed.
        """
        self.folder = folder
        for name in names:
            known = [kind for kind in LoggerType.list() if kind != "all"]
            if name not in known or not filter_trackers([name], str(folder.path)):
                problem = "is not installed" if name in known else "is unknown"
                raise ConfigError(
                    f"training.trackers: {name!r} {problem}; use any of "
                    f"{', '.join(sorted(known))}, or [] for none"
                )
        self.names = list(names) if active else []
        self.open: list[Any] = []

    def __enter__(self) -> Trackers:
        for name in self.names:
            kind = LOGGER_TYPE_TO_CLASS[name]
            local = kind.requires_logging_directory
            where = {"logging_dir": str(self.folder.path)} if local else {}
            tracker = kind("tensorboard" if name == "tensorboard" else PROJECT, **where)
            getattr(tracker, "start", lambda: None)()  # older releases have no start
            if name == "tensorboard":
                for row in self.folder.rows():
                    _log(tracker, row)
                for row in read_steps(self.folder.path):
                    _log(tracker, row, "train/")
            else:
                tracker.store_init_configuration(flatten(self.folder.settings))
            self.open.append(tracker)
        return self

    def __exit__(self, *error: object) -> None:
        for tracker in self.open:
            tracker.finish()

    def log(self, row: Mapping[str, Any]) -> None:
        """Log the metrics of one validation."""
        for tracker in self.open:
            _log(tracker, row)

    def log_step(self, row: Mapping[str, Any]) -> None:
        """Log a point of the training curves."""
        for tracker in self.open:
            _log(tracker, row, "train/")

    def log_images(self, figures: Mapping[str, Path], step: int) -> None:
        """Log figures of captions with their attention, given as files by the photo's name."""
        for name, path in figures.items():
            with Image.open(path) as figure:
                pixels = np.asarray(figure.convert("RGB"))
            for tracker in self.open:
                if not hasattr(tracker, "log_images"):
                    continue
                if tracker.name == "tensorboard":
                    tracker.tracker.add_image(f"samples/{name}", pixels, step, dataformats="HWC")
                else:
                    tracker.log_images({f"samples/{name}": [pixels]}, step=step)


def _log(tracker: Any, row: Mapping[str, Any], prefix: str = "") -> None:
    values = {
        f"{prefix}{name}": value
        for name, value in row.items()
        if name not in ("epoch", "step") and not isinstance(value, str)
    }
    tracker.log(values, step=int(row["step"]))


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to keys such as ``training.lr``, with lists as JSON."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            scalar = value is None or isinstance(value, (bool, int, float, str))
            flat[f"{prefix}{name}"] = value if scalar else json.dumps(value)
    return flat
