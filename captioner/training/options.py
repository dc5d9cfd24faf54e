"""Options that start a run. The settings of the run itself are in `captioner.options`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from captioner.data.options import ColumnOptions
from captioner.errors import ConfigError
from captioner.schema import Folder, Shown, option_fields


@dataclass(frozen=True, kw_only=True)
class OwnDataOptions(ColumnOptions):
    """Your own captions to train on."""

    captions: Annotated[str, Shown("FILE", ("--data", "--captions"))] | None = None
    """Train on the captions in FILE: CSV or JSON Lines with the columns file and caption, or any
    other source that captioner prepare dataset accepts."""
    images: Folder | None = None
    """Look for the photos of --data in this folder (default: the folder of the captions, or the
    current folder)."""
    val: float = 0.1
    """Use this fraction of the training photos for validation instead, if --data has no validation
    photos."""

    def __post_init__(self) -> None:
        for name in ("images", *option_fields(ColumnOptions)):
            if self.captions is None and getattr(self, name) is not None:
                also = ", or data.images for prepared captions" if name == "images" else ""
                raise ConfigError(f"{name} needs captions; add captions (--data FILE){also}")
        if self.captions is None and self.val != OwnDataOptions.val:
            raise ConfigError(
                f"val is {self.val}, but only captions (--data FILE) are split; add captions, or "
                "leave out val"
            )


@dataclass(frozen=True, kw_only=True)
class TrainOptions(OwnDataOptions):
    """The start of the run."""

    dry_run: bool = False
    """Check the settings, data and disk space, and estimate time and memory from a few steps. Write
    nothing."""
    resume: bool = False
    """Continue the run in the run folder. If it has no checkpoint, start a new run."""
    force: bool = False
    """Start over, and replace the run in the run folder."""
