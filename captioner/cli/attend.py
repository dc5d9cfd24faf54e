"""``captioner attend``: figures, animations and pages that show where the model looked."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tqdm import tqdm

from captioner.caption import END_NAME
from captioner.cli.attend_options import check_count, check_kind, parser, targets
from captioner.cli.main import FAILED, OK
from captioner.cli.options import (
    find_photos,
    missing,
    refuse_overwrite,
    search_changes,
    warn,
)
from captioner.errors import ConfigError, ImageError
from captioner.visualization.animation import ANIMATIONS, animate
from captioner.visualization.figure import FIGURES, overlay
from captioner.visualization.heatmap import check_colormap
from captioner.visualization.pages import PAGES, Entry, gallery, page

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

    from captioner.api import Captioner
    from captioner.caption import Caption
    from captioner.evaluation.masks import Instances


DECODED = 8
"""Most decoded photos held in memory at once."""


class _Shown(NamedTuple):
    """A photo with what was said about it."""

    name: Path
    """As it was given, - for standard input."""
    photo: Any
    """The decoded image, or its path where many photos are gathered."""
    captions: list[Caption]
    labels: list[str]


class _Savable(Protocol):
    def save(self, path: str | Path) -> None: ...


def main(argv: Sequence[str]) -> int:
    """Draw everything; name what failed."""
    options = parser().parse(argv)
    check_colormap(options.colormap)
    search = search_changes(options)
    if search and options.words:
        raise ConfigError(
            f"--words gives the sentence, so there is nothing to search; leave out "
            f"--{next(iter(search)).replace('_', '-')}"
        )
    photos, failures = find_photos(options.photos)
    if not photos:
        return FAILED
    places = _places(photos, options)
    instances = _instances(options.instances)
    there = [pair for pair in zip(photos, places, strict=True) if not missing(pair[0])]
    failures += len(photos) - len(there)
    if not there:
        return FAILED
    models = _models(options)
    check_count(models[0], places[0].suffix.lower(), options, search)
    shown = _shown(models, [photo for photo, _ in there], options, search)
    failures += _draw(shown, [place for _, place in there], instances, options)
    return FAILED if failures else OK


def _places(photos: Sequence[Path], options: Any) -> list[Path]:
    """Where each photo's picture goes, once all that was asked fits together."""
    places = targets(photos, Path(options.output), options.format)
    suffix = places[0].suffix.lower()  # the same for all
    check_kind(suffix, options)
    if options.alternatives is None:
        options.alternatives = 5 if suffix in PAGES else 0
    given = {photo.resolve() for photo in photos}
    for place in dict.fromkeys(places):
        if place.resolve() in given:
            raise ConfigError(f"{place} is the photo itself; give another name")
        refuse_overwrite(place, options.force)
    return places


def _draw(
    shown: Iterator[_Shown | ImageError],
    places: Sequence[Path],
    instances: Instances | None,
    options: Any,
) -> int:
    """Draw one photo after the other, or all on one page; how many failed."""
    failures, gathered = 0, []
    draw = _drawer(places[0].suffix.lower(), options)
    several = len(places) > 1
    hide = None if several else True  # None: hidden unless stderr is a terminal
    bar = tqdm(shown, total=len(places), unit="photo", disable=hide, dynamic_ncols=True)
    for place, one in zip(places, bar, strict=True):
        if isinstance(one, ImageError):
            failures += 1
            warn(str(one))
            continue
        if several and places[0] == places[-1]:
            # A page of many photos reads them again, rather than hold them all in memory.
            again = one.photo if str(one.name) == "-" else one.name
            gathered.append(one._replace(photo=again))
        else:
            try:
                draw(one, _outlines(one, instances)).save(place)
            except ConfigError as error:  # e.g. a word that this caption lacks: the others go on
                if not several:
                    raise
                failures += 1
                warn(f"{one.name}: {error}")
        _tell(one, options)
    if gathered:
        _gallery(gathered, options).save(places[0])
    return failures


# --- what is said --------------------------------------------------------------------------------


def _models(options: Any) -> list[Captioner]:
    """The model (or ensemble), and those that it is compared with."""
    from captioner.api import load

    def loaded(*folders: str) -> Captioner:
        return load(*folders, device=options.device, precision=options.precision)

    return [loaded(*options.model), *(loaded(folder) for folder in options.compare or [])]


def _shown(
    models: Sequence[Captioner], photos: Sequence[Path], options: Any, search: dict[str, Any]
) -> Iterator[_Shown | ImageError]:
    """Every photo with its captions, or the error; each is decoded once."""
    labels = _labels(options)
    size = 1 if options.words else min(options.batch_size, DECODED)
    for start in range(0, len(photos), size):
        batch = photos[start : start + size]
        images = [_open(photo) for photo in batch]
        readable = [image for image in images if not isinstance(image, ImageError)]
        found = iter(_captions(models, readable, options, search))
        for photo, image in zip(batch, images, strict=True):
            if isinstance(image, ImageError):
                yield image
            else:
                yield _Shown(photo, image, next(found), labels)


