"""Options of starting a run; `captioner.options` has the settings of the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from captioner.data.options import ColumnOptions
from captioner.errors import ConfigError
from captioner.schema import Folder, Shown, option_fields


@dataclass(frozen=True, kw_only=True)
class OwnDataOptions(ColumnOptions):
    """Your own captions, to prepare and train on."""

    captions: Annotated[str, Shown("FILE", ("--data", "--captions"))] | None = None
    """A CSV or JSON Lines file with the columns file and caption, or another source of captioner
    prepare dataset."""
    images: Folder | None = None
    """Folder with the photos of --data (default: that of the captions, or the current one)."""
    val: float = 0.1
    """Fraction of the training photos of --data for validation, if it has no validation photos."""

    def __post_init__(self) -> None:
        for name in ("images", *option_fields(ColumnOptions)):
            if self.captions is None and getattr(self, name) is not None:
                also = ", or data.images for prepared captions" if name == "images" else ""
                raise ConfigError(f"{name} needs captions; give captions too{also}")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(OwnDataOptions):
    """How to start the run."""

    dry_run: bool = False
    """Check settings, data and disk space, run a few steps, estimate time and memory, and write
    nothing."""
    resume: bool = False
    """Continue the run in the run folder, or start one if there is none."""
    force: bool = False
    """Start over and replace the run in the run folder."""
