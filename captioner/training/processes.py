"""Coordination of the processes that torchrun starts for a run, and trackers of its metrics.

A tracker, such as TensorBoard, records metrics and figures. The package accelerate does this work,
but not the mixed precision: its fp16 needs a GPU and cannot resume the scaling of the loss.
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
    """The connection of this process to the other processes of the run.

    A run without torchrun has a single process.
    """

    def __init__(self, folder: Path, trackers: Sequence[str] = ()) -> None:
        """Connect to the other processes that torchrun has started, if any.

        Args:
            folder: The run folder. TensorBoard writes its files to its folder ``tensorboard``.
            trackers: Names of trackers that accelerate supports. The method ``tracking`` starts
                them.

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
        """True in the one process that prints and writes files."""

    def share(self, module: nn.Module) -> nn.Module:
        """Wrap a module so that backward passes average its gradients over the processes."""
        shared: nn.Module = self.accelerator.prepare(module)
        return shared

    def exchanging(self, module: nn.Module, *, now: bool) -> AbstractContextManager[Any]:
        """Return a context for a backward pass through a module from ``share``.

        With ``now``, the pass averages the gradients over the processes. Otherwise the gradients
        stay in this process, and the next pass with ``now`` averages their sum.
        """
        return nullcontext() if now else self.accelerator.no_sync(module)

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of all processes' values of a tensor, on this process's device."""
        summed: Tensor = self.accelerator.reduce(upload(value, self.device))
        return summed

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process. All processes must call this together."""
        return bool(self.total(torch.tensor(int(flag)))) if self.count > 1 else flag

    def gather(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of all processes in one list, ordered by process."""
        return list(gather_object(list(values)))

    def wait(self) -> None:
        """Wait until all processes have called this method."""
        self.accelerator.wait_for_everyone()

    @contextmanager
    def tracking(self, settings: Mapping[str, Any], step: int) -> Iterator[None]:
        """Start the trackers, and finish them at the end of the context.

        Args:
            settings: The settings of the run by name, as numbers, text or None.
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
                f"training.trackers: {names} cannot be started ({first_line(error)}); "
                "correct the setup, or leave the tracker out of training.trackers"
            ) from error
        try:
            yield
        finally:
            # Not end_training, because it also disconnects the processes. In a failed process, this
            # could wait forever for the others.
            for tracker in self.accelerator.trackers:
                tracker.finish()

    def log(self, row: Mapping[str, Any], prefix: str = "") -> None:
        """Send the numbers in a row of ``metrics.jsonl`` or ``steps.jsonl`` to the trackers.

        ``prefix`` is put before each name, and the epoch is left out.
        """
        values = {
            f"{prefix}{name}": value
            for name, value in row.items()
            if name not in ("epoch", "step") and not isinstance(value, str)
        }
        self.accelerator.log(values, step=row["step"])

    def log_images(self, figures: Mapping[str, Path], step: int) -> None:
        """Send figures of sample captions to the trackers that accept images.

        Args:
            figures: Paths of the figures, by the name of the photo.
            step: Completed steps.
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
    """Named sums over steps and processes.

    They stay on the device until they are read, so that a step does not wait for the GPU.
    """

    def __init__(self, names: Sequence[str], processes: Processes) -> None:
        self.names, self.processes = names, processes
        self.values = torch.zeros(len(names), dtype=torch.float64, device=processes.device)

    def add(self, found: Mapping[str, float | Tensor]) -> None:
        """Add the values of all processes. All processes must call this method together.

        Args:
            found: This process's values by name, as numbers or scalar tensors. A missing name
                counts as 0.
        """
        given = [found.get(name, 0.0) for name in self.names]
        numbers = [0.0 if isinstance(value, Tensor) else value for value in given]
        values = upload(torch.tensor(numbers, dtype=torch.float64), self.values.device)
        for place, value in enumerate(given):
            if isinstance(value, Tensor):
                values[place] += value
        self.values += self.processes.total(values)

    def read(self) -> dict[str, float]:
        """Return the sums since the last call, by name. On a GPU, this waits for the device."""
        found = dict(zip(self.names, self.values.tolist(), strict=True))
        self.values.zero_()
        return found
