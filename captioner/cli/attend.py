"""``captioner attend``: figures, animations and pages that show where the model looked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tqdm import tqdm

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
from captioner.visualization.animation import ANIMATIONS
from captioner.visualization.animation import check_ending as check_animation
from captioner.visualization.figure import FIGURES
from captioner.visualization.pages import PAGES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from captioner.api import Captioner
    from captioner.caption import Caption
    from captioner.evaluation.masks import Instances
    from captioner.visualization import Entry

# Options that one kind of picture does not have, by the field of the parsed arguments.
_ONLY_FIGURES = ("only", "combine", "coverage", "instances", "columns")
_NOT_ANIMATIONS = ("alternatives", "compare")


class _Shown(NamedTuple):
    """A photo with what was said about it."""

    name: Path
    """As it was given, - for standard input."""
    photo: Any
    """What can be opened: the path, or the picture from standard input."""
    captions: list[Caption]
    labels: list[str]


class _Savable(Protocol):
    def save(self, path: str | Path) -> None: ...


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


def main(argv: Sequence[str]) -> int:
    """Draw everything; name what failed."""
    options = parser().parse(argv)

    from captioner.visualization.heatmap import check_colormap

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
    targets = _targets(photos, Path(options.output), options.format)
    suffix = targets[0].suffix.lower()  # the same for all
    _check_kind(suffix, options)
    for target in dict.fromkeys(targets):
        refuse_overwrite(target, options.force)
    instances = _instances(options.instances)
    models = _models(options)
    _check_count(models[0], suffix, options, search)
    if options.alternatives is None:
        options.alternatives = 5 if suffix in PAGES else 0

    draw = _drawer(suffix, options)
    gathered: list[_Shown] = []
    shown = _shown(models, photos, options, search)
    hide = None if len(photos) > 1 else True  # None: hidden unless stderr is a terminal
    bar = tqdm(shown, total=len(photos), unit="photo", disable=hide, dynamic_ncols=True)
    for target, one in zip(targets, bar, strict=True):
        if isinstance(one, ImageError):
            failures += 1
            warn(str(one))
            continue
        if targets[0] == targets[-1] and len(photos) > 1:
            gathered.append(one)
        else:
            draw(one, _outlines(one, instances)).save(target)
        _tell(one, options)
    if gathered:
        _gallery(gathered, options).save(targets[0])
    return FAILED if failures else OK


# --- what goes together --------------------------------------------------------------------------


def _targets(photos: Sequence[Path], output: Path, ending: str | None) -> list[Path]:
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
    stems = ["stdin" if str(photo) == "-" else photo.stem for photo in photos]
    names: list[Path] = []
    for stem in stems:
        name, number = f"{stem}_attention{suffix}", 2
        while output / name in names:  # two photos of one name from different folders
            name, number = f"{stem}_{number}_attention{suffix}", number + 1
        names.append(output / name)
    return names


def _check_ending(suffix: str) -> None:
    if suffix not in (*FIGURES, *ANIMATIONS, *PAGES):
        raise ConfigError(
            f"{suffix} is nothing that can be made; give a figure ({', '.join(FIGURES)}), an "
            f"animation ({', '.join(ANIMATIONS)}) or a page (.html)"
        )
    if suffix in ANIMATIONS:
        check_animation(f"animation{suffix}")  # its writer may be missing


def _check_kind(suffix: str, options: Any) -> None:
    """Refuse what this kind of picture does not have, rather than leave it out silently."""
    if suffix in FIGURES:
        if options.combine and not options.only:
            raise ConfigError("--combine says how the words of --only share a map; give --only too")
        return
    kind = "a page"
    lacking: tuple[str, ...] = _ONLY_FIGURES
    if suffix in ANIMATIONS:
        kind, lacking = "an animation", (*_ONLY_FIGURES, *_NOT_ANIMATIONS)
    for name in lacking:
        if options[name]:
            raise ConfigError(f"--{name} is not for {kind} ({suffix}); leave it out, or give .png")


def _check_count(model: Captioner, suffix: str, options: Any, search: dict[str, Any]) -> None:
    count = len(options.words) if options.words else model.options(**search).num_captions
    if options.compare and count > 1:
        raise ConfigError(
            f"--compare shows one caption of each model, not {count}; give --num-captions 1 or one "
            "sentence"
        )
    if suffix in ANIMATIONS and count > 1:
        raise ConfigError(f"an animation shows one caption, not {count}; give a figure or a page")


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
    """Every photo with its captions, or why it has none."""
    from captioner.data.images import open_image

    sources: list[Any] = []
    for photo in photos:  # standard input can be read once only, and is read and drawn
        try:
            sources.append(open_image(sys.stdin.buffer) if str(photo) == "-" else photo)
        except ImageError as error:
            sources.append(error)
    readable = [source for source in sources if not isinstance(source, ImageError)]
    results = _results(models, readable, options, search)
    labels = _labels(options)
    for photo, source in zip(photos, sources, strict=True):
        found = source if isinstance(source, ImageError) else next(results)
        yield found if isinstance(found, ImageError) else _Shown(photo, source, found, labels)


def _results(
    models: Sequence[Captioner], photos: Sequence[Any], options: Any, search: dict[str, Any]
) -> Iterator[list[Caption] | ImageError]:
    """What all models say of every photo, or why they cannot."""
    others = options.alternatives
    if options.words:
        for photo in photos:
            try:
                yield [
                    model.explain(photo, text, alternatives=others)
                    for text in options.words
                    for model in models
                ]
            except ImageError as unreadable:
                yield unreadable
        return
    size = options.batch_size
    streams = (
        model.stream(photos, model.options(**search), batch_size=size, alternatives=others)
        for model in models
    )
    for results in zip(*streams, strict=True):
        error = results[0].error
        yield [c for result in results for c in result.captions] if error is None else error


def _labels(options: Any) -> list[str]:
    """The compared models' names: as much of their folders as tells them apart."""
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
            said = ", ".join(f"{word} {log_prob:.2f}" for word, log_prob in each)
            print(f"  log-probability {caption.log_prob:.2f} ({said})", flush=True)


# --- what is drawn -------------------------------------------------------------------------------


def _drawer(suffix: str, options: Any) -> Callable[[_Shown, Any], _Savable]:
    """What draws one photo as this kind of picture."""
    look: dict[str, Any] = {"smooth": not options.blocks, "colormap": options.colormap}
    if options.panel_size is not None:
        look["panel_size"] = options.panel_size
    if options.theme is not None:
        look["theme"] = options.theme

    def figure(one: _Shown, outlines: Any) -> _Savable:
        from captioner.visualization import overlay

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
        from captioner.visualization import animate

        return animate(one.photo, one.captions[0], **look)

    def page(one: _Shown, outlines: Any) -> _Savable:
        del outlines
        from captioner.visualization import page

        title = "" if str(one.name) == "-" else one.name.name
        return page(one.photo, one.captions, title=title, labels=one.labels, **look)

    return figure if suffix in FIGURES else animation if suffix in ANIMATIONS else page


def _gallery(shown: Sequence[_Shown], options: Any) -> _Savable:
    """One page of all photos."""
    from captioner.visualization import Entry, gallery

    look: dict[str, Any] = {"smooth": not options.blocks, "colormap": options.colormap}
    if options.panel_size is not None:
        look["panel_size"] = options.panel_size
    entries: list[Entry] = [
        Entry(one.photo, one.captions, str(one.name), one.labels) for one in shown
    ]
    return gallery(entries, theme=options.theme or "auto", **look)


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
    return outlines
