"""``captioner alt``: suggest alternative texts for the images of a static site, for review."""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from captioner.cli.arguments import checked_search, command
from captioner.cli.formats import as_sentence
from captioner.cli.main import FAILED, OK
from captioner.cli.outputs import refuse_overwrite, require_parent, warn
from captioner.data.html_images import CONTEXTS, HtmlImage, HtmlPage, read_page
from captioner.data.images import open_image
from captioner.data.progress import photo_bar
from captioner.drawing.document import data_uri
from captioner.drawing.review import review_page
from captioner.errors import ConfigError, DataError, counted, first_of
from captioner.files import atomic_write, read_input
from captioner.option_fields import File, Shown
from captioner.options import ModelOptions, SearchOptions


@dataclass(frozen=True, kw_only=True)
class AltOptions(ModelOptions):
    """Suggest alternative texts for the images of a static site that have none.

    Writes a table as CSV and as an HTML page. Only texts that a person marked as reviewed in it are
    written into the pages, by --apply.
    """

    site: Annotated[str, Shown("SITE_FOLDER", positional=True)]
    """Folder of the finished site, with its .html and .htm files."""
    output: Annotated[str, Shown("FILE.csv", ("-o", "--output"))] = "alt.csv"
    """The table; the HTML page is written beside it. Not in the site, with which it would be
    published."""
    apply: File | None = None
    """Write the reviewed rows of this table into the pages."""
    url: Annotated[str, Shown("URL")] | None = None
    """Address of the folder, if pages name their images by it: https://me.example/blog/."""
    force: bool = False
    """Overwrite the table and its page."""


@dataclass
class Row:
    """An image without alternative text in the table."""

    page: str
    line: str
    image: str
    """File in the site, or the URL."""
    note: str
    """The link or button that it is in, and why nothing is suggested."""
    alt: str
    confidence: str
    reviewed: str
    tag: str


@command("alt", "SITE_FOLDER [-o alt.csv | --apply alt.csv] [options]", AltOptions, SearchOptions)
def alt(options: AltOptions, given: dict[str, Any], _: Sequence[str]) -> int:
    """Write the table, or apply it."""
    site = Path(options.site)
    if not site.is_dir():
        raise ConfigError(f"{site} is not a folder; give the folder of the finished site")
    return _apply(site, Path(options.apply)) if options.apply else _suggest(site, options, given)


# --- suggestions ---------------------------------------------------------------------------------


def _suggest(site: Path, options: AltOptions, given: dict[str, Any]) -> int:
    table = Path(options.output)
    review = table.with_suffix(".html")
    _check_table(table, review, site, options)
    search = checked_search(options.model, given)
    if search.num_captions > 1:
        raise ConfigError("an image has one alternative text; give --num-captions 1")
    pages, failed = _pages(site)
    rows, files = [], []
    for name, page in pages:
        for image in page.images:
            shown, file, problem = _find(
                site, options.url or "http://site.invalid/", name, page, image
            )
            note = "; ".join(filter(None, [image.context, problem]))
            rows.append(Row(name, str(image.line), shown, note, "", "", "", image.key))
            files.append(file)
    pictures = {}
    suggested = _captions(list(dict.fromkeys(filter(None, files))), options, search)
    for row, file in zip(rows, files, strict=True):
        if file in suggested:
            row.alt, row.confidence, problem = suggested[file]
            row.note = "; ".join(filter(None, [row.note, problem]))
            if file and row.alt and row.image not in pictures:
                picture = open_image(file)
                picture.thumbnail((320, 320))
                pictures[row.image] = data_uri(picture)
    if not rows:
        print("every image has an alternative text")
        return FAILED if failed else OK
    rows.sort(key=lambda row: (not row.alt, float(row.confidence or 0), row.image))
    without = {row.image: row for row in rows if not row.alt}
    for row in without.values():
        warn(f"{row.page}:{row.line}: {row.image or row.tag}: {row.note}")
    atomic_write(table, _as_csv(rows))
    data = {"rows": [asdict(row) for row in rows], "pictures": pictures, "file": table.name}
    atomic_write(review, review_page(str(site), data))

    others = sum((page.others for _, page in pages), Counter())
    counts = ", ".join(f"{count:,} {what}" for what, count in sorted(others.items()))
    total = counted(len(rows) + others.total(), "image")
    warn(
        f"{counted(len(pages), 'page')}, {total}: {len(rows):,} without alternative text, {counts}"
    )
    if inside := sum(row.note.startswith(CONTEXTS) for row in rows):
        warn(f"{inside} of them in links or buttons, whose text has to name where the link leads")
    again = shlex.join(["captioner", "alt", str(site), "--apply", str(table)])
    print(f"Review {review} or {table}, then write the reviewed texts with: {again}")
    return FAILED if failed or any(row.note and not row.alt for row in rows) else OK