def _open(photo: Path) -> Image | ImageError:
    from captioner.data.images import open_image

    try:
        return open_image(sys.stdin.buffer if str(photo) == "-" else photo)
    except ImageError as error:
        return error


def _captions(
    models: Sequence[Captioner], images: Sequence[Image], options: Any, search: dict[str, Any]
) -> Iterator[list[Caption]]:
    """The captions of every image by all models: those found, or the given words."""
    prepared = [[model.prepare(image) for image in images] for model in models]
    others = options.alternatives
    if options.words:
        for photo in zip(*prepared, strict=True):
            yield [
                caption
                for text in options.words
                for model, one in zip(models, photo, strict=True)
                for caption in model.explain_batch(
                    [one], [model.known_words(text)], alternatives=others
                )
            ]
        return
    found = [
        model.caption_batch(photos, model.options(**search), alternatives=others)
        for model, photos in zip(models, prepared, strict=True)
    ]
    for captions in zip(*found, strict=True):
        yield [caption for of_model in captions for caption in of_model]


def _labels(options: Any) -> list[str]:
    """The compared models' names: their folders as they were given."""
    if not options.compare:
        return []
    first = " + ".join(options.model) if options.model else "the model that ships"
    return [first, *options.compare]


def _tell(one: _Shown, options: Any) -> None:
    """Print what was said."""
    for number, caption in enumerate(one.captions):
        label = f" ({one.labels[number]})" if one.labels else ""
        print(f"{one.name}: {caption.text}{label}", flush=True)
        if options.words:
            each = zip(caption.words, caption.log_probs, strict=True)
            end = caption.log_prob - float(caption.log_probs.sum())
            said = ", ".join(f"{word} {log_prob:.2f}" for word, log_prob in each)
            said += f", {END_NAME} {end:.2f}"
            print(f"  log-probability {caption.log_prob:.2f} ({said})", flush=True)


# --- what is drawn -------------------------------------------------------------------------------


def _drawer(suffix: str, options: Any) -> Callable[[_Shown, Any], _Savable]:
    """What draws one photo as this kind of picture."""
    look = _look(options)

    def figure(one: _Shown, outlines: Any) -> _Savable:
        chosen = {"combine": options.combine} if options.combine else {}
        return overlay(
            one.photo,
            one.captions,
            labels=one.labels,
            only=options.only or (),
            coverage=options.coverage,
            alternatives=options.alternatives,
            outlines=outlines,
            columns=options.columns,
            **chosen,
            **look,
        )

    def animation(one: _Shown, outlines: Any) -> _Savable:
        del outlines
        pace = options.seconds_per_word
        given = {} if pace is None else {"seconds_per_word": pace}
        return animate(one.photo, one.captions[0], **given, **look)

    def one_page(one: _Shown, outlines: Any) -> _Savable:
        del outlines
        (title,) = _titles([one])
        return page(one.photo, one.captions, title=title, labels=one.labels, **look)

    return figure if suffix in FIGURES else animation if suffix in ANIMATIONS else one_page


def _gallery(shown: Sequence[_Shown], options: Any) -> _Savable:
    """One page of all photos."""
    entries = [
        Entry(one.photo, one.captions, title, one.labels)
        for one, title in zip(shown, _titles(shown), strict=True)
    ]
    return gallery(entries, **_look(options))


def _titles(shown: Sequence[_Shown]) -> list[str]:
    """File names; where two are alike, with the folder: a page may go to others."""
    names = ["" if str(one.name) == "-" else one.name.name for one in shown]
    twice = {name for name, count in Counter(names).items() if count > 1}
    return [
        f"{one.name.absolute().parent.name}/{name}" if name in twice else name
        for one, name in zip(shown, names, strict=True)
    ]


def _look(options: Any) -> dict[str, Any]:
    """What all kinds share; each has its own default of what is not given."""
    look: dict[str, Any] = {"smooth": not options.blocks, "colormap": options.colormap}
    given = {name: options[name] for name in ("panel_size", "theme")}
    return look | {name: value for name, value in given.items() if value is not None}


def _instances(path: str | None) -> Instances | None:
    if path is None:
        return None
    from captioner.evaluation.masks import read_instances

    return read_instances(path)


def _outlines(one: _Shown, instances: Instances | None) -> Any:
    """For each caption, by the place of a word, the masks of what it names."""
    if instances is None:
        return ()
    from captioner.evaluation.objects import find_names

    ids = [i for i, name in instances.names.items() if Path(name).name == one.name.name]
    if not ids:
        warn(f"{one.name}: {instances.path} holds no photo of this name; no outlines are drawn")
        return ()
    outlines = []
    for caption in one.captions:
        places: dict[int, list[NDArray[np.bool_]]] = {}
        for name in find_names(caption.words):
            known = name.category in instances.categories
            masks = instances.masks(ids[0], name.category) if known else None
            if masks is not None:
                for place in range(name.start, name.stop):
                    places.setdefault(place, []).append(masks.objects)
        outlines.append(places)
    if not any(outlines):
        warn(f"{one.name}: its words name nothing that {instances.path} has a mask of")
    return outlines
