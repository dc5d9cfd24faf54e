"""Options for converting data sets in other formats to COCO captions files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from captioner.schema import Folder, Shown

Layout = Literal[
    "auto", "karpathy", "flickr8k", "kaggle", "csv", "jsonl", "json", "imagefolder", "pairs", "coco"
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ColumnOptions:
    """Columns of a CSV or JSON Lines file."""

    file_column: Annotated[str, Shown("NAME")] | None = None
    """Read the file names from this column (default: file, filename, file_name, image, image_name
    or path). File names are relative to the folder with the photos."""
    caption_column: Annotated[str, Shown("NAME")] | None = None
    """Read the captions from this column (default: caption, text, sentence or comment)."""


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(ColumnOptions):
    """Convert captions from other formats to COCO captions files.

    The command writes one file per split: captions_train.json, captions_val.json and
    captions_test.json.
    """

    source: Annotated[str, Shown(positional=True)]
    """Convert the captions in this file or folder."""
    output: Annotated[str, Shown("FOLDER", ("-o", "--output"))]
    """Write the COCO captions files to this folder."""
    layout: Layout = "auto"
    """Read the source in this format. auto: detect the format."""
    images: Folder | None = None
    """Look for the photos in this folder. Captions of missing photos are left out, and the output
    records the sizes of the photos."""
    val: float = 0.1
    """Use this fraction of the training photos for validation instead, if the source has no
    validation photos."""
    test: float = 0.0
    """Use this fraction of the training photos for testing instead, if the source has neither
    validation nor test photos."""
    seed: int = 0
    """Set the random seed that decides which photos are used for validation and testing."""
    first_id: int = 1
    """Number photos that have no image id from this number upwards. Files that are used together
    for training must not share ids."""
    force: bool = False
    """Overwrite existing files."""