def _check_table(table: Path, review: Path, site: Path, options: AltOptions) -> None:
    if table.suffix.lower() != ".csv":
        raise ConfigError(f"-o {table} is not a .csv file; give one, such as alt.csv")
    if table.resolve().is_relative_to(site.resolve()):
        raise ConfigError(f"{table} would be published with {site}; give -o another folder")
    require_parent(table)
    for path in (table, review):
        refuse_overwrite(path, options.force)


def _pages(site: Path) -> tuple[list[tuple[str, HtmlPage]], int]:
    """The finished pages of a site by name, and the number of those that cannot be read."""
    pages, templates, failed = [], [], 0
    names = {".html", ".htm"}
    for path in sorted(p for p in site.rglob("*") if p.suffix.lower() in names and p.is_file()):
        name = path.relative_to(site).as_posix()
        if any(part.startswith(".") for part in Path(name).parts):
            continue
        try:
            page = read_page(path)
        except DataError as error:
            warn(str(error))
            failed += 1
            continue
        if page.template:
            templates.append(name)
        else:
            pages.append((name, page))
    if templates:
        warn(f"left out {first_of(templates)}: a template; give the folder of the finished site")
    if not pages:
        raise DataError(f"{site} has no finished .html pages; give the folder of the finished site")
    return pages, failed


def _find(
    site: Path, url: str, name: str, page: HtmlPage, image: HtmlImage
) -> tuple[str, Path | None, str]:
    """An image's name, its file if the site has it, and else the reason."""
    root = url.rstrip("/") + "/"
    problems = []
    for source in image.sources:
        try:
            base = urljoin(root + quote(name, errors="surrogateescape"), page.base)
            full = urlsplit(urljoin(base, source.replace("\\", "/")))
        except ValueError:
            problems.append((source, "not a valid address"))
            continue
        address = full._replace(query="", fragment="").geturl()
        inside = unquote(address.removeprefix(root), errors="surrogateescape")
        if source.startswith("data:"):
            problems.append((f"{source[:30]}...", "a picture inside the page"))
        elif not address.startswith(root):
            problems.append((full.geturl(), "on another server, not fetched"))
        elif os.path.isfile(site / inside):  # noqa: PTH113 - False for a name that is too long
            return inside, site / inside, ""
        else:
            problems.append((inside, "the file does not exist"))
    shown, problem = problems[0] if problems else ("", "no picture is named")
    return shown, None, problem


def _captions(
    files: list[Path], options: AltOptions, search: SearchOptions
) -> dict[Path | None, tuple[str, str, str]]:
    """Text, confidence and problem of each file."""
    if not files:
        return {}
    from captioner.inference.captioner import load

    model = load(*options.model, device=options.device, precision=options.precision)
    results = photo_bar(
        model.stream(files, batch_size=options.batch_size, **vars(search)), total=len(files)
    )
    found: dict[Path | None, tuple[str, str, str]] = {}
    for file, result in zip(files, results, strict=True):
        if result.error is None:
            best = result.captions[0]
            sure = "" if best.confidence is None else f"{best.confidence:.4f}"
            found[file] = as_sentence(best.text), sure, ""
        else:
            found[file] = "", "", str(result.error).removeprefix(f"{file}: ")
    return found


