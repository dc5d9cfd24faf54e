"""``captioner attend``: show where the model looked, as a figure, animation, page or archive."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval

from captioner.caption_types import END_NAME, Caption, as_written
from captioner.cli.arguments import command
from captioner.cli.console import hint, warn
from captioner.cli.main import NOT_DONE, OK, SOME_FAILED
from captioner.cli.output_files import refuse_overwrite, require_parent
from captioner.cli.photos import STDIN, PhotoOptions, Photos, find_photos
from captioner.cli.search_options import checked_search
from captioner.data.folders import PICTURE_MARK
from captioner.data.images import MAX_STREAM_BYTES, open_image
from captioner.data.reading import photo_bar
from captioner.data.write_captions import read_captions
from captioner.drawing.animation import Animation, animate
from captioner.drawing.archive import MapArchive
from captioner.drawing.drawing import Drawing
from captioner.drawing.figure import Figure, overlay
from captioner.drawing.options import AnimationOptions, FigureOptions, PageOptions
from captioner.drawing.pages import Entry, Page, gallery
from captioner.drawing.style import lacks_letters
from captioner.errors import ConfigError, ImageError
from captioner.messages import either, first_of, printable
from captioner.options import METHOD_TITLES, ExplanationMethod, ModelOptions, SearchOptions
from captioner.schema import File, ModelName, Shown, flag, flags_given, option_fields, refuse, taken

if TYPE_CHECKING:
    from captioner.evaluation.grounding import Instances
    from captioner.inference.captioner import Captioner, Result

_KINDS: dict[type[Drawing], type | None] = {
    Figure: FigureOptions,
    Animation: AnimationOptions,
    Page: PageOptions,
    MapArchive: None,
}
"""The kinds of drawing, each with its class of options."""


@dataclass(frozen=True)
class OnlyFor:
    """A mark on an option that only some kinds of drawing support, such as figures."""

    kinds: tuple[type[Drawing], ...]


@dataclass(frozen=True, kw_only=True)
class ShownCaptions:
    """Captions."""

    words: list[str] = field(default_factory=list)
    """Show the attention for a caption of your own instead of the model's caption. Repeat the
    option to show several captions."""
    captions: File | None = None
    """Show the captions in this CSV or JSON Lines file, such as a corrected captions.csv. Photos
    that are not in the file show the model's caption. The columns are image and caption."""
    compare: Annotated[list[ModelName], OnlyFor((Figure, Page))] = field(default_factory=list)
    """Also show the caption by this model, below the caption by --model. Repeat the option to
    compare several models."""
    method: list[ExplanationMethod] = field(default_factory=list)
    """Choose how the maps are computed (default: attention). attention_gate: attention times the
    gate, the weight of the photo for the word (0 to 1). occlusion: the drop in the word's
    log-probability when a region is hidden. gradient_input, grad_cam: estimates of this drop from
    gradients. Repeat the option to show several methods below each other."""
    alternatives: Annotated[int, Interval(ge=0, le=50), OnlyFor((Figure, Page))] | None = None
    """Show this many of the most probable words at each position (default: 5 in pages, 0 in
    figures)."""


@dataclass(frozen=True, kw_only=True)
class AttendOptions(ModelOptions, ShownCaptions, PhotoOptions):
    """Show where the model looked for each word.

    The extension of the output selects the format. A figure is .png, .jpg, .svg or .pdf. An
    animation is .gif or .webp, an interactive page is .html, and an archive of arrays is .npz.
    The command also prints the captions. With --words, it prints their log-probabilities (nats)
    too.
    """

    output: Annotated[str, Shown("OUT", ("-o", "--output"))] | None = None
    """Write to this file, or to a folder with one file per photo (default: NAME_attention.png next
    to each photo). One file for several photos must be a page (.html) or an archive (.npz). Use -
    for standard output in the format of --format."""
    format: str | None = None
    """Choose the format when each photo gets its own file, or with -o -: png (default), svg, gif,
    html, ... If -o is a file, its extension selects the format."""
    force: bool = False
    """Overwrite existing files."""
    skip_existing: bool = False
    """Skip photos that already have an output file, for example after an interrupted run."""
    instances: Annotated[File | None, OnlyFor((Figure,))] = None
    """In figures, outline the objects that the words name. The outlines come from the masks in this
    COCO instances file, in which photos are found by their file names."""
    blocks: Annotated[bool, OnlyFor((Figure, Animation, Page))] = False
    """Draw each grid cell of a map as a block, without smoothing."""

    @property
    def methods(self) -> list[ExplanationMethod]:
        """The explanation methods with which each caption is drawn, without duplicates."""
        return list(dict.fromkeys(self.method or ["attention"]))


