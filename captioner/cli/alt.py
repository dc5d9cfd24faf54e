"""``captioner alt``: suggest alternative texts for the images of a static site, for review."""

from __future__ import annotations

import errno
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, unquote, urljoin

from captioner.cli.arguments import command
from captioner.cli.console import warn
from captioner.cli.main import FAILED, OK
from captioner.cli.output_files import new_file
from captioner.cli.rows import as_sentence
from captioner.cli.search_options import checked_search
from captioner.data.cells import SafeWriter
from captioner.data.folders import NamedFiles, unsafe_name
from captioner.data.html_images import HtmlImage, HtmlPage
from captioner.data.importers import read_table
from captioner.data.reading import photo_bar
from captioner.drawing.pages import review_page
from captioner.errors import ConfigError, DataError
from captioner.files import atomic_open, atomic_write
from captioner.messages import counted
from captioner.options import ModelOptions, SearchOptions
from captioner.schema import File, Shown


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


PAGES = (".html", ".htm")
Row = dict[str, str]
COLUMNS = (
    "page", "line", "image", "link", "note", "alt", "confidence", "reviewed", "tag", "suggested",
)  # fmt: skip
"""``image``: the file in the site, or the URL; ``note``: why nothing is suggested; ``suggested``:
the text that ``alt`` had at first, by which a correction is known."""


@command("alt", "SITE_FOLDER [-o alt.csv | --apply alt.csv] [options]", AltOptions, SearchOptions)
def alt(options: AltOptions, given: dict[str, Any]) -> int:
    """Write the table, or apply it."""
    site = Path(options.site)
    if not site.is_dir():
        raise ConfigError(f"{site} is not a folder; give the folder of the finished site")
    return _apply(site, Path(options.apply)) if options.apply else _suggest(site, options, given)


def _suggest(site: Path, options: AltOptions, given: dict[str, Any]) -> int:
    table = Path(options.output)
    review = table.with_suffix(".html")
    if table.suffix.lower() != ".csv" or table.resolve().is_relative_to(site.resolve()):
        raise ConfigError(f"-o {table}; give a .csv file outside of {site}, which is published")
    for path in (table, review):
        new_file(path, options.force)
    search = checked_search(options.model, given)
    if search.num_captions > 1:
        raise ConfigError("an image has one alternative text; give --num-captions 1")
    rows, summary, failed = _read_site(site, options.url or "http://site.invalid/")
    if not rows:
        print("every image has an alternative text")
        return FAILED if failed else OK
    _add_texts(site, rows, options, search)
    rows.sort(key=lambda row: (not row["alt"], float(row["confidence"] or 0), row["image"]))
    for row in {row["image"] or row["tag"]: row for row in rows if row["note"]}.values():
        warn(f"{row['page']}:{row['line']}: {row['image'] or row['tag']}: {row['note']}")
    with atomic_open(table) as file:
        file.write("\ufeff")  # spreadsheets need it to read UTF-8
        writer = SafeWriter(file, COLUMNS)
        for row in rows:
            writer.write_row(row)
    atomic_write(review, review_page(site, table.name, rows).encode(errors="replace"))
    inside = sum(bool(row["link"]) for row in rows)
    warn(f"{summary}; {inside} in links or buttons, whose text has to name where the link leads")
    again = shlex.join(["captioner", "alt", str(site), "--apply", str(table)])
    print(f"Review {review} or {table}, then write the reviewed texts with: {again}")
    return FAILED if failed or any(row["note"] for row in rows) else OK


def _read_site(site: Path, url: str) -> tuple[list[Row], str, int]:
    """The rows of a site, what its images have in words, and the number of unreadable pages."""
    rows, reasons, failed, files = [], Counter[str](), 0, NamedFiles(site)
    for path in sorted(site.rglob("*.[hH][tT][mM]*")):
        name = path.relative_to(site).as_posix()
        if path.suffix.lower() not in PAGES or "/." in f"/{name}" or path.is_dir():
            continue
        try:
            page = HtmlPage(path)
        except DataError as error:
            warn(str(error))
            failed += 1
            continue
        for image in page.images:
            reasons[image.reason or "without alternative text"] += 1
            if not image.reason:
                file, note = _find(files, url.rstrip("/") + "/", name, page, image)
                values = name, str(image.line), file, image.link, note, "", "", "", image.key, ""
                rows.append(dict(zip(COLUMNS, values, strict=True)))
    if not reasons:
        raise DataError(f"{site}: no images in its .html pages; give the folder of a finished site")
    counts = ", ".join(f"{count:,} {reason}" for reason, count in sorted(reasons.items()))
    return rows, f"{counted(reasons.total(), 'image')}: {counts}", failed


