"""Coordination of the processes of a run (torchrun), sums over them, and trackers.

accelerate does this work, except for mixed precision: its fp16 needs a GPU and cannot resume the
scale of the loss.
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
    """The connection of this process to the other processes of the run."""

    def __init__(self, folder: Path, trackers: Sequence[str] = ()) -> None:
        """Connect to the other processes that torchrun has started.

        Args:
            folder: The run folder. TensorBoard's files are written to its folder ``tensorboard``.
            trackers: Names of accelerate's trackers. ``tracking`` starts them.

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
        """True in the process that prints and writes."""

    def share(self, module: nn.Module) -> nn.Module:
        """Wrap a module, so that its gradients are averaged over the processes."""
        shared: nn.Module = self.accelerator.prepare(module)
        return shared

    def exchanging(self, module: nn.Module, *, now: bool) -> AbstractContextManager[Any]:
        """Return a context in which backward passes exchange gradients, or keep them for later."""
        return nullcontext() if now else self.accelerator.no_sync(module)

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes, on the device."""
        summed: Tensor = self.accelerator.reduce(upload(value, self.device))
        return summed

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process. All must call this at the same step."""
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
            settings: The settings of the run by name, as plain values.
            step: Completed steps. If an earlier session of the run has logged later steps,
                TensorBoard hides them.

        Raises:
            ConfigError: A tracker cannot be started.
        """
        purge = {TENSORBOARD: {"purge_step": step + 1}}
        try:
            self.accelerator.init_trackers("captioner", dict(settings), purge)
        except Exception as error:  # trackers raise their own errors, such as for a missing key
            names = ", ".join(map(str, self.accelerator.log_with))
            raise ConfigError(
                f"training.trackers: {names} cannot be started ({first_line(error)})"
            ) from error
        try:
            yield
        finally:
            # Not end_training, because it also disconnects the processes. In a failed process, this
            # could wait forever for the others.
            for tracker in self.accelerator.trackers:
                tracker.finish()

    def log(self, row: Mapping[str, Any], prefix: str = "") -> None:
        """Send the numbers in a row of ``metrics.jsonl`` or ``steps.jsonl`` to the trackers."""
        values = {
            f"{prefix}{name}": value
            for name, value in row.items()
            if name not in ("epoch", "step") and not isinstance(value, str)
        }
        self.accelerator.log(values, step=row["step"])

    def log_images(self, figures: Mapping[str, Path], step: int) -> None:
        """Send figures of sample captions to the trackers that accept images.

        ``figures`` contains a file for each photo's name.
        """
        for title, path in figures.items():
            with Image.open(path) as figure:
                images = np.asarray(figure.convert("RGB"))[None]
            for tracker in self.accelerator.trackers:
                layout = {"dataformats": "NHWC"} if tracker.name == TENSORBOARD else {}
                if hasattr(tracker, "log_images"):
                    tracker.log_images({f"samples/{title}": images}, step=step, **layout)


def check_trackers(names: Sequence[str]) -> None:
    """Check that accelerate supports the trackers and that their packages are installed.

    Raises:
        ConfigError: A tracker is unknown or not installed.
    """
    known = sorted(map(str, LOGGER_TYPE_TO_CLASS))
    installed = [*map(str, get_available_trackers())]
    for name in names:
        if name not in known:
            problem = f"is unknown; use any of {', '.join(known)}, or [] for none"
        elif name not in installed:
            problem = f"is not installed; run: pip install {name}"
        else:
            continue
        raise ConfigError(f"training.trackers: {name!r} {problem}")


class Sums:
    """Named sums over steps and processes, which stay on the device until they are read."""

    def __init__(self, names: Sequence[str], processes: Processes) -> None:
        self.names, self.processes = names, processes
        self.values = torch.zeros(len(names), dtype=torch.float64, device=processes.device)

    def add(self, found: Mapping[str, float | Tensor]) -> None:
        """Add this process's values (numbers or tensors). All processes must call this method."""
        given = [found.get(name, 0.0) for name in self.names]
        numbers = [0.0 if isinstance(value, Tensor) else value for value in given]
        values = upload(torch.tensor(numbers, dtype=torch.float64), self.values.device)
        for place, value in enumerate(given):
            if isinstance(value, Tensor):
                values[place] += value
        self.values += self.processes.total(values)

    def read(self) -> dict[str, float]:
        """Return the sums since the last call. On a GPU, this waits for the device."""
        found = dict(zip(self.names, self.values.tolist(), strict=True))
        self.values.zero_()
        return found
