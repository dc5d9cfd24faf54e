"""Captioning from Python: load a model, give it photos, get captions with their evidence.

model = captioner.load()
caption = model.caption("photo.jpg")
captioner.overlay("photo.jpg", caption).save("attention.png")
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from captioner.caption import Caption
from captioner.config import SearchOptions
from captioner.data.images import open_image
from captioner.errors import ConfigError, ImageError
from captioner.hardware import Precision
from captioner.inference import BatchCaptioner, Photo, Prepared
from captioner.model_folder import load_model, save_model
from captioner.tokenizer import tokenize
from captioner.visualization.notebook import PhotoCaption

SHIPPED_MODEL = Path(__file__).parent / "pretrained"
"""The folder of the model that comes with the package."""


class Result(NamedTuple):
    """What became of one photo: captions or an error, never both."""

    photo: Photo
    captions: list[Caption]
    """Best first; empty when the photo could not be read."""
    error: ImageError | None


def load(*folders: str | Path, device: str = "auto", precision: Precision = "auto") -> Captioner:
    """Load a model, or several that caption together.

    Args:
        *folders: Model folders; none: the model that comes with the package.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ...
        precision: ``auto`` (bf16 where the hardware multiplies it natively), ``fp32``, ``bf16``.

    Raises:
        ModelError: A folder cannot be loaded.
        ConfigError: The device is not there, or the models do not go together.
    """
    for folder in folders:
        if not isinstance(folder, str | Path):
            raise ConfigError(f"a model is {folder!r:.60}; give each folder by its own path")
    stored = [load_model(folder) for folder in folders or (SHIPPED_MODEL,)]
    return Captioner(*stored, device=device, precision=precision)


class Captioner(BatchCaptioner):
    """A loaded model: photos in, captions out.

    Several models caption together as an ensemble; see ``BatchCaptioner``.
    """

    @property
    def info(self) -> dict[str, Any]:
        """Where the model was trained and how it scored."""
        return self.stored.info

    def save(self, folder: str | Path) -> None:
        """Write the (first) model as a model folder."""
        save_model(folder, self.stored)

    def options(self, **changes: Any) -> SearchOptions:
        """The model's own search options with some of them changed.

        Raises:
            ConfigError: An option is unknown or out of range.
        """
        return self.stored.search.changed(**changes)

    def caption(self, photo: Photo, *, alternatives: int = 0, **search: Any) -> PhotoCaption:
        """Caption one photo.

        Args:
            photo: A path, a PIL image or a binary file.
            alternatives: So many of the most probable words are told at every place.
            **search: Fields of ``SearchOptions`` to change, e.g. ``beam_size=1``.

        Returns:
            The best caption; a notebook shows it with its photo.

        Raises:
            ImageError: The photo cannot be read.
        """
        return self.captions(photo, alternatives=alternatives, **search)[0]

    def captions(self, photo: Photo, *, alternatives: int = 0, **search: Any) -> list[PhotoCaption]:
        """The best ``num_captions`` captions of one photo, best first; see ``caption``."""
        options = self.options(**search)
        image = open_image(photo)
        found = self.caption_batch([self.prepare(image)], options, alternatives=alternatives)[0]
        return PhotoCaption.of(found, image, photo)

    def explain(self, photo: Photo, text: str, *, alternatives: int = 0) -> PhotoCaption:
        """Where the model looks, and how probable it finds each word, when it says this sentence.

        Args:
            photo: A path, a PIL image or a binary file.
            text: The sentence; tokenized as captions are.
            alternatives: See ``caption``.

        Returns:
            The sentence with its attention, log-probabilities and gates.

        Raises:
            ImageError: The photo cannot be read.
            ConfigError: The sentence is empty or holds words that the model does not know.
        """
        words = self.known_words(text)
        image = open_image(photo)
        told = self.explain_batch([self.prepare(image)], [words], alternatives=alternatives)
        return PhotoCaption.of(told, image, photo)[0]

    def known_words(self, text: str) -> list[str]:
        """The words of a sentence, as the vocabulary spells them.

        Raises:
            ConfigError: The sentence is empty or holds words that the model does not know.
        """
        if not isinstance(text, str):
            raise ConfigError(f"a sentence is {text!r:.40}; give it as one text")
        words = tokenize(text)
        unknown = [word for word in words if word not in self.stored.vocabulary]
        if unknown or not words:
            given = f"the model does not know {', '.join(unknown)}" if unknown else "no words"
            raise ConfigError(f"{text!r}: {given}; give a sentence of words from its vocabulary")
        return words

    def stream(
        self,
        photos: Iterable[Photo] | str | Path,
        options: SearchOptions | None = None,
        *,
        batch_size: int = 32,
        alternatives: int = 0,
    ) -> Iterator[Result]:
        """Caption any number of photos in batches, in their order, in constant memory.

        Photos are read ahead by threads while the model works. A photo that cannot be read gives a
        result with its error and the others go on.

        Args:
            photos: Paths, PIL images or binary files, consumed as they are needed; or one path.
            options: How to search; None: the model's own.
            batch_size: Photos captioned together.
            alternatives: See ``caption``.
        """
        if batch_size < 1:
            raise ConfigError(f"batch-size is {batch_size}; give 1 or more")
        options = options or self.stored.search
        photos = [photos] if isinstance(photos, str | Path) else photos
        with ThreadPoolExecutor(max_workers=2) as readers:
            for batch in _read_ahead(photos, self._try_prepare, readers, batch_size):
                good = [prepared for _, prepared in batch if isinstance(prepared, Prepared)]
                found = self.caption_batch(good, options, alternatives=alternatives) if good else []
                captions = iter(found)
                for photo, prepared in batch:
                    if isinstance(prepared, ImageError):
                        yield Result(photo, [], prepared)
                    else:
                        yield Result(photo, next(captions), None)

    def _try_prepare(self, photo: Photo) -> Prepared | ImageError:
        try:
            return self.prepare(photo)
        except ImageError as error:
            return error


def _read_ahead(
    photos: Iterable[Photo], prepare: Any, readers: ThreadPoolExecutor, batch_size: int
) -> Iterator[list[tuple[Photo, Prepared | ImageError]]]:
    """Batches of prepared photos; while one is out, the next is being read."""
    source = iter(photos)
    waiting: deque[tuple[Photo, Future[Prepared | ImageError]]] = deque()

    def fill(size: int) -> None:
        for photo in islice(source, size - len(waiting)):
            waiting.append((photo, readers.submit(prepare, photo)))

    while True:
        fill(2 * batch_size)
        if not waiting:
            return
        taken = [waiting.popleft() for _ in range(min(batch_size, len(waiting)))]
        yield [(photo, future.result()) for photo, future in taken]