@command(
    "attend",
    "PHOTO|FOLDER|-... [-o OUT.png|OUT.gif|OUT.html|OUT.npz|FOLDER] [options]",
    AttendOptions, FigureOptions, AnimationOptions, PageOptions, SearchOptions,
)  # fmt: skip
def attend(options: AttendOptions, drawing: dict[str, Any]) -> int:
    """Draw all photos, and report failed photos."""
    search = taken(drawing, SearchOptions)
    if options.words and (refused := search.keys() - {"style"}):
        raise ConfigError(
            "--words sets the caption, so search options have no effect; leave out "
            f"{flag(min(refused))}"
        )
    if options.words:
        refuse(options, ("captions",), "and --words both set the caption; use only one of them")
    found = checked_search(options.model, search)
    photos = find_photos(options.photos, options.from_file, recursive=options.recursive)
    if not photos.paths:
        photos.report_skipped()
        return NOT_DONE
    jobs, failures = _targets(photos, options), photos.failures
    suffix = jobs[photos.paths[0]].suffix.lower()  # the same for all
    kind = _kind(suffix)
    _check(kind, suffix, options, drawing, found)
    jobs = _checked_outputs(jobs, options)
    if options.alternatives is None:
        options = replace(options, alternatives=5 if kind is Page else 0)
    if jobs:
        failures += _draw(jobs, kind, options, search, drawing | {"smooth": not options.blocks})
    photos.report_skipped()
    return SOME_FAILED if failures else OK


# --- checks --------------------------------------------------------------------------------------


def _targets(photos: Photos, options: AttendOptions) -> dict[Path, Path]:
    """Return the output file of each photo. All photos share one page or archive."""
    output, file = None if options.output is None else Path(options.output), None
    suffix = f".{options.format or 'png'}".lower()
    if output == STDIN:
        file = Path(f"{STDIN}{suffix}")  # not written, see _draw
    elif output is not None and output.suffix and not output.is_dir():
        refuse(
            options,
            ("format",),
            f"is for output folders, but {output} is a file; leave out --format",
        )
        file, suffix = output, output.suffix.lower()
    kind = _kind(suffix)
    if file:
        if len(photos.paths) > 1 and kind not in (Page, MapArchive):
            raise ConfigError(
                f"one {suffix} file cannot show {len(photos.paths)} photos; set -o to a "
                "folder (no extension), a page (.html) or an archive (.npz)"
            )
        return dict.fromkeys(photos.paths, file)
    stems = {photo: "stdin" if photo == STDIN else photo.stem for photo in photos.paths}
    same = Counter((photo.parent, stem) for photo, stem in stems.items())
    names: dict[Path, Path] = {}  # photos by the files of their pictures
    for photo, stem in stems.items():
        folder = photo.parent if output is None else output / photos.subfolders.get(photo, "")
        # Both a.jpg and a.png keep their extension in the output name, whichever comes first.
        own = stem if same[photo.parent, stem] == 1 else photo.name
        own = os.fsencode(own)[:220].decode(errors="ignore")  # of 255 bytes
        tries = chain([own], (f"{own}_{number}" for number in count(2)))  # the same in two folders
        named = (folder / f"{one}{PICTURE_MARK}{suffix}" for one in tries)
        names[next(path for path in named if path not in names)] = photo
    return {photo: path for path, photo in names.items()}


def _kind(suffix: str) -> type[Drawing]:
    """Return the kind of drawing with this file extension."""
    for kind in _KINDS:
        if suffix in kind.suffixes:
            return kind
    allowed = either(f"{kind.kind} ({', '.join(kind.suffixes)})" for kind in _KINDS)
    raise ConfigError(f"{suffix} is not a supported output format; use {allowed}")


