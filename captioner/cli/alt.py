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
from captioner.schema import File, Shown

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
    force: bool = False
    """Overwrite an existing review table and review page."""


@command("alt", "SITE_FOLDER [-o alt.csv | --apply alt.csv] [options]", AltOptions, SearchOptions)
def alt(options: AltOptions, given: dict[str, Any]) -> int:
    """Write the review table, or apply a reviewed table."""
    if options.apply:
        return _apply(options.site, Path(options.apply))
    from captioner.inference.alt_texts import find_alt, review_of

    if not Path(options.site).is_dir():
        raise ConfigError(
            f"{options.site} is not a folder; pass the folder with the HTML pages of the built site"
        )
    table = Path(options.output)
    for path in (table, review_of(table, Path(options.site))):
        new_file(path, options.force)
    search = checked_search(options.model, given)
    found = find_alt(options.site, url=options.url, empty=options.empty)
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
        for one in reversed(found.images)
        if one.note
    }
    for note in reversed(notes.values()):
        if note not in found.problems:
            warn(note)
    counts = ", ".join(f"{count:,} {what}" for what, count in sorted(found.counts.items()))
    warn(f"{counted(found.counts.total(), 'image')}: {counts}")
    if alone := sum(one.needs_text for one in found.images):
        images = "image is" if alone == 1 else "images are"
        warn(
            f"{alone:,} listed {images} the only content of a link or button, so no text is filled "
            "in; write where the link leads"
        )
    if (count := found.counts[EMPTY]) and not empty:
        verb = "image has" if count == 1 else "images have"
        warn(
            f'{count:,} {verb} alt="", because the image is decorative or a generator found no '
            "text for it; to list all images with an empty text, add --empty"
        )
    if not found.images:
        print("no image is missing its alternative text")


def _apply(site: str, table: Path) -> int:
    """Write reviewed texts into the pages, and report problems."""
    from captioner.inference.alt_texts import apply_alt

    done = apply_alt(site, table)
    for problem in done.problems:
        warn(problem)
    kept = f", {done.kept:,} already in the pages" if done.kept else ""
    warn(f"{table}: {counted(done.written, 'alternative text')} written{kept}")
    return SOME_FAILED if done.problems else OK
