"""The processes of a run (torchrun), sums over them, and the run's trackers, by accelerate.

With one process, nothing is exchanged. The precision is not accelerate's: its fp16 needs a GPU, and
its scale cannot be resumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from accelerate.utils import ProjectConfiguration, gather_object
from PIL import Image
from torch import Tensor, nn

from captioner.errors import ConfigError
from captioner.hardware import upload
from captioner.messages import first_line
from captioner.training.names import TENSORBOARD


class Processes:
    """This process among those of the run."""

    def __init__(self, folder: Path, trackers: Sequence[str] = ()) -> None:
        """Connect to the other processes; see torchrun.

        Args:
            folder: The run folder. TensorBoard's files are written to its ``tensorboard``.
            trackers: Names of accelerate's trackers, which nothing starts before ``tracking``.

        Raises:
            ConfigError: A tracker is unknown or not installed.
        """
        check_trackers(trackers)
        self.accelerator = Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision="no",
            log_with=[*trackers] or None,
            project_config=ProjectConfiguration(logging_dir=str(folder / TENSORBOARD)),
        )
        self.device: torch.device = self.accelerator.device
        self.count: int = self.accelerator.num_processes
        self.rank: int = self.accelerator.process_index
        self.main: bool = self.accelerator.is_main_process
        """Whether this process prints and writes."""

    def share(self, module: nn.Module) -> nn.Module:
        """Return a module whose gradients are averaged over the processes."""
        shared: nn.Module = self.accelerator.prepare(module)
        return shared

    def exchanging(self, module: nn.Module, *, now: bool) -> AbstractContextManager[Any]:
        """Return a context in which a shared module's gradients are exchanged now, or later."""
        return nullcontext() if now else self.accelerator.no_sync(module)

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes, on the device."""
        summed: Tensor = self.accelerator.reduce(upload(value, self.device))
        return summed

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process; all must call this at the same step."""
        return bool(self.total(torch.tensor(int(flag)))) if self.count > 1 else flag

    def gather(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of all processes."""
        return list(gather_object(list(values)))

    def wait(self) -> None:
        """Wait for the other processes."""
        self.accelerator.wait_for_everyone()

    @contextmanager
    def tracking(self, settings: Mapping[str, Any], step: int) -> Iterator[None]:
        """Start the trackers, and finish them at the end.

        Args:
            settings: The settings of the run by name, plain values.
            step: Completed steps. TensorBoard hides the points after it that an earlier session of
                the run has logged.

        Raises:
            ConfigError: A tracker cannot be started.
        """
        purge = {TENSORBOARD: {"purge_step": step + 1}}
        try:
            self.accelerator.init_trackers("captioner", dict(settings), purge)
        except Exception as error:  # of the tracker's own kind, such as for a missing key
            names = ", ".join(map(str, self.accelerator.log_with))
            raise ConfigError(
                f"training.trackers: {names} cannot be started ({first_line(error)})"
            ) from error
        try:
            yield
        finally:
            # Not end_training, which also disconnects the processes: in one that has failed, that
            # could wait forever for the others.
            for tracker in self.accelerator.trackers:
                tracker.finish()

    def log(self, row: Mapping[str, Any], prefix: str = "") -> None:
        """Log the numbers in a row of ``metrics.jsonl`` or ``steps.jsonl`` to the trackers."""
        values = {
            f"{prefix}{name}": value
            for name, value in row.items()
            if name not in ("epoch", "step") and not isinstance(value, str)
        }
        self.accelerator.log(values, step=row["step"])

    def log_images(self, figures: Mapping[str, Path], step: int) -> None:
        """Log figures of sample captions, files by the photo's name, to trackers of images."""
        for title, path in figures.items():
            with Image.open(path) as figure:
                images = np.asarray(figure.convert("RGB"))[None]
            for tracker in self.accelerator.trackers:
                layout = {"dataformats": "NHWC"} if tracker.name == TENSORBOARD else {}
                if hasattr(tracker, "log_images"):
                    tracker.log_images({f"samples/{title}": images}, step=step, **layout)


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError if accelerate does not know a tracker, or its package is missing."""
    known = sorted(map(str, LOGGER_TYPE_TO_CLASS))
    installed = [*map(str, get_available_trackers())]
    for name in names:
        if name not in known:
            problem = f"is unknown; use any of {', '.join(known)}, or [] for none"
        elif name not in installed:
            problem = f"is not installed; pip install {name}"
        else:
            continue
        raise ConfigError(f"training.trackers: {name!r} {problem}")


class Sums:
    """Sums by name over steps and processes. They stay on the device until they are read."""

    def __init__(self, names: Sequence[str], processes: Processes) -> None:
        self.names, self.processes = names, processes
        self.values = torch.zeros(len(names), dtype=torch.float64, device=processes.device)

    def add(self, found: Mapping[str, float | Tensor]) -> None:
        """Add numbers, and tensors on the device, of this process. All processes must call this."""
        given = [found.get(name, 0.0) for name in self.names]
        numbers = [0.0 if isinstance(value, Tensor) else value for value in given]
        values = upload(torch.tensor(numbers, dtype=torch.float64), self.values.device)
        for place, value in enumerate(given):
            if isinstance(value, Tensor):
                values[place] += value
        self.values += self.processes.total(values)

    def read(self) -> dict[str, float]:
        """Return the sums since they were last read. On a GPU, this waits for the device."""
        found = dict(zip(self.names, self.values.tolist(), strict=True))
        self.values.zero_()
        return found