def _check(
    kind: type[Drawing],
    suffix: str,
    options: AttendOptions,
    drawing: Mapping[str, Any],
    search: SearchOptions,
) -> None:
    """Check that the output format supports the options and captions.

    Raises:
        ConfigError: An option or a caption is not supported.
    """
    schema = _KINDS[kind]
    own = option_fields(schema) if schema else {}
    unsupported = [
        name
        for name, option in option_fields(AttendOptions).items()
        if any(isinstance(mark, OnlyFor) and kind not in mark.kinds for mark in option.marks)
    ]
    wrong = flags_given(options, *unsupported)
    wrong += [flag(name) for name in drawing if name not in own]
    wrong += ["--keywords"] if search.keywords and kind not in (Figure, Page) else []
    if wrong:
        listed = ", ".join(wrong)
        raise ConfigError(
            f"{kind.kind} ({', '.join(kind.suffixes)}) does not support {listed}; leave out "
            f"{listed}, or set -o to a file with another extension"
        )
    if "dpi" in drawing and suffix not in (".svg", ".pdf"):
        raise ConfigError(
            f"--dpi has no effect on {suffix} files; write .svg or .pdf, or set the number of "
            "pixels with --panel-size"
        )
    if "combine" in drawing and not drawing.get("only"):
        raise ConfigError(
            "--combine has an effect only with --only; add --only with the words to combine, or "
            "leave out --combine"
        )
    if drawing.get("only") and drawing.get("content_words"):
        raise ConfigError("--only and --content-words both choose the words; use only one of them")
    several = len(options.methods) > 1 or bool(options.compare)
    captions = len(options.words) or search.num_captions
    if kind is Animation and several:
        raise ConfigError(
            "an animation shows a single model and method; leave out --compare, and set --method "
            "only once"
        )
    if captions > 1 and (several or kind is Animation):
        raise ConfigError(
            "with --compare, several --method or an animation, a photo can have only one caption, "
            f"not {captions}; set --num-captions to 1, or --words only once"
        )


def _checked_outputs(jobs: dict[Path, Path], options: AttendOptions) -> dict[Path, Path]:
    """Check that the files can be written, and return the jobs without the photos to skip.

    ``jobs`` maps each photo to its output file. With ``--skip-existing``, photos with an existing
    file are skipped.
    """
    if options.output == str(STDIN):
        return jobs
    given = {*map(os.path.realpath, jobs)}  # Path.resolve raises an error for links in a circle
    for path in jobs.values():
        if os.path.realpath(path) in given:
            raise ConfigError(
                f"the output {path} would overwrite the input photo; set -o to another name"
            )
    if options.output is not None:
        require_parent(Path(options.output))
    if options.skip_existing:
        refuse(
            options, ("force",), "and --skip-existing contradict each other; use only one of them"
        )
        new = {photo: path for photo, path in jobs.items() if not path.is_file()}
        if skipped := len(jobs) - len(new):
            warn(
                f"{skipped} of {len(jobs)} photos were skipped, because they already have an "
                "output file"
            )
        jobs = new
    for path in set(jobs.values()):
        refuse_overwrite(path, options.force)
    return jobs


# --- captions ------------------------------------------------------------------------------------


