"""Options of data sets in other formats, which become COCO captions files."""

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
    """Column with the file names, relative to the folder with the photos (default: file, filename,
    file_name, image, image_name or path)."""
    caption_column: Annotated[str, Shown("NAME")] | None = None
    """Column with the captions (default: caption, text, sentence or comment)."""


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(ColumnOptions):
    """Convert captions from another format to COCO captions files.

    One per split: captions_train.json, captions_val.json, captions_test.json.
    """

    source: Annotated[str, Shown(positional=True)]
    """File or folder with the captions."""
    output: Annotated[str, Shown("FOLDER", ("-o", "--output"))]
    """Folder for the COCO files."""
    layout: Layout = "auto"
    """Format of the source; auto detects it."""
    images: Folder | None = None
    """Folder with the photos, to leave out captions of missing photos and to record the sizes of
    the others."""
    val: float = 0.1
    """Fraction of the training photos for validation, if the source has no validation photos."""
    test: float = 0.0
    """Fraction of the training photos for testing, if it has neither."""
    seed: int = 0
    """Random seed of the split."""
    first_id: int = 1
    """First image id for photos without ids; files that are trained on together must not share
    ids."""
    force: bool = False
    """Overwrite existing files."""
