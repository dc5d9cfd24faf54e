"""Options of ``captioner attend``: checks of their combinations, and the output files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval

from captioner.cli.arguments import Parser, flag
from captioner.cli.photos import PICTURE_MARK, STDIN, PhotoOptions
from captioner.drawing.animation import check_ending as check_animation
from captioner.drawing.options import (
    ANIMATIONS,
    ARCHIVES,
    FIGURES,
    PAGES,
    AnimationOptions,
    FigureOptions,
    PageOptions,
)
from captioner.errors import ConfigError
from captioner.option_fields import File, ModelName, Shown, option_fields
from captioner.options import ExplanationMethod, ModelOptions, SearchOptions

if TYPE_CHECKING:
    from captioner.inference.captioner import Captioner

_KINDS: dict[tuple[str, ...], tuple[str, type | None]] = {
    FIGURES: ("a figure", FigureOptions),
    ANIMATIONS: ("an animation", AnimationOptions),
    PAGES: ("a page", PageOptions),
    ARCHIVES: ("an archive", None),
}
"""Name and options of each kind of output."""


@dataclass(frozen=True, kw_only=True)
class ShownCaptions:
    """Captions."""

    words: list[str] = field(default_factory=list)
    """Show the attention for your own caption; repeat for several."""
    compare: list[ModelName] = field(default_factory=list)
    """Another model to show beside --model, on the same scale; repeat for several."""
    method: list[ExplanationMethod] = field(default_factory=list)
    """How the maps are computed: attention (default), attention_gate (the attention that reached
    the word), gradient_input, grad_cam or occlusion (the effect of each region on the word's
    log-probability); repeat to show several side by side."""
    alternatives: Annotated[int, Interval(ge=0, le=50)] | None = None
    """Number of most probable words to show per position (default: pages 5, figures 0)."""


@dataclass(frozen=True, kw_only=True)
class AttendOptions(ModelOptions, ShownCaptions, PhotoOptions):
    """Show where the model looked for each word.

    As a figure (.png, .jpg, .svg, .pdf), an animation (.gif, .webp, .mp4), an interactive page
    (.html) or arrays (.npz). Prints the captions, and with --words their log-probabilities (nats).
    """

    output: Annotated[str, Shown("OUT", ("-o", "--output"))] | None = None
    """Output file; for several photos a page (.html), an archive (.npz), or a folder for one file
    per photo (default: NAME_attention.png beside each photo)."""
    format: str | None = None
    """Format of one file per photo, without -o or in a folder: png (default), svg, gif, html,
    ..."""
    force: bool = False
    """Overwrite existing files."""
    skip_existing: bool = False
    """Leave out photos whose output exists; continues an interrupted run."""
    instances: File | None = None
    """Figures: COCO instances file; outlines the objects that the words name. Photos are matched by
    file name."""
    blocks: bool = False
    """Show the grid cells without smoothing."""

    @property
    def methods(self) -> list[ExplanationMethod]:
        """The methods that draw each caption, without duplicates."""
        return list(dict.fromkeys(self.method or ["attention"]))


def attend_parser() -> Parser[AttendOptions]:
    """Options of ``attend``."""
    usage = "PHOTO|FOLDER|-... [-o OUT.png|OUT.gif|OUT.html|OUT.npz|FOLDER] [options]"
    drawing = (FigureOptions, AnimationOptions, PageOptions)
    return Parser("attend", usage, AttendOptions, *drawing, SearchOptions)


def targets(
    photos: Sequence[Path],
    output: Path | None,
    ending: str | None,
    subfolders: Mapping[Path, Path] | None = None,
) -> list[Path]:
    """Return the output file of each photo; the same one for all if it is a page or an archive.

    Args:
        photos: Photos without duplicates.
        output: File or folder; None: beside each photo.
        ending: Format in a folder; None: png.
        subfolders: Where photos go in the output folder; default: into the folder itself.
    """
    if output is not None and output.suffix and not output.is_dir():
        _check_ending(output.suffix.lower())
        if ending is not None:
            raise ConfigError(
                f"--format is for output folders; {output} is a file, so leave it out"
            )
        if len(photos) > 1 and output.suffix.lower() not in (*PAGES, *ARCHIVES):
            raise ConfigError(
                f"cannot write {len(photos)} photos to {output}; give -o a folder (no file "
                "extension), a page (.html) or an archive of maps (.npz)"
            )
        return [output] * len(photos)
    suffix = f".{(ending or 'png').lower().lstrip('.')}"
    _check_ending(suffix)
    if output is None:
        folders = [Path() if photo == STDIN else photo.parent for photo in photos]
    else:
        below = subfolders or {}
        folders = [output / below.get(photo, Path()) for photo in photos]
    stems = ["stdin" if photo == STDIN else photo.stem for photo in photos]
    count = Counter(zip(folders, stems, strict=True))
    names: dict[Path, None] = {}  # an ordered set
    for photo, folder, stem in zip(photos, folders, stems, strict=True):
        # a.jpg and a.png: both keep their extension, whichever came first.
        own = _shortened(stem if count[folder, stem] == 1 else photo.name)
        name, number = f"{own}{PICTURE_MARK}{suffix}", 2
        while folder / name in names:  # same file name in two folders
            name, number = f"{own}_{number}{PICTURE_MARK}{suffix}", number + 1
        names[folder / name] = None
    return list(names)


def _shortened(stem: str) -> str:
    """Leave room for the suffix: file names are limited to 255 bytes."""
    encoded = os.fsencode(stem)
    return stem if len(encoded) <= 220 else encoded[:220].decode(errors="ignore")


def _check_ending(suffix: str) -> None:
    if suffix not in (*FIGURES, *ANIMATIONS, *PAGES, *ARCHIVES):
        raise ConfigError(
            f"cannot write {suffix}; use a figure ({', '.join(FIGURES)}), an animation "
            f"({', '.join(ANIMATIONS)}), a page (.html) or an archive of maps (.npz)"
        )
    if suffix in ANIMATIONS:
        check_animation(f"animation{suffix}")  # .mp4 needs a library


def check_kind(suffix: str, options: AttendOptions, drawing: Mapping[str, Any]) -> None:
    """Reject options that the output format does not have, instead of ignoring them."""
    kind, schema = next(one for suffixes, one in _KINDS.items() if suffix in suffixes)
    lacking = {
        "instances": schema is not FigureOptions,
        "alternatives": suffix in (*ANIMATIONS, *ARCHIVES),
        "compare": suffix in (*ANIMATIONS, *ARCHIVES),
        "blocks": schema is None,
    }
    wrong = [name for name, lacks in lacking.items() if lacks and getattr(options, name)]
    wrong += [n for n in drawing if schema is None or n not in option_fields(schema)]
    if wrong:
        raise ConfigError(
            f"{', '.join(map(flag, wrong))}: not supported for {kind} ({suffix}); leave it out"
        )
    if suffix in ANIMATIONS and len(options.methods) > 1:
        raise ConfigError(
            f"an animation shows one method, not {len(options.methods)}; give one --method, or "
            "use a figure or a page"
        )
    if "combine" in drawing and not drawing.get("only"):
        raise ConfigError("--combine needs --only; give both")


def check_count(
    model: Captioner, suffix: str, options: AttendOptions, search: dict[str, Any]
) -> None:
    """Check that there is only one caption where only one can be shown."""
    count = len(options.words) if options.words else model.options(**search).num_captions
    if options.compare and count > 1:
        raise ConfigError(
            f"--compare shows one caption per model, not {count}; give --num-captions 1 or one "
            "--words"
        )
    if len(options.methods) > 1 and count > 1:
        raise ConfigError(
            f"several --method show one caption, not {count}; give --num-captions 1 or one --words"
        )
    if suffix in ANIMATIONS and count > 1:
        raise ConfigError(f"an animation shows one caption, not {count}; use a figure or a page")