def _captioned(
    photos: Sequence[Path], options: AttendOptions, search: dict[str, Any]
) -> Iterator[Entry | ImageError]:
    """Yield each photo with its captions, or the error of a photo that cannot be read.

    A caption is drawn once for each compared model and for each explanation method.
    """
    from captioner.inference.captioner import load

    folders = [options.model, *([folder] for folder in options.compare)]
    models = [load(*one, device=options.device, precision=options.precision) for one in folders]
    texts = read_captions(options.captions, photos, warn) if options.captions else {}
    # Standard input cannot be read twice.
    sources = [p if p != STDIN else sys.stdin.buffer.read(MAX_STREAM_BYTES + 1) for p in photos]
    results, labels = [], []
    for (model, name), method in product(
        zip(models, _names(options), strict=True), options.methods
    ):
        title = METHOD_TITLES[method] if options.methods != ["attention"] else ""
        labels.append(": ".join(filter(None, [name, title])))
        how: Any = {"method": method, "alternatives": options.alternatives or 0}
        batches: Any = {"batch_size": options.batch_size, "words": options.words}
        found = zip(photos, model.stream(sources, **batches, **how, **search), strict=True)
        results.append(_with_texts(model, found, texts, style=search.get("style"), **how))
    names = Counter(photo.name for photo in photos)
    for photo, source, *each in zip(photos, sources, *results, strict=True):
        if isinstance(each[0], ImageError):
            yield ImageError(str(each[0]).replace("the given bytes", "<stdin>", 1))
            continue
        pairs = [(one, label) for some, label in zip(each, labels, strict=True) for one in some]
        captions, of = map(list, zip(*pairs, strict=True))
        # Show the folder only if two photos have the same name, because pages may be published.
        title = photo.name if names[photo.name] == 1 else "/".join(photo.absolute().parts[-2:])
        text = texts.get(photo, "")
        yield Entry(
            source,
            captions,
            title="" if photo == STDIN else title,
            labels=of if any(of) else [],
            text="" if text == captions[0].text else text,
        )


def _with_texts(
    model: Captioner,
    results: Iterable[tuple[Path, Result]],
    texts: Mapping[Path, str],
    **how: Any,
) -> Iterator[Sequence[Caption] | ImageError]:
    """Yield the captions or the error of each photo, and replace captions by the given texts.

    A caption with the same words as the text is kept, because it has a confidence.

    Args:
        model: The model that generated the captions.
        results: The photos with the results of the model.
        texts: The text of each photo that has one.
        how: Options of ``explain_batch``.
    """
    vocabulary, unknown = model.stored.vocabulary, set[str]()
    for photo, result in results:
        words = vocabulary.tokenize(texts.get(photo, ""))
        if result.error or not words or words == vocabulary.tokenize(result.captions[0].text):
            yield result.error or result.captions
            continue
        unknown.update(word for word in words if word not in vocabulary)
        yield model.explain_batch([model.prepare(open_image(result.photo))], [words], **how)
    if unknown:
        warn(
            f"the model does not know {first_of(sorted(unknown))}, so each of these words is shown "
            "with the attention for an unknown word"
        )


def _names(options: AttendOptions) -> list[str]:
    """Return the names of the compared models, or one empty name without a comparison."""
    return (
        [" + ".join(options.model) or "shipped model", *options.compare]
        if options.compare
        else [""]
    )


# --- drawing -------------------------------------------------------------------------------------


def _draw(
    jobs: dict[Path, Path],
    kind: type[Drawing],
    options: AttendOptions,
    search: dict[str, Any],
    drawing: dict[str, Any],
) -> int:
    """Draw one file per photo, or one file for all, and return the number of failed photos.

    Args:
        jobs: The output file of each photo. Photos with the same file are drawn together.
        kind: Kind of the drawing: figure, animation, page or archive.
        options: The options of the command.
        search: Search options that the user has set, by name.
        drawing: Options of the drawing that the user has set, by name.
    """
    instances = None
    if options.instances is not None:
        from captioner.evaluation.grounding import read_instances

        instances = read_instances(options.instances)
    groups: dict[Path, list[Path]] = {}
    for photo, path in jobs.items():
        groups.setdefault(path, []).append(photo)
    bar = photo_bar(_captioned([*jobs], options, search), shown=len(jobs) > 1, total=len(jobs))
    captioned, failures, saved, boxes = iter(bar), 0, 0, False

    def finished() -> str:
        bar.close()
        # With --force, older outputs exist for the other photos too.
        again = saved and not options.force
        return f"{saved} of {len(jobs)} photos are finished" if again else ""

    with hint(finished, "with --skip-existing"):
        for path, photos in groups.items():
            group: dict[Path, Entry] = {}
            for photo, one in zip(photos, captioned, strict=False):
                if isinstance(one, ImageError):
                    failures += 1
                    warn(str(one))
                else:
                    group[photo] = one
            if not group:
                continue
            try:
                _save(_picture(group, kind, options, drawing, instances), path, group, options)
            except ConfigError as error:  # e.g. --only with a word that this caption lacks
                if len(groups) == 1:
                    raise
                failures += 1
                warn(f"{photos[0]}: {error}")
                continue
            saved += len(group)
            boxes |= any(lacks_letters(c.text) for one in group.values() for c in one.captions)
        next(captioned, None)  # ends the bar
    if boxes and kind in (Figure, Animation) and path.suffix.lower() != ".svg":
        warn(
            "the font of pictures lacks some letters of the captions; set -o to an .svg or .html "
            "file"
        )
    return failures


