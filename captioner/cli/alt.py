"""``captioner alt``: suggest alternative texts for the images of a static site, for review."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from captioner.cli.arguments import command
from captioner.cli.console import warn
from captioner.cli.main import OK, SOME_FAILED
from captioner.cli.output_files import new_file
from captioner.cli.search_options import checked_search
from captioner.errors import ConfigError
from captioner.messages import counted
from captioner.options import ModelOptions, SearchOptions
from captioner.schema import File, Shown, refuse

if TYPE_CHECKING:
    from captioner.inference.alt_texts import AltTexts


@dataclass(frozen=True, kw_only=True)
class AltOptions(ModelOptions):
    """Suggest alternative texts for the images of a static site that lack one.

    The command writes a table and a page for review. Correct the texts and mark them as reviewed.
    Then run the command with --apply to write the reviewed texts into the site's pages.
    """

    site: Annotated[str, Shown("SITE_FOLDER", positional=True)]
    """Process the .html and .htm files of the finished site in this folder."""
    output: Annotated[str, Shown("FILE.csv", ("-o", "--output"))] = "alt.csv"
    """Write the review table to this file, and the review page next to it. The file must be outside
    the site folder, because the site is published."""
    apply: File | None = None
    """Write the reviewed texts from this table into the site's pages."""
    empty: bool = False
    """Also suggest texts for images with alt="". Generators write alt="" for Markdown images
    without text. By default, such an image is listed only if it is the only content of a link or
    button."""
    url: Annotated[str, Shown("URL")] | None = None
    """Set the web address of the site folder, such as https://me.example/blog/, if pages refer to
    images by full URLs."""
    resume: bool = False
    """Continue an existing review table: keep the texts in it, and add only new images."""
    force: bool = False
    """Replace an existing review table and review page. The reviewed texts in them are lost."""


@command("alt", "SITE_FOLDER [-o alt.csv | --apply alt.csv] [options]", AltOptions, SearchOptions)
def alt(options: AltOptions, given: dict[str, Any]) -> int:
    """Write the review table, or apply a reviewed table."""
    if options.apply:
        refuse(options, ("resume",), "updates a table, and --apply updates pages; use one of them")
        return _apply(options.site, Path(options.apply))
    from captioner.inference.alt_texts import find_alt, review_of, site_folder

    table, site = Path(options.output), site_folder(options.site)
    for path in (table, review_of(table, site)):
        new_file(path, True)
        if path.exists() and not (options.resume or options.force):
            raise ConfigError(
                f"{path} exists; add --resume to keep its texts and to add new images, or --force "
                "to delete its texts and start over"
            )
    search = checked_search(options.model, given)
    old = table if options.resume else None
    found = find_alt(site, url=options.url, empty=options.empty, resume=old)
    unread = len(found.problems)
    for problem in found.problems:
        warn(problem)
    if found.files():
        from captioner.inference.captioner import load

        model = load(*options.model, device=options.device, precision=options.precision)
        found.suggest(model, batch_size=options.batch_size, **vars(search))
    for problem in found.problems[unread:]:
        warn(problem)
    _summarize(found, options.empty)
    if found.images:
        review = found.save(table, force=options.force)
        again = shlex.join(["captioner", "alt", options.site, "--apply", str(table)])
        print(f"Review {review} or {table}, then write the reviewed texts with: {again}")
    return SOME_FAILED if found.problems else OK


def _summarize(found: AltTexts, empty: bool) -> None:
    """Report the number of images by category, and why images have no suggested text.

    ``empty`` is True if images with an empty text are listed too (``--empty``).
    """
    from captioner.data.html_images import EMPTY

    notes = {
        one.image or one.tag: f"{one.page}:{one.line}: {one.image or one.tag}: {one.note}"
        for one in reversed(found.new)
        if one.note
    }
    for note in reversed(notes.values()):
        if note not in found.problems:
            warn(note)
    counts = ", ".join(f"{count:,} {what}" for what, count in sorted(found.counts.items()))
    warn(f"{counted(found.counts.total(), 'image')}: {counts}")
    if alone := sum(one.needs_text for one in found.new):
        images = "image is" if alone == 1 else "images are"
        warn(
            f"{alone:,} listed {images} the only content of a link or button, so no text is filled "
            "in; write a text that says where the link leads"
        )
    if (count := found.counts[EMPTY]) and not empty:
        verb = "image has" if count == 1 else "images have"
        warn(
            f'{count:,} {verb} alt="", because the image is decorative or a generator found no '
            "text for it; to list all images with an empty text, add --empty"
        )
    if found.kept:
        _summarize_rows(found)
    elif not found.images:
        print("no image is missing its alternative text")


def _summarize_rows(found: AltTexts) -> None:
    """Report what happened to the rows of a continued review table."""
    from captioner.data.site_texts import OUTDATED

    for one in found.unsure:
        warn(
            f"{one.page}:{one.line}: {one.image or one.tag}: the page has changed around this "
            "image, so its text is kept but has to be reviewed again"
        )
    rows, added = counted(found.kept, "row"), counted(len(found.new), "image")
    warn(f"{found.table}: {rows} kept, {added} added")
    if outdated := sum(one.note == OUTDATED for one in found.images):
        warn(
            f"{counted(outdated, 'row')} kept although {OUTDATED}; --apply skips such rows, and "
            "you can delete them"
        )


def _apply(site: str, table: Path) -> int:
    """Write reviewed texts into the pages, and report problems."""
    from captioner.inference.alt_texts import apply_alt

    done = apply_alt(site, table)
    for problem in done.problems:
        warn(problem)
    kept = f", {done.kept:,} already in the pages" if done.kept else ""
    warn(f"{table}: {counted(done.written, 'alternative text')} written{kept}")
    return SOME_FAILED if done.problems else OK
