"""``captioner attend``: where the model looked, as figure, animation, web page or archive."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from captioner.caption import END_NAME
from captioner.cli.arguments import checked_search, flag
from captioner.cli.attend_options import (
    AttendOptions,
    attend_parser,
    check_count,
    check_kind,
    targets,
)
from captioner.cli.main import FAILED, OK
from captioner.cli.outputs import refuse_overwrite, require_parent, warn
from captioner.cli.photos import STDIN, Photos, find_photos, missing
from captioner.data.progress import photo_bar
from captioner.drawing.animation import animate
from captioner.drawing.archive import MapArchive
from captioner.drawing.figure import overlay
from captioner.drawing.options import ANIMATIONS, ARCHIVES, FIGURES, PAGES
from captioner.drawing.pages import Entry, gallery, page
from captioner.drawing.style import lacks_letters
from captioner.errors import ConfigError, ImageError
from captioner.option_fields import option_fields
from captioner.options import METHOD_TITLES, SearchOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

    from captioner.caption import Caption
    from captioner.evaluation.masks import Instances
    from captioner.inference.captioner import Captioner


DECODED = 8
"""Most decoded photos held in memory at once."""


class _Captioned(NamedTuple):
    """A photo and its captions."""

    name: Path
    """The given path; - for standard input."""
    photo: Any
    """The decoded image, or its path where many photos are gathered."""
    captions: list[Caption]
    labels: list[str]


class _Savable(Protocol):
    def save(self, path: str | Path) -> None: ...


def attend(argv: Sequence[str]) -> int:
    """Draw all photos; report those that failed."""
    options, drawing = attend_parser().parse(argv)
    search = {n: drawing.pop(n) for n in option_fields(SearchOptions) if n in drawing}
    searched = [name for name in search if name != "style"]
    if searched and options.words:
        raise ConfigError(
            f"--words gives the caption, so there is no search; omit {flag(searched[0])}"
        )
    checked_search(options.model, search)
    photos = find_photos(options)
    failures = photos.failures
    jobs = _jobs(photos, options, drawing) if photos.paths else []
    if jobs and options.alternatives is None:
        pages = jobs[0][1].suffix.lower() in PAGES
        options = replace(options, alternatives=5 if pages else 0)
    failures += sum(missing(photo) for photo, _ in jobs)
    jobs = [(photo, path) for photo, path in jobs if photo == STDIN or photo.exists()]
    if jobs:
        failures += _attend(jobs, options, search, drawing | {"smooth": not options.blocks})
    photos.report_skipped()
    return FAILED if failures else OK


def _attend(
    jobs: Sequence[tuple[Path, Path]],
    options: AttendOptions,
    search: dict[str, Any],
    drawing: dict[str, Any],
) -> int:
    """Draw photos into their output files; return the number of failures."""
    instances = _instances(options.instances)
    models = _models(options)
    for model in models:
        for method in options.methods:
            model.check_method(method)
    check_count(models[0], jobs[0][1].suffix.lower(), options, search)
    captioned = _captioned(models, [photo for photo, _ in jobs], options, search)
    return _draw(captioned, [path for _, path in jobs], instances, options, drawing)


def _jobs(
    photos: Photos, options: AttendOptions, drawing: dict[str, Any]
) -> list[tuple[Path, Path]]:
    """Check the options; return each photo with its output file."""
    paths = list(dict.fromkeys(photos.paths))
    output = None if options.output is None else Path(options.output)
    outputs = targets(paths, output, options.format, photos.subfolders)
    suffix = outputs[0].suffix.lower()  # the same for all
    check_kind(suffix, options, drawing)
    given = {photo.resolve() for photo in paths}
    for path in dict.fromkeys(outputs):
        if path.resolve() in given:
            raise ConfigError(f"{path} is the photo itself; give another output name")
    jobs = list(zip(paths, outputs, strict=True))
    if output is not None:
        require_parent(output)
    if options.skip_existing:
        jobs = _without_existing(jobs, options)
    for path in dict.fromkeys(path for _, path in jobs):
        refuse_overwrite(path, options.force, new_folder=True)
    return jobs


def _without_existing(
    jobs: Sequence[tuple[Path, Path]], options: AttendOptions
) -> list[tuple[Path, Path]]:
    """Leave out the photos whose output exists. Outputs are written atomically: it is complete."""
    if options.force:
        raise ConfigError("--skip-existing and --force contradict each other; give one of them")
    if len(jobs) > 1 and jobs[0][1] == jobs[-1][1]:
        raise ConfigError(
            f"--skip-existing needs one file per photo, and {jobs[0][1]} is one for all; give -o a "
            "folder"
        )
    new = [(photo, path) for photo, path in jobs if not path.is_file()]
    if count := len(jobs) - len(new):
        warn(f"{count} of {len(jobs)} photos already have a picture; skipped")
    return new


def _draw(
    captioned: Iterator[_Captioned | ImageError],
    outputs: Sequence[Path],
    instances: Instances | None,
    options: AttendOptions,
    drawing: dict[str, Any],
) -> int:
    """Draw a file per photo, or all on one page; return the number of failures."""
    failures, saved = 0, 0
    suffix, boxes = outputs[0].suffix.lower(), False
    draw = _drawer(suffix, options, drawing)
    several = len(outputs) > 1
    together = _Together(suffix) if several and outputs[0] == outputs[-1] else None
    bar = photo_bar(captioned, shown=several, total=len(outputs))
    try:
        for path, one in zip(outputs, bar, strict=True):
            if isinstance(one, ImageError):
                failures += 1
                warn(str(one))
                continue
            drawn = False
            if together is not None:
                together.add(one)
            elif several:
                drawn = _try_save(draw, one, instances, path)
                failures += not drawn
            else:
                draw(one, _outlines(one, instances)).save(path)
                drawn = True
            saved += drawn
            if suffix not in (".svg", *PAGES, *ARCHIVES):
                boxes |= any(lacks_letters(caption.text) for caption in one.captions)
            _print_captions(one, options)
            if drawn and options.output is None:
                print(f"  saved as {path}", flush=True)
    except KeyboardInterrupt:
        bar.close()
        if saved:
            _print_how_to_continue(saved, len(outputs), options)
        raise
    if together is not None and failures < len(outputs):
        together.save(outputs[0], drawing)
    if boxes:
        warn(
            "the font of pictures lacks letters of the captions and shows them as a box; write "
            ".svg or .html, which use the fonts of the viewer"
        )
    return failures


class _Together:
    """One file for all photos: a page, or an archive of maps."""

    def __init__(self, suffix: str) -> None:
        self._archive = MapArchive() if suffix in ARCHIVES else None
        self._gathered: list[_Captioned] = []

    def add(self, one: _Captioned) -> None:
        if self._archive is not None:
            self._archive.add(one.name, one.captions, one.photo.size)
        else:  # a page of many photos reads them again, rather than hold them all in memory
            again = one.photo if one.name == STDIN else one.name
            self._gathered.append(one._replace(photo=again))

    def save(self, path: Path, drawing: dict[str, Any]) -> None:
        made = self._archive if self._archive is not None else _gallery(self._gathered, drawing)
        made.save(path)


def _try_save(
    draw: Callable[[_Captioned, Any], _Savable],
    one: _Captioned,
    instances: Instances | None,
    path: Path,
) -> bool:
    """Draw one of several photos; whether it was possible."""
    try:
        draw(one, _outlines(one, instances)).save(path)
    except ConfigError as error:  # e.g. --only with a word that this caption lacks
        warn(f"{one.name}: {error}")
        return False
    return True


def _print_how_to_continue(saved: int, count: int, options: AttendOptions) -> None:
    # With --force, older outputs exist for the other photos too.
    hint = "" if options.force else "; to continue, run the same command with --skip-existing"
    warn(f"{saved} of {count} photos are finished{hint}")


# --- captions ------------------------------------------------------------------------------------


def _models(options: AttendOptions) -> list[Captioner]:
    """Load the model (or ensemble) and those to compare it with."""
    from captioner.inference.captioner import load

    def loaded(*folders: str) -> Captioner:
        return load(*folders, device=options.device, precision=options.precision)

    return [loaded(*options.model), *map(loaded, options.compare)]


def _captioned(
    models: Sequence[Captioner],
    photos: Sequence[Path],
    options: AttendOptions,
    search: dict[str, Any],
) -> Iterator[_Captioned | ImageError]:
    """Every photo with its captions, or the error."""
    size = 1 if options.words else min(options.batch_size, DECODED)
    image_size = max(model.ensemble.image_size for model in models)
    for start in range(0, len(photos), size):
        batch = photos[start : start + size]
        opened = [_open(photo, image_size) for photo in batch]
        seen = [images.seen for images in opened if not isinstance(images, ImageError)]
        found = iter(_captions(models, seen, options, search))
        for photo, images in zip(batch, opened, strict=True):
            if isinstance(images, ImageError):
                yield images
            else:
                captions = next(found)
                yield _Captioned(photo, images.drawn, captions, _labels(options, len(captions)))


class _Opened(NamedTuple):
    """A photo as it is drawn, and as the model sees it; a large JPEG is decoded for each."""

    drawn: Image
    seen: Image


def _open(photo: Path, image_size: int) -> _Opened | ImageError:
    """Read a photo so that its caption is that of ``captioner caption``."""
    from captioner.data.images import MAX_STREAM_BYTES, open_image, reduced_side

    source: Path | bytes = photo
    name = None
    if photo == STDIN:  # which cannot be read twice
        source, name = sys.stdin.buffer.read(MAX_STREAM_BYTES + 1), "<stdin>"
    side = reduced_side(image_size)
    try:
        drawn = open_image(source, name=name)
        large = min(drawn.size) >= 2 * side
        return _Opened(drawn, open_image(source, name=name, min_side=side) if large else drawn)
    except ImageError as error:
        return error


def _captions(
    models: Sequence[Captioner],
    images: Sequence[Image],
    options: AttendOptions,
    search: dict[str, Any],
) -> Iterator[list[Caption]]:
    """The captions of every image by all models: those found, or the given words.

    Each is repeated for every method.
    """
    prepared = [[model.prepare(image) for image in images] for model in models]
    others = options.alternatives or 0
    if options.words:
        for photo in zip(*prepared, strict=True):
            yield [
                caption
                for text in options.words
                for model, one in zip(models, photo, strict=True)
                for method in options.methods
                for caption in model.explain_batch(
                    [one],
                    [model.stored.vocabulary.known_words(text)],
                    alternatives=others,
                    method=method,
                    style=search.get("style"),
                )
            ]
        return
    found = [
        model.caption_batch(photos, model.options(**search), alternatives=others, method=method)
        for model, photos in zip(models, prepared, strict=True)
        for method in options.methods
    ]
    for captions in zip(*found, strict=True):
        yield [caption for of_model in captions for caption in of_model]


def _model_names(options: AttendOptions) -> list[str]:
    """Names of the compared models: their folders."""
    if not options.compare:
        return []
    first = " + ".join(options.model) if options.model else "shipped model"
    return [first, *options.compare]


def _labels(options: AttendOptions, count: int) -> list[str]:
    """A name for each caption: its model's, its method's, or both; attention alone has none."""
    used = options.methods
    titles = [METHOD_TITLES[method] for method in used] if used != ["attention"] else []
    names = _model_names(options)
    if names and titles:
        return [f"{name}: {title}" for name in names for title in titles]
    return names or (titles * count if len(titles) == 1 else titles)


def _print_captions(one: _Captioned, options: AttendOptions) -> None:
    names, step = _model_names(options), len(options.methods)
    for number, caption in enumerate(one.captions[::step]):  # once, not for every method
        label = f" ({names[number]})" if names else ""
        print(f"{one.name}: {caption.text}{label}", flush=True)
        if options.words:
            each = zip(caption.words, caption.log_probs, strict=True)
            end = caption.log_prob - float(caption.log_probs.sum())
            parts = ", ".join(f"{word} {log_prob:.2f}" for word, log_prob in each)
            parts += f", {END_NAME} {end:.2f}"
            print(f"  log-probability {caption.log_prob:.2f} ({parts})", flush=True)


# --- drawing -------------------------------------------------------------------------------------


def _drawer(
    suffix: str, options: AttendOptions, drawing: dict[str, Any]
) -> Callable[[_Captioned, Any], _Savable]:
    """Return the function that draws a photo in this format."""

    def figure(one: _Captioned, outlines: Any) -> _Savable:
        more = {"alternatives": options.alternatives or 0, "outlines": outlines}
        return overlay(one.photo, one.captions, labels=one.labels, **more, **drawing)

    def animation(one: _Captioned, outlines: Any) -> _Savable:
        del outlines
        return animate(one.photo, one.captions[0], **drawing)

    def one_page(one: _Captioned, outlines: Any) -> _Savable:
        del outlines
        (title,) = _titles([one])
        return page(one.photo, one.captions, title=title, labels=one.labels, **drawing)

    def archive(one: _Captioned, outlines: Any) -> _Savable:
        del outlines
        maps = MapArchive()
        maps.add(one.name, one.captions, one.photo.size)
        return maps

    formats = {FIGURES: figure, ANIMATIONS: animation, PAGES: one_page, ARCHIVES: archive}
    return next(draw for suffixes, draw in formats.items() if suffix in suffixes)


def _gallery(captioned: Sequence[_Captioned], drawing: dict[str, Any]) -> _Savable:
    """Create one page with all photos."""
    entries = [
        Entry(one.photo, one.captions, title, one.labels)
        for one, title in zip(captioned, _titles(captioned), strict=True)
    ]
    return gallery(entries, **drawing)


def _titles(captioned: Sequence[_Captioned]) -> list[str]:
    """File names, with their folder only if two are the same: pages may be published."""
    names = ["" if one.name == STDIN else one.name.name for one in captioned]
    twice = {name for name, count in Counter(names).items() if count > 1}
    return [
        f"{one.name.absolute().parent.name}/{name}" if name in twice else name
        for one, name in zip(captioned, names, strict=True)
    ]


def _instances(path: str | None) -> Instances | None:
    if path is None:
        return None
    from captioner.evaluation.masks import read_instances

    return read_instances(path)


def _outlines(one: _Captioned, instances: Instances | None) -> Any:
    """For each caption, masks of the objects that it names, by word position."""
    if instances is None:
        return ()
    from captioner.evaluation.objects import find_names

    ids = [i for i, name in instances.names.items() if Path(name).name == one.name.name]
    if not ids:
        warn(f"{one.name}: not in {instances.path}; no outlines are drawn")
        return ()
    outlines = []
    for caption in one.captions:
        by_word: dict[int, list[NDArray[np.bool_]]] = {}
        for name in find_names(caption.words):
            known = name.category in instances.categories
            masks = instances.masks(ids[0], name.category) if known else None
            if masks is not None:
                for position in range(name.start, name.stop):
                    by_word.setdefault(position, []).append(masks.objects)
        outlines.append(by_word)
    if not any(outlines):
        warn(f"{one.name}: the caption names no object that has a mask in {instances.path}")
    return outlines