def _find(
    files: NamedFiles, root: str, name: str, page: HtmlPage, image: HtmlImage
) -> tuple[str, str]:
    """The file in the site, or else the URL and the reason."""
    problems = []
    for source in image.sources:
        try:
            base = urljoin(root + quote(name, errors="surrogateescape"), page.base)
            full = urljoin(base, source.replace("\\", "/"))
        except ValueError:  # such as http://[x
            full = source
        address = re.split("[?#]", full)[0]
        inside = unquote(address.removeprefix(root), errors="surrogateescape")
        if source.startswith("data:"):
            problems.append(("", "a picture inside the page"))
        elif not address.startswith(root):
            problems.append((full, "on another server, not fetched"))
        elif problem := unsafe_name(inside):
            problems.append((inside, f"the name {problem}"))
        elif (found := files.find(inside)) and found.is_file():
            return found.relative_to(files.folder).as_posix(), ""
        else:
            problems.append((inside, "the file does not exist"))
    return problems[0] if problems else ("", "no picture is named")


def _add_texts(site: Path, rows: Sequence[Row], options: AltOptions, search: SearchOptions) -> None:
    """Add texts with their confidence, or what prevents them, to the rows of files."""
    files = list(dict.fromkeys(site / row["image"] for row in rows if not row["note"]))
    if not files:
        return
    from captioner.inference.captioner import load

    model = load(*options.model, device=options.device, precision=options.precision)
    results = model.stream(files, batch_size=options.batch_size, **vars(search))
    found = dict(zip(files, photo_bar(results, total=len(files)), strict=True))
    for row in rows:
        file = site / row["image"]
        if row["note"] or not (result := found[file]).captions:
            row["note"] = row["note"] or str(result.error).removeprefix(f"{file}: ")
        else:
            best = result.captions[0]
            sure = "" if best.confidence is None else f"{best.confidence:.4f}"
            text = as_sentence(best.text)
            row.update(alt=text, suggested=text, confidence=sure)


def _reviewed(table: Path) -> tuple[dict[str, list[Row]], int]:
    """Return the reviewed rows of a table by page, and the number of rows reported instead."""
    found: dict[str, list[Row]] = {}
    failed = 0
    for where, line in read_table(table):
        row = dict.fromkeys(COLUMNS, "") | line
        mark = row["reviewed"].lower()
        if mark == "yes":
            found.setdefault(row["page"], []).append(row)
        elif mark not in ("", "no"):
            warn(f"{where}: reviewed is {mark!r}; give yes or nothing")
            failed += 1
        elif "suggested" in line and row["alt"].split() != row["suggested"].split():
            warn(f"{where}: the text was changed, but is not reviewed; put yes in that column")
            failed += 1
    if not found:
        raise DataError(f"{table}: no row is reviewed; put yes in the column reviewed of each")
    return found, failed


def _apply(site: Path, table: Path) -> int:
    """Write reviewed texts into the tags that are still as they were; report the others."""
    reviewed, failed = _reviewed(table)
    counts, files = Counter(failed=failed), NamedFiles(site)
    for name, rows in reviewed.items():
        try:
            path = files.find_below(name)
            if path.suffix.lower() not in PAGES:
                raise DataError("is not a page; give .html and .htm files")
        except DataError as error:
            warn(f"{site / name} {error}")
            counts["failed"] += len(rows)
            continue
        try:
            page = HtmlPage(path)
            texts = _texts(name, page, rows, counts)
            if texts:
                atomic_write(path, page.with_texts(texts))
        except (DataError, OSError) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EROFS):
                raise
            problem = getattr(error, "strerror", None)
            warn(f"{path}: {problem}" if problem else str(error))
            counts["failed"] += len(rows)
        else:
            counts["written"] += len(texts)
    kept = f", {counts['there']:,} already there" if counts["there"] else ""
    warn(f"{table}: {counted(counts['written'], 'alternative text')} written{kept}")
    return FAILED if counts["failed"] else OK


def _texts(
    name: str, page: HtmlPage, rows: Sequence[Row], counts: Counter[str]
) -> list[tuple[HtmlImage, str]]:
    """Return the texts to write into a page. Count the other rows, and report lost ones."""
    texts: list[tuple[HtmlImage, str]] = []
    for row in rows:
        text, place = " ".join(row["alt"].split()), (row["line"], row["tag"])
        same = [image for image in page.images if (str(image.line), image.key) == place]
        found = [image for image in same if image.alt == text]
        found += [image for image in same if not image.reason and image.link == row["link"]]
        if found and (text or not found[0].needs_text):
            page.images.remove(found[0])
            texts += [] if found[0].reason else [(found[0], text)]
            counts["there"] += bool(found[0].reason)
        else:
            lost = "needs a text" if found else "is not there any more; run captioner alt again"
            warn(f"{name}:{row['line']}: {row['tag'][:80]} {lost}")
            counts["failed"] += 1
    return texts
