"""Where curves and sample pictures of a run go: TensorBoard, or what else accelerate tracks."""

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
from captioner.training.run_folder import RunFolder

PROJECT = "captioner"


class Trackers:
    """All trackers of a run, open inside its ``with``."""

    def __init__(self, names: Sequence[str], folder: RunFolder, *, active: bool = True) -> None:
        """Look for the trackers.

        Args:
            names: As the config has them; none: nothing is tracked.
            folder: TensorBoard's curves lie in it; the metrics that it holds are told again.
            active: Nothing is tracked where this is false: one process of a run does.

        Raises:
            ConfigError: A tracker is unknown or not installed.
        """
        self.folder = folder
        for name in names:
            known = [kind for kind in LoggerType.list() if kind != "all"]
            if name not in known or not filter_trackers([name], str(folder.path)):
                problem = "is not installed" if name in known else "is unknown"
                raise ConfigError(
                    f"training.trackers holds {name!r}, which {problem}; give some of "
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
            getattr(tracker, "start", lambda: None)()  # older releases start when they are made
            if name == "tensorboard":
                for row in self.folder.rows():
                    _log(tracker, row)
            else:
                tracker.store_init_configuration(flat(self.folder.settings))
            self.open.append(tracker)
        return self

    def __exit__(self, *error: object) -> None:
        for tracker in self.open:
            tracker.finish()

    def log(self, row: Mapping[str, Any]) -> None:
        """One validation's numbers."""
        for tracker in self.open:
            _log(tracker, row)

    def show(self, drawn: Mapping[str, Path], step: int) -> None:
        """Pictures of captions with their attention.

        Args:
            drawn: Files by the photo's name.
            step: Steps taken.
        """
        for name, path in drawn.items():
            with Image.open(path) as picture:
                pixels = np.asarray(picture.convert("RGB"))
            for tracker in self.open:
                if not hasattr(tracker, "log_images"):
                    continue
                if tracker.name == "tensorboard":
                    tracker.tracker.add_image(f"samples/{name}", pixels, step, dataformats="HWC")
                else:
                    tracker.log_images({f"samples/{name}": [pixels]}, step=step)


def _log(tracker: Any, row: Mapping[str, Any]) -> None:
    values = {k: v for k, v in row.items() if k not in ("epoch", "step") and not isinstance(v, str)}
    tracker.log(values, step=int(row["step"]))


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level, ``training.lr`` and so on; lists as text."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            plain = value is None or isinstance(value, (bool, int, float, str))
            found[f"{prefix}{name}"] = value if plain else json.dumps(value)
    return found