def _picture(
    group: Mapping[Path, Entry],
    kind: type[Drawing],
    options: AttendOptions,
    drawing: dict[str, Any],
    instances: Instances | None,
) -> Drawing:
    """Return the drawing to write into one output file.

    Args:
        group: The photos in the file with their captions, by path. Only pages and archives can
            contain several photos.
        kind: Kind of the drawing: figure, animation, page or archive.
        options: The options of the command.
        drawing: Options of the drawing that the user has set, by name.
        instances: The object masks whose outlines a figure shows, or None without outlines.
    """
    [(photo, one), *others] = group.items()
    if kind is MapArchive:
        archive = MapArchive()
        for name, each in group.items():
            read = open_image(each.photo).size if name == STDIN else None
            archive.add(name, each.captions, read)
        return archive
    captions = [as_written(caption, one.text) for caption in one.captions]
    if kind is Animation:
        return animate(one.photo, captions[0], **drawing)
    if kind is Page:
        size = {} if others else {"panel_size": PageOptions.panel_size}
        return gallery(group.values(), **size | drawing)
    return overlay(
        one.photo,
        captions,
        labels=one.labels,
        outlines=() if instances is None else _outlines(photo, one.captions, instances),
        alternatives=options.alternatives or 0,
        **drawing,
    )


def _save(made: Drawing, path: Path, group: Mapping[Path, Entry], options: AttendOptions) -> None:
    """Write a drawing to its file, and print each of its captions.

    A caption that several explanation methods explain is printed once. If the output is standard
    output, only the drawing is written.
    """
    if options.output == str(STDIN):
        sys.stdout.buffer.write(made.encode(path.suffix))
        return
    made.save(path)
    for photo, entry in group.items():
        names = cycle(f" ({name})" if name else "" for name in _names(options))
        for caption, name in zip(entry.captions[:: len(options.methods)], names, strict=False):
            print(printable(f"{photo}: {entry.text or caption.text}{name}"), flush=True)
            if options.words:
                end = caption.log_prob - float(caption.log_probs.sum())
                each = [*zip(caption.words, caption.log_probs, strict=True), (END_NAME, end)]
                parts = ", ".join(f"{word} {log_prob:.2f}" for word, log_prob in each)
                print(f"  log-probability {caption.log_prob:.2f} ({parts})", flush=True)
    print(f"  saved as {printable(str(path))}", flush=True)


def _outlines(photo: Path, captions: Sequence[Caption], instances: Instances) -> Any:
    """Return, for each caption, the masks of the objects that it names, by word position.

    The result is the argument ``outlines`` of `captioner.overlay`. It is empty if the instances
    file does not list the photo.
    """
    from captioner.evaluation.objects import find_names

    ids = [i for i, one in instances.images.items() if Path(one["file_name"]).name == photo.name]
    if not ids:
        warn(
            f"{photo} is not listed in {instances.path}, so no outlines are drawn; set --instances "
            "to the COCO instances file that lists this photo"
        )
        return ()
    outlines: list[dict[int, list[Any]]] = [{} for _ in captions]
    for caption, by_word in zip(captions, outlines, strict=True):
        for name in find_names(caption.words):
            labels = instances.labels(ids[0], name.category)
            if labels is not None:
                for position in range(name.start, name.stop):
                    by_word.setdefault(position, []).append(labels == 1)
    if not any(outlines):
        warn(
            f"{photo}: no outlines are drawn, because {instances.path} has no masks for the "
            "objects in the caption"
        )
    return outlines
