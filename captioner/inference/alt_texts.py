"""Alternative texts for the images of a static site: suggest, review, write.

Example:
    found = captioner.suggest_alt("public/")
    found.save("alt.csv")  # and alt.html; a person reviews one of them
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
from captioner.data.site_texts import WrittenTexts, read_reviewed, write_texts
from captioner.drawing.pages import review_page
from captioner.errors import ConfigError, DataError, NotAnImageError
from captioner.files import atomic_open, atomic_write
from captioner.text.sentence import as_sentence

if TYPE_CHECKING:  # importing it takes longer than finding images
    from captioner.inference.captioner import Captioner


@dataclass
class AltTexts(SiteImages):
    """The images of a site that lack an alternative text, with suggested texts."""

    def suggest(self, model: Captioner, *, progress: bool = True, **options: Any) -> None:
        """Add a text with its confidence to every image, or a note why it has no suggestion.

        Args:
            model: The model that captions the pictures. Each picture is captioned once.
            progress: Show a progress bar on standard error, if that is a terminal.
            **options: Options of ``model.stream``.

        Raises:
            ConfigError: An option is invalid, or ``num_captions`` is not 1.
        """
        if options.get("num_captions", 1) != 1:
            raise ConfigError("an image has one alternative text; give num_captions 1")
        files = self.files()
        results = model.stream(files, **options)
        found = dict(zip(files, photo_bar(results, total=len(files), shown=progress), strict=True))
        reported: set[Path] = set()
        for one in self.images:
            file = self.site / one.image
            if one.note:
                continue
            if (error := found[file].error) is None:
                best = found[file].captions[0]
                one.alt = one.suggested = as_sentence(best.text)
                one.confidence = best.confidence
                continue
            one.note = str(error).removeprefix(f"{file}: ")
            if isinstance(error, NotAnImageError):
                one.note = one.note.split("; ")[0]  # the advice is for photos
            elif file not in reported:
                reported.add(file)
                self.problems.append(f"{one.page}:{one.line}: {one.image}: {one.note}")

    def save(self, table: str | Path, *, force: bool = False) -> Path:
        """Write the table, and the page to review it, whose name ends in ``.html`` instead.

        Images without a suggestion come last, and before them the most confident suggestions.

        Args:
            table: A CSV file outside of the site.
            force: Overwrite existing files.

        Returns:
            The page.

        Raises:
            ConfigError: The table is not a CSV file, would be published with the site, or exists.
        """
        path = Path(table)
        review = review_of(path, self.site)
        for one in (path, review):
            if one.exists() and not force:
                raise ConfigError(f"{one} exists; give force=True to overwrite it")
        rows = [one.row() for one in sorted(self.images, key=_order)]
        with atomic_open(path) as file:
            file.write("\ufeff")  # spreadsheets need it to read UTF-8
            writer = SafeWriter(file, COLUMNS)
            for row in rows:
                writer.write_row(row)
        atomic_write(review, review_page(self.site, path.name, rows).encode(errors="replace"))
        return review


def suggest_alt(
    site: str | Path,
    *,
    model: Captioner | str | Path | None = None,
    url: str | None = None,
    empty: bool = False,
    progress: bool = True,
    **options: Any,
) -> AltTexts:
    """Suggest alternative texts for the images of a static site. Nothing is written.

    Images with ``alt=""`` have a suggestion if they are all that a link or button contains.

    Args:
        site: Folder of the finished site, with its .html and .htm files.
        model: A loaded model or a model folder; None: the model included in the package.
        url: Address of the folder, if pages name their pictures by it.
        empty: Also suggest texts for all other images with ``alt=""``.
        progress: Show a progress bar on standard error, if that is a terminal.
        **options: Options of ``model.stream``, such as ``beam_size=1``.

    Returns:
        The images with their texts, and the lines of what could not be read.

    Raises:
        ConfigError: ``site`` is not a folder, or an option is invalid.
        DataError: The site has no images.
        ModelError: The model cannot be loaded.
    """
    found = find_alt(site, url=url, empty=empty)
    if found.files():
        from captioner.inference.captioner import load

        if isinstance(model, str | Path | None):
            model = load() if model is None else load(model)
        found.suggest(model, progress=progress, **options)
    return found


def find_alt(site: str | Path, *, url: str | None = None, empty: bool = False) -> AltTexts:
    """Find the images of a site for `suggest_alt`, without texts."""
    found = AltTexts(_folder(site))
    find_site_images(found, url, empty=empty)
    return found


def apply_alt(site: str | Path, texts: str | Path | Iterable[SiteImage]) -> WrittenTexts:
    """Write reviewed alternative texts into the pages of a static site.

    Only the attribute ``alt`` is added or replaced, and all other bytes of a page stay as they are.

    Args:
        site: Folder of the finished site.
        texts: The reviewed table, or images of `suggest_alt` with ``reviewed`` set to True.

    Returns:
        The number of written texts, and one line for each text that was not written.

    Raises:
        ConfigError: ``site`` is not a folder.
        DataError: The table cannot be read, or no text is reviewed.
    """
    folder = _folder(site)
    if isinstance(texts, str | Path):
        images, problems = read_reviewed(texts)
    else:
        images, problems = [], []
        for one in texts:
            if one.reviewed:
                images.append(one)
            elif one.changed:
                problem = "the text was changed, but is not reviewed; set reviewed to True"
                problems.append(f"{one.page}:{one.line}: {problem}")
    if not images:
        if isinstance(texts, str | Path):
            raise DataError(f"{texts}: no row is reviewed; put yes in the column reviewed of each")
        raise DataError("no image is reviewed; set reviewed to True for each")
    done = write_texts(folder, images)
    done.problems[:0] = problems
    return done


def review_of(table: Path, site: Path) -> Path:
    """Return the page to review a table, which is written next to it.

    Raises:
        ConfigError: The table is not a CSV file, or would be published with the site.
    """
    if table.suffix.lower() != ".csv":
        raise ConfigError(f"{table} is not a CSV file; give a name that ends in .csv")
    if table.resolve().is_relative_to(site.resolve()):
        raise ConfigError(f"{table} would be published with the site; give a file outside {site}")
    return table.with_suffix(".html")


def _folder(site: str | Path) -> Path:
    folder = Path(site)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the folder of the finished site")
    return folder


def _order(one: SiteImage) -> tuple[bool, float, str]:
    """Sort key: the least confident first, images without a suggestion last."""
    return not one.alt, one.confidence or 0, one.image
