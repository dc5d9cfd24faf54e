"""``captioner attend``: one picture a caption that shows where the model looked."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

from captioner.cli.main import FAILED, OK
from captioner.cli.options import (
    Parser,
    add_model_options,
    add_search_options,
    find_photos,
    new_parser,
    refuse_overwrite,
    search_changes,
    warn,
)
from captioner.errors import ConfigError, ImageError


def parser() -> Parser:
    """Options of ``attend``."""
    new = new_parser(
        "attend",
        "Draw the photo and, for every word of its caption, where the model looked; print the "
        "caption, and the log-probability (nats) of a sentence given by --words.",
        "PHOTO... -o OUT.png|FOLDER [options]",
    )
    new.add_argument("photos", nargs="+", help="files, folders, or - for standard input")
    new.add_argument(
        "-o",
        "--output",
        required=True,
        help="a picture (.png, .jpg, .webp, ...) for one photo, a folder for several",
    )
    new.add_argument("--force", action="store_true", help="replace pictures that are there")
    new.add_argument(
        "--panel-size",
        type=int,
        default=640,
        help="longer side of each panel at most, pixels; photos are never enlarged; 0: no limit",
    )
    new.add_argument("--columns", type=int | None, default=None, help="panels beside each other")
    new.add_argument(
        "--blocks", action="store_true", help="show the grid's regions as they are, not smoothed"
    )
    new.add_argument("--colormap", default="inferno", help="inferno, viridis, gray, ...")
    new.add_argument("--words", help="a sentence of yours to look for, in place of the model's own")
    add_search_options(new)
    add_model_options(new)
    return new


def main(argv: Sequence[str]) -> int:
    """Draw everything; name what failed."""
    options = parser().parse(argv)

    from captioner.data.images import open_image
    from captioner.visualization import overlay
    from captioner.visualization.heatmap import check_colormap

    check_colormap(options.colormap)
    photos, failures = find_photos(options.photos)
    if not photos:
        return FAILED
    targets = _targets(photos, Path(options.output))
    from captioner.api import load
    from captioner.files import atomic_write

    search = search_changes(options)
    if search and options.words is not None:
        raise ConfigError(
            f"--words gives the sentence, so there is nothing to search; leave out "
            f"--{next(iter(search)).replace('_', '-')}"
        )
    model = load(*options.model, device=options.device, precision=options.precision)
    count = model.options(**search).num_captions if options.words is None else 1
    for target in targets:
        for name in _numbered(target, count):
            refuse_overwrite(name, options.force)
    for photo, target in zip(photos, targets, strict=True):
        try:
            image = open_image(sys.stdin.buffer if str(photo) == "-" else photo)
        except ImageError as error:
            failures += 1
            warn(str(error))
            continue
        if options.words is None:
            captions = model.captions(image, **search)
        else:
            captions = [model.explain(image, options.words)]
        for name, caption in zip(_numbered(target, len(captions)), captions, strict=True):
            picture = overlay(
                image,
                caption,
                panel_size=options.panel_size,
                columns=options.columns,
                smooth=not options.blocks,
                colormap=options.colormap,
            )
            buffer = io.BytesIO()
            picture.save(buffer, format=_formats()[name.suffix.lower()])
            atomic_write(name, buffer.getvalue())
            print(f"{photo}: {caption.text}", flush=True)
            if options.words is not None:
                each = zip(caption.words, caption.log_probs, strict=True)
                said = ", ".join(f"{word} {log_prob:.2f}" for word, log_prob in each)
                print(f"  log-probability {caption.log_prob:.2f} ({said})", flush=True)
    return FAILED if failures else OK


def _numbered(target: Path, count: int) -> list[Path]:
    """A name for each caption's picture of one photo."""
    more = [target.with_stem(f"{target.stem}_{number}") for number in range(2, count + 1)]
    return [target, *more]


def _formats() -> dict[str, str]:
    """Picture formats by file name ending that can be written."""
    from PIL import Image

    Image.init()
    return {end: kind for end, kind in Image.registered_extensions().items() if kind in Image.SAVE}


def _targets(photos: Sequence[Path], output: Path) -> list[Path]:
    """Where each photo's picture goes."""
    if output.suffix and not output.is_dir():
        if len(photos) > 1:
            raise ConfigError(
                f"{len(photos)} photos cannot all become {output}; give -o a folder (no ending)"
            )
        if output.suffix.lower() not in _formats():
            raise ConfigError(
                f"{output.suffix} is no picture format that can be written; give .png, .jpg, .webp"
            )
        return [output]
    stems = ["stdin" if str(photo) == "-" else photo.stem for photo in photos]
    names: list[Path] = []
    for stem in stems:
        name, number = f"{stem}_attention.png", 2
        while output / name in names:  # two photos of one name from different folders
            name, number = f"{stem}_{number}_attention.png", number + 1
        names.append(output / name)
    return names
