"""The processes of a run (torchrun), and sums over them. accelerate connects them.

With one process, nothing is exchanged. The precision is not accelerate's: its fp16 needs a GPU, and
its scale cannot be resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from captioner.hardware import upload


class Processes:
    """This process among those of the run."""

    def __init__(self) -> None:
        """Connect to the other processes; see torchrun."""
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")
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
