"""Alternative texts (``alt``) for the images of a static site.

A model suggests the texts, a person reviews them, and then they are written into the pages.

Example:
    found = captioner.suggest_alt("public/")
    found.save("alt.csv")  # also writes alt.html; review either file
    captioner.apply_alt("public/", "alt.csv")
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captioner.data.cells import SafeWriter
from captioner.data.reading import photo_bar
from captioner.data.site_images import COLUMNS, SiteImage, SiteImages, find_site_images
from captioner.data.site_reviews import continue_review
from captioner.data.site_texts import OUTDATED, WrittenTexts, read_reviewed, write_texts
from captioner.drawing.pages import review_id, review_page
from captioner.errors import ConfigError, DataError, NotAnImageError
from captioner.files import atomic_open, atomic_write
from captioner.hints import hinted
from captioner.text.sentence import as_sentence

if TYPE_CHECKING:  # importing it takes longer than finding images
    from captioner.inference.captioner import Captioner

_SOURCES = (
    *("hugo.toml", "hugo.yaml", "hugo.json", "config.toml", "_config.yml", "mkdocs.yml"),
    "config/_default",
)
"""Files and folders at the top of the sources of a site (Hugo, Jekyll, MkDocs)."""


@dataclass
class AltTexts(SiteImages):
    """The images of a site that lack an alternative text, with suggested texts."""

    table: Path | None = None
    """The review table that is continued, or None for a new review."""

    def suggest(self, model: Captioner, *, progress: bool = True, **options: Any) -> None:
        """Suggest a text for every image that is not from a continued review table.

        Each image gets a suggestion with its confidence, or a note that explains why the image has
        no suggestion. If the image is the only content of a link or button, its text stays empty,
        because a description of the picture does not say where the link leads.

        Args:
            model: The model that captions the image files. Each file is captioned once.
            progress: Show a progress bar if standard error is a terminal.
            **options: Options of ``model.stream``.

        Raises:
            ConfigError: An option is invalid, or ``num_captions`` is not 1.
        """
        if options.get("num_captions", 1) != 1:
            raise ConfigError(
                f"num_captions is {options['num_captions']!r}, but an image has only one "
                "alternative text; set num_captions to 1"
            )
        files = self.files()
        results = model.stream(files, **options)
        found = dict(zip(files, photo_bar(results, total=len(files), shown=progress), strict=True))
        reported: set[Path] = set()
        for one in self.new:
            file = self.site / one.image
            if one.note:
                continue
            if (error := found[file].error) is None:
                best = found[file].captions[0]
                one.suggested = as_sentence(best.text)
                one.alt = "" if one.needs_text else one.suggested
                one.confidence = best.confidence
                continue
            one.note = str(error).removeprefix(f"{file}: ")
            if isinstance(error, NotAnImageError):
                one.note = one.note.split("; ")[0]  # the advice is for photos
            elif file not in reported:
                reported.add(file)
                self.problems.append(f"{one.page}:{one.line}: {one.image}: {one.note}")

    def save(self, table: str | Path, *, force: bool = False) -> Path:
        """Write the suggestions as a CSV table and as an HTML page for review.

        The page is written next to the table, with the suffix ``.html``. Both begin with the least
        confident suggestions. Images without a suggestion come last. In a continued table, the
        existing rows keep their order and come before the new rows.

        Args:
            table: A CSV file outside the site.
            force: Overwrite existing files. The continued table is always updated.

        Returns:
            The path of the review page.

        Raises:
            ConfigError: ``table`` is not a CSV file or lies inside the site, or one of the two
                files already exists.
        """
        path = Path(table)
        review = review_of(path, self.site)
        for one in (path, review):
            if one.exists() and not (force or path == self.table):
                raise ConfigError(
                    f"{one} already exists; continue it with suggest_alt(..., resume={str(path)!r})"
                    ", or pass force=True to replace it and delete the texts in it"
                )
        images = [*self.images[: self.kept], *sorted(self.new, key=_order)]
        columns = dict.fromkeys([*COLUMNS, *(name for one in images for name in one.other)], "")
        rows = [columns | one.row() for one in images]
        with atomic_open(path) as file:
            file.write("\ufeff")  # without this mark, spreadsheets would not read UTF-8
            writer = SafeWriter(file, columns)
            for row in rows:
                writer.write_row(row)
        known = review_id(review) if path == self.table else ""
        page = review_page(self.site, path.name, rows, known)
        atomic_write(review, page.encode(errors="replace"))
        return review


@hinted
def suggest_alt(
    site: str | Path,
    *,
    model: Captioner | str | Path | None = None,
    url: str | None = None,
    empty: bool = False,
    resume: str | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> AltTexts:
    """Suggest alternative texts for the images of a static site, without writing any file.

    An image with ``alt=""`` gets a suggestion only if a link or button contains nothing else.

    Args:
        site: Folder of the finished site, with its .html and .htm files.
        model: A loaded model or a model folder. None loads the model included in the package.
        url: URL at which the folder is published. Set it if the pages use this URL in the
            addresses of their images.
        empty: Also suggest texts for all other images with ``alt=""``.
        resume: Review table to continue, if it exists. The texts in it are kept, and only the
            images that it lacks get a suggestion.
        progress: Show a progress bar if standard error is a terminal.
        **options: Options of ``model.stream``, such as ``beam_size=1``.

    Returns:
        The images with their suggested texts, and one line for each file that cannot be read.

    Raises:
        ConfigError: ``site`` is not the folder of a finished site, or an option is invalid.
        DataError: The site has no images, or the table cannot be read.
        ModelError: The model cannot be loaded.
    """
    found = find_alt(site, url=url, empty=empty, resume=resume)
    if found.files():
        from captioner.inference.captioner import load

        if isinstance(model, str | Path | None):
            model = load() if model is None else load(model)
        found.suggest(model, progress=progress, **options)
    return found


def find_alt(
    site: str | Path,
    *,
    url: str | None = None,
    empty: bool = False,
    resume: str | Path | None = None,
) -> AltTexts:
    """Find the images of a static site that lack an alternative text, without suggesting texts.

    Args:
        site: Folder of the finished site.
        url: URL at which the folder is published, if the pages use it in image addresses.
        empty: Also find all images with ``alt=""``.
        resume: Review table to continue, if it exists.
    """
    found = AltTexts(site_folder(site))
    find_site_images(found, url, empty=empty)
    if resume is not None:
        found.table = Path(resume)
        if found.table.exists():
            continue_review(found, resume)
    return found


@hinted
def apply_alt(site: str | Path, texts: str | Path | Iterable[SiteImage]) -> WrittenTexts:
    """Write reviewed alternative texts into the pages of a static site.

    Only ``alt`` attributes are added or replaced. All other bytes of a page stay unchanged.

    Args:
        site: Folder of the finished site.
        texts: The reviewed table, or the images from `suggest_alt` after you have set ``reviewed``
            to True on those that you checked.

    Returns:
        The number of written texts, and one line for each text that was not written.

    Raises:
        ConfigError: ``site`` is not the folder of a finished site.
        DataError: The table cannot be read, or no text is marked as reviewed.
    """
    folder = site_folder(site)
    if isinstance(texts, str | Path):
        images, problems = read_reviewed(texts)
    else:
        images, problems = [], []
        for one in texts:
            if one.reviewed:
                images.append(one)
            elif one.changed and one.note != OUTDATED:
                problem = "the text was changed, but is not marked as reviewed; set reviewed=True"
                problems.append(f"{one.page}:{one.line}: {problem}")
    if not images:
        if isinstance(texts, str | Path):
            raise DataError(
                f"{texts} has no row marked as reviewed; enter 'yes' in the 'reviewed' column of "
                "each row that you checked"
            )
        raise DataError(
            "no image is marked as reviewed; set reviewed=True on each image that you checked"
        )
    done = write_texts(folder, images)
    done.problems[:0] = problems
    return done


def review_of(table: Path, site: Path) -> Path:
    """Return the path of the review page for a table: the same name with the suffix ``.html``.

    Raises:
        ConfigError: The table is not a CSV file, or it lies inside the site and would be published.
    """
    if table.suffix.lower() != ".csv":
        raise ConfigError(f"{table} is not a CSV file; choose a name that ends in .csv")
    if table.resolve().is_relative_to(site.resolve()):
        raise ConfigError(f"{table} would be published with the site; choose a file outside {site}")
    return table.with_suffix(".html")


def site_folder(site: str | Path) -> Path:
    """Return the folder of a finished site.

    Raises:
        ConfigError: The folder does not exist, or it contains the sources of a site.
    """
    folder = Path(site)
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; pass the folder with the HTML pages of the built site"
        )
    source = next((name for name in _SOURCES if (folder / name).exists()), None)
    if source and not (folder / "index.html").exists():
        raise ConfigError(
            f"{folder} contains the sources of a site ({source}), not the finished site; build the "
            "site, and pass the folder with the HTML pages, such as public/, _site/ or site/"
        )
    return folder


def _order(one: SiteImage) -> tuple[bool, float, str]:
    """Return a sort key: low confidence comes first, and images without a suggestion come last."""
    return not one.suggested, one.confidence or 0, one.image