# --- the table -----------------------------------------------------------------------------------


def _as_csv(rows: Sequence[Row]) -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, [column.name for column in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, rows))
    # The mark tells spreadsheets that it is UTF-8; names of files may be no text.
    return f"\ufeff{file.getvalue()}".encode(errors="backslashreplace").decode()


def _read_table(table: Path) -> dict[str, list[Row]]:
    """The rows of a table by page; pages without a reviewed row are left out."""
    try:
        text = read_input(table, "the reviewed table").decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{table}: not UTF-8; save it as CSV UTF-8") from None
    separator = max(",;\t", key=text.partition("\n")[0].count)
    found: dict[str, list[Row]] = {}
    marks = {"": "", "no": "", "x": "yes", "y": "yes", "yes": "yes"}
    for number, line in enumerate(csv.DictReader(io.StringIO(text, ""), delimiter=separator), 2):
        row = Row(**{column.name: line.get(column.name) or "" for column in fields(Row)})
        if not (row.page and row.tag and row.line.isdecimal()):
            raise DataError(f"{table}: row {number} has no page, line or tag; keep these columns")
        if (mark := row.reviewed.strip().lower()) not in marks:
            raise DataError(f"{table}: row {number}: reviewed is {mark!r}; give yes or nothing")
        row.reviewed, row.alt = marks[mark], " ".join(row.alt.split())
        found.setdefault(row.page, []).append(row)
    return {name: rows for name, rows in found.items() if any(row.reviewed for row in rows)}


def _apply(site: Path, table: Path) -> int:
    """Write reviewed texts into the tags that are still as they were; report the others."""
    counts: Counter[str] = Counter()
    found = _read_table(table)
    if not found:
        raise DataError(f"{table}: no row is reviewed; put yes in the column reviewed of each")
    for name, rows in found.items():
        try:
            page = read_page(site / name)
        except DataError as error:
            warn(str(error))
            counts["failed"] += 1
            continue
        if texts := list(_texts(rows, page, counts)):
            atomic_write(site / name, page.with_texts(texts))
            counts["written"] += len(texts)
    kept = f", {counts['there']:,} already there" if counts["there"] else ""
    warn(f"{table}: {counted(counts['written'], 'alternative text')} written{kept}")
    return FAILED if counts["failed"] else OK


def _texts(
    rows: list[Row], page: HtmlPage, counts: Counter[str]
) -> Iterator[tuple[HtmlImage, str]]:
    """The images of a page and their reviewed texts.

    A row is for an image with the same tag, in the same link or button. If the page has as many of
    them as the table, their order counts, since lines may have moved, and else the line.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: int(row.line)):
        tag = page.tag_with(row.tag, row.alt)
        if row.reviewed and page.described[tag]:
            page.described[tag] -= 1
            counts["there"] += 1
        else:
            groups.setdefault((row.tag, row.note), []).append(row)
    for (tag, note), group in groups.items():
        context = note if note.startswith(CONTEXTS) else ""
        images = [] if page.template else [image for image in page.images if image.key == tag]
        same = [image for image in images if f"{context}; ".startswith(f"{image.context}; ")]
        by_line = {str(image.line): image for image in same}
        for number, row in enumerate(group):
            image = same[number] if len(same) == len(group) else by_line.pop(row.line, None)
            if row.reviewed and image and (row.alt or not image.needs_text):
                yield image, row.alt
            elif row.reviewed:
                where = f"{row.page}:{row.line}: {tag[:80]}"
                lost = "is not there any more; run captioner alt again"
                warn(f"{where} {'needs an alternative text' if image else lost}")
                counts["failed"] += 1
