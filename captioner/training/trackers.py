"""Experiment trackers for curves and sample images: TensorBoard, or another of accelerate's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers
from PIL import Image

from captioner.errors import ConfigError, first_line
from captioner.training.run import METRICS, STEPS, RunFolder, read_rows
from captioner.training.state import flatten

TENSORBOARD = "tensorboard"


class Trackers:
    """All trackers of a run; a context manager."""

    def __init__(self, names: Sequence[str], folder: RunFolder) -> None:
        """Check that the trackers are available."""
        known = sorted(map(str, LOGGER_TYPE_TO_CLASS))
        for name in names:
            if name not in known:
                problem = f"is unknown; use any of {', '.join(known)}, or [] for none"
            elif not filter_trackers([name], str(folder.path)):
                problem = f"is not installed; pip install {name}"
            else:
                continue
            raise ConfigError(f"training.trackers: {name!r} {problem}")
        self.folder, self.names = folder, names
        self.open: dict[str, Any] = {}

    def __enter__(self) -> Trackers:
        folder = self.folder
        for name in self.names:
            kind = LOGGER_TYPE_TO_CLASS[name]
            local = {"logging_dir": str(folder.path)} if kind.requires_logging_directory else {}
            try:
                tracker = kind(TENSORBOARD if name == TENSORBOARD else "captioner", **local)
                getattr(tracker, "start", lambda: None)()  # older releases have no start
            except Exception as error:  # of its own kind, such as for a missing key
                raise ConfigError(
                    f"training.trackers: {name} cannot be started ({first_line(error)})"
                ) from error
            self.open[name] = tracker
            if name != TENSORBOARD:
                tracker.store_init_configuration(flatten(folder.settings))
                continue
            for prefix, rows in (("", METRICS), ("train/", STEPS)):
                for row in read_rows(folder.path / rows):  # logs are written anew in every session
                    _log(tracker, row, prefix)
        return self

    def __exit__(self, *error: object) -> None:
        for tracker in self.open.values():
            tracker.finish()

    def log(self, row: Mapping[str, Any], prefix: str = "") -> None:
        """Log the metrics of one validation, or with prefix ``train/`` a point of the curves."""
        for tracker in self.open.values():
            _log(tracker, row, prefix)

    def log_images(self, figures: Mapping[str, Path], step: int) -> None:
        """Log figures of captions with their attention, given as files by the photo's name."""
        for title, path in figures.items():
            with Image.open(path) as figure:
                pixels = np.asarray(figure.convert("RGB"))
            for name, tracker in self.open.items():
                if name == TENSORBOARD:
                    tracker.tracker.add_image(f"samples/{title}", pixels, step, dataformats="HWC")
                elif hasattr(tracker, "log_images"):
                    tracker.log_images({f"samples/{title}": [pixels]}, step=step)


def _log(tracker: Any, row: Mapping[str, Any], prefix: str) -> None:
    values = {
        f"{prefix}{name}": value
        for name, value in row.items()
        if name not in ("epoch", "step") and not isinstance(value, str)
    }
    tracker.log(values, step=int(row["step"]))
