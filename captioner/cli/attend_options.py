"""What ``captioner attend`` may be asked, and what does not go together."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captioner.cli.options import (
    Parser,
    add_model_options,
    add_search_options,
    new_parser,
)
from captioner.errors import ConfigError
from captioner.visualization.animation import ANIMATIONS
from captioner.visualization.animation import check_ending as check_animation
from captioner.visualization.figure import FIGURES
from captioner.visualization.pages import PAGES

if TYPE_CHECKING:
    from captioner.api import Captioner

# Options that one kind of picture does not have, by the field of the parsed arguments.
_ONLY_FIGURES = ("only", "combine", "coverage", "instances", "columns")
_NOT_ANIMATIONS = ("alternatives", "compare")
_ONLY_ANIMATIONS = ("seconds_per_word",)
_LEAST = {"panel_size": 0, "columns": 1, "alternatives": 0}
_MOST_ALTERNATIVES = 50  # a page shows them under each other


@functools.cache
def parser() -> Parser:
    """Options of ``attend``."""
    new = new_parser(
        "attend",
        "Show where the model looked for every word: a figure (.png, .jpg, .svg, .pdf), an "
        "animation (.gif, .webp, .mp4) or a page to explore (.html). Prints the captions, and the "
        "log-probability (nats) of sentences given by --words.",
        "PHOTO|FOLDER|-... -o OUT.png|OUT.gif|OUT.html|FOLDER [options]",
    )
    new.add_argument("photos", nargs="+", help="files, folders, or - for standard input")
    new.add_argument(
        "-o",
        "--output",
        required=True,
        help="a file for one photo; a page (.html) for any number; a folder for one file a photo",
    )
    new.add_argument(
        "--format", help="ending of the files in a folder: png (default), svg, gif ..."
    )
    new.add_argument("--force", action="store_true", help="replace files that are there")
    said = new.add_argument_group("what is said")
    said.add_argument(
        "--words",
        action="append",
        help="a sentence of yours in place of the model's; more than once: beside each other",
    )
    said.add_argument(
        "--compare",
        action="append",
        help="a model folder: its caption beside that of --model, on one scale; more than once",
    )
    said.add_argument(
        "--alternatives",
        type=int | None,
        default=None,
        help="so many of the most probable words at every place (default: pages 5, figures 0)",
    )
    _add_drawing_options(new)
    add_search_options(new)
    add_model_options(new)
    return new


def _add_drawing_options(new: Parser) -> None:
    drawn = new.add_argument_group("what is drawn, and how")
    drawn.add_argument(
        "--only",
        action="append",
        help='figures: these words only: dog, "brown dog", 3, 2-4 (several share a map); more than '
        "once",
    )
    drawn.add_argument(
        "--combine",
        choices=["mean", "max"],
        default=None,
        help="figures: how the words of --only share a map (default: mean)",
    )
    drawn.add_argument(
        "--coverage", action="store_true", help="figures: the mean map of all words too"
    )
    drawn.add_argument(
        "--instances",
        help="figures: COCO instance masks whose outlines are drawn for the words that name them; "
        "photos are known by their file names",
    )
    drawn.add_argument(
        "--panel-size",
        type=int | None,
        default=None,
        help="longer side of each photo at most, pixels; photos are never enlarged; 0: no limit "
        "(default: figures 640, animations 480, a page 1280, of many photos 800)",
    )
    drawn.add_argument(
        "--seconds-per-word",
        type=float | None,
        default=None,
        help="animations: how long a word stays, the way to it included (default: 1)",
    )
    drawn.add_argument(
        "--columns", type=int | None, default=None, help="figures: panels beside each other"
    )
    drawn.add_argument(
        "--blocks", action="store_true", help="show the grid's regions as they are, not smoothed"
    )
    drawn.add_argument("--colormap", default="inferno", help="inferno, viridis, cividis, gray, ...")
    drawn.add_argument(
        "--theme",
        choices=["light", "dark"],
        default=None,
        help="paper (default: light; a page follows its reader's system)",
    )


def targets(photos: Sequence[Path], output: Path, ending: str | None) -> list[Path]:
    """Where each photo's picture goes; a page takes them all."""
    if output.suffix and not output.is_dir():
        _check_ending(output.suffix.lower())
        if ending is not None:
            raise ConfigError(f"--format names the files of a folder; {output} has its ending")
        if len(photos) > 1 and output.suffix.lower() not in PAGES:
            raise ConfigError(
                f"{len(photos)} photos cannot all become {output}; give -o a folder (no ending), "
                "or a page (.html)"
            )
        return [output] * len(photos)
    suffix = f".{(ending or 'png').lower().lstrip('.')}"
    _check_ending(suffix)
    stems = ["stdin" if str(photo) == "-" else _shortened(photo.stem) for photo in photos]
    names: dict[Path, None] = {}  # in their order
    for stem in stems:
        name, number = f"{stem}_attention{suffix}", 2
        while output / name in names:  # two photos of one name from different folders
            name, number = f"{stem}_{number}_attention{suffix}", number + 1
        names[output / name] = None
    return list(names)


def _shortened(stem: str) -> str:
    """With room for what comes behind it: systems take names of 255 bytes."""
    encoded = os.fsencode(stem)
    return stem if len(encoded) <= 220 else encoded[:220].decode(errors="ignore")


def _check_ending(suffix: str) -> None:
    if suffix not in (*FIGURES, *ANIMATIONS, *PAGES):
        raise ConfigError(
            f"{suffix} is nothing that can be made; give a figure ({', '.join(FIGURES)}), an "
            f"animation ({', '.join(ANIMATIONS)}) or a page (.html)"
        )
    if suffix in ANIMATIONS:
        check_animation(f"animation{suffix}")  # its writer may be missing


def check_kind(suffix: str, options: Any) -> None:
    """Refuse what this kind of picture does not have, rather than leave it out silently."""
    for name, least in _LEAST.items():
        if options[name] is not None and options[name] < least:
            raise ConfigError(f"{_spelled(name)} is {options[name]}; give {least} or more")
    if (options.alternatives or 0) > _MOST_ALTERNATIVES:
        raise ConfigError(
            f"--alternatives is {options.alternatives}; give {_MOST_ALTERNATIVES} at most"
        )
    kind, lacking = _lacking(suffix)
    wrong = [_spelled(name) for name in lacking if options[name]]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)}: not for {kind} ({suffix}); leave it out")
    if options.combine and not options.only:
        raise ConfigError("--combine says how the words of --only share a map; give --only too")


def _lacking(suffix: str) -> tuple[str, tuple[str, ...]]:
    """What the kind is called, and the options that it does not have."""
    if suffix in FIGURES:
        return "a figure", _ONLY_ANIMATIONS
    if suffix in ANIMATIONS:
        return "an animation", (*_ONLY_FIGURES, *_NOT_ANIMATIONS)
    return "a page", (*_ONLY_FIGURES, *_ONLY_ANIMATIONS)


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_count(model: Captioner, suffix: str, options: Any, search: dict[str, Any]) -> None:
    """Refuse several captions where there is room for one."""
    count = len(options.words) if options.words else model.options(**search).num_captions
    if options.compare and count > 1:
        raise ConfigError(
            f"--compare shows one caption of each model, not {count}; give --num-captions 1 or one "
            "sentence"
        )
    if suffix in ANIMATIONS and count > 1:
        raise ConfigError(f"an animation shows one caption, not {count}; give a figure or a page")
