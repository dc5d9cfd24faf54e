"""The Python API: load a model, caption photos.

model = captioner.load()
caption = model.caption("photo.jpg")
captioner.overlay("photo.jpg", caption).save("attention.png")
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, overload

from PIL import Image

from captioner.caption import Caption
from captioner.data.images import Photo, is_photo, open_image, reduced_side
from captioner.data.reading import read_batches, reader_threads
from captioner.errors import ConfigError, ImageError
from captioner.hardware import Precision
from captioner.inference.batch_captioner import BatchCaptioner
from captioner.inference.card import files_to_push, write_card
from captioner.inference.engine import Prepared
from captioner.inference.folder import load_model, save_model
from captioner.inference.hub import PREFIX, is_hub_name, parse, push
from captioner.inference.names import SHIPPED_MODEL
from captioner.inference.photo_caption import PhotoCaption, shown_photo, with_photo
from captioner.options import CardOptions, ExplanationMethod
from captioner.search.words import encode_search_words

if TYPE_CHECKING:  # they import torch
    pass

P = TypeVar("P", bound=Photo)
Photos = list[P] | tuple[P, ...]
"""What returns a list."""


class Result(NamedTuple):
    """Result for one photo: captions or an error."""

    photo: Photo
    captions: Sequence[Caption]
    """Best first; empty if the photo cannot be read. They know the photo (`PhotoCaption`) unless
    ``keep_photos`` is false."""
    error: ImageError | None


def load(
    *folders: str | Path,
    revision: str | None = None,
    device: str = "auto",
    precision: Precision = "auto",
) -> Captioner:
    """Load a model, or several models as an ensemble.

    Args:
        *folders: Model or run folders, or models of the Hugging Face hub (``hf:user/name`` or
            ``hf:user/name@revision``); none: the model included in the package.
        revision: Branch, tag or commit of a model of the hub.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:1``, ``mps``, ...
        precision: ``auto``, ``fp32``, ``tf32``, ``bf16`` or ``fp16``. ``auto`` on a CPU: exported
            graphs if the model has them, without torch; else the fastest precision that the
            hardware supports natively.

    Raises:
        ModelError: A folder cannot be loaded, or a model of the hub cannot be downloaded.
        ConfigError: The device is not available, torch is needed and not installed, the models
            cannot be averaged, or ``revision`` is not for a model of the hub.
    """
    for folder in folders:
        if not isinstance(folder, str | Path):
            raise ConfigError(f"a model is {folder!r:.60}; give each folder by its own path")
    models = [load_model(folder, revision) for folder in folders or (SHIPPED_MODEL,)]
    return Captioner(*models, device=device, precision=precision)


def caption_with(folder: Path, image: Image.Image) -> Caption:
    """Caption a photo with the weights of a model folder, in float32; for the model's card."""
    return load(folder, precision="fp32").caption(image)


class Captioner(BatchCaptioner):
    """A loaded model, or an ensemble of several.

    The models of an ensemble share one vocabulary; their word probabilities are averaged. Search
    options, info and grid are the first model's; see also ``Ensemble``.

    Photos are captioned by ``caption``, ``captions``, ``explain`` and ``stream``. Programs that
    read and batch photos themselves use ``prepare`` and the methods whose names end in ``_batch``.
    """

    def __repr__(self) -> str:
        engine, count = self.engine, len(self.ensemble.engines)
        styles = list(self.stored.vocabulary.styles)
        return (
            f"<Captioner {f'models {count}, ' if count > 1 else ''}encoder {engine.name}, grid "
            f"{engine.grid}, words {len(self.stored.vocabulary.words)}, styles {styles}, device "
            f"{self.device}, precision {self.precision}>"
        )

    @property
    def info(self) -> dict[str, Any]:
        """The model's training data and scores."""
        return self.stored.info

    # --- photos ---

    @overload
    def caption(self, photo: Photo, **options: Any) -> PhotoCaption: ...

    @overload
    def caption(self, photo: Photos[P], **options: Any) -> list[PhotoCaption]: ...

    def caption(
        self, photo: Photo | Photos[Any], **options: Any
    ) -> PhotoCaption | list[PhotoCaption]:
        """The best caption of a photo, or of every photo of a list; notebooks display both.

        A photo is a path, the bytes of an image file, an open binary file, a PIL image, or a NumPy
        array (see ``data.images.image_from_array``). The options are those of ``stream``, such as
        ``beam_size=1`` or ``method="occlusion"``.

        Raises:
            ImageError: A photo cannot be read. (``stream`` continues with the others.)
            ConfigError: An option is invalid, or ``num_captions`` is not 1.
        """
        wanted = options.get("num_captions", 1)
        if wanted != 1:
            raise ConfigError(
                f"num_captions is {wanted!r}, but caption() returns one per photo; use captions()"
            )
        found: Any = self.captions(photo, **options)
        return [best for best, *_ in found] if isinstance(photo, list | tuple) else found[0]

    @overload
    def captions(self, photo: Photo, **options: Any) -> list[PhotoCaption]: ...

    @overload
    def captions(self, photo: Photos[P], **options: Any) -> list[list[PhotoCaption]]: ...

    def captions(
        self, photo: Photo | Photos[Any], **options: Any
    ) -> list[PhotoCaption] | list[list[PhotoCaption]]:
        """The best ``num_captions`` captions, best first: a list, or one for each photo of a list.

        For arguments and errors see ``caption``.
        """
        several = isinstance(photo, list | tuple)
        photos: Any = photo if several else [photo]
        found: list[Any] = []
        for number, result in enumerate(self.stream(photos, **options)):
            if (error := result.error) is not None:
                at = f"photos[{number}]: {error} (model.stream continues with the other photos)"
                raise type(error)(at) if several else error
            found.append(result.captions)
        return found if several else found[0]

    def explain(
        self,
        photo: Photo,
        text: str,
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
        style: str | None = None,
    ) -> PhotoCaption:
        """A given caption of one photo, with its attention, log-probabilities and gates.

        Without a ``style`` it is read in the model's default; see ``stream`` for the others.

        Raises:
            ImageError: The photo cannot be read.
            ConfigError: The text is empty or has words outside the vocabulary, or an ensemble does
                not support the method.
        """
        words = self.known_words(text)
        image = self._open(photo)
        prepared, shown = self.prepare(image), shown_photo(image, photo)
        how: Any = {"alternatives": alternatives, "method": method, "style": style}
        return with_photo(self.explain_batch([prepared], [words], **how), shown)[0]

    def stream(
        self,
        photos: Iterable[Photo] | Photo,
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
        batch_size: int = 32,
        words: Sequence[str] = (),
        keep_photos: bool = True,
        **search: Any,
    ) -> Iterator[Result]:
        """Caption any number of photos in batches, in order and in constant memory.

        Threads read the next photos while the model runs. A photo that cannot be read yields a
        result with its error.

        Args:
            photos: Photos as in ``caption``, consumed lazily; or one photo.
            alternatives: Number of most probable words to return per position.
            method: How the maps are computed: ``attention``, ``attention_gate``,
                ``gradient_input``, ``grad_cam`` or ``occlusion``; see ``model.explanations``.
            batch_size: Photos that are captioned together.
            words: Captions to explain in place of a search, of whose options they have ``style``.
            keep_photos: Whether captions keep their photo for notebooks. A photo that is not a path
                is scaled down for that.
            **search: Fields of ``SearchOptions`` to change, e.g. ``beam_size=1``.

        Raises:
            ConfigError: An option is invalid; at once, not with the first result.
        """
        options = self.options(**search)
        encode_search_words(options, self.stored.vocabulary)
        self._check(method, alternatives, options)
        texts = [self.known_words(text) for text in words]
        if texts and (refused := sorted(search.keys() - {"style"})):
            raise ConfigError(f"words are given, so there is no search; omit {refused[0]}")
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size!r}; give an integer >= 1")
        several = cast("Iterable[Photo]", [photos] if is_photo(photos) else photos)
        on_cpu = str(self.device).startswith("cpu")  # which is busy encoding
        threads = 2 if on_cpu else reader_threads()

        def captioned(good: Sequence[Prepared]) -> Iterable[Sequence[Caption]]:
            how: Any = {"alternatives": alternatives, "method": method}
            if not texts:
                return self.caption_batch(good, options, **how)
            how["style"] = options.style
            each = [self.explain_batch(good, [text] * len(good), **how) for text in texts]
            return zip(*each, strict=True)

        def results() -> Iterator[Result]:
            read = partial(self._read, keep=keep_photos)
            with closing(read_batches(read, several, batch_size, threads=threads)) as batches:
                for batch in batches:
                    good = [found[0] for _, found in batch if not isinstance(found, ImageError)]
                    captions = iter(captioned(good))
                    for photo, found in batch:
                        if isinstance(found, ImageError):
                            yield Result(photo, [], found)
                        else:
                            shown = found[1]
                            these = next(captions)
                            kept = these if shown is None else with_photo(these, shown)
                            yield Result(photo, kept, None)

        return results()

    def _read(self, photo: Photo, keep: bool = True) -> tuple[Prepared, Image.Image | Path | None]:
        """A photo for the encoders, and what its captions keep of it."""
        image = self._open(photo)
        return self.prepare(image), shown_photo(image, photo) if keep else None

    def _open(self, photo: Photo) -> Image.Image:
        """Open a photo, in no higher resolution than the encoders need."""
        return open_image(photo, min_side=reduced_side(self.ensemble.image_size))

    # --- folders and the hub ---

    def save(self, folder: str | Path) -> None:
        """Write the (first) model as a model folder; ConfigError: it is exported."""
        save_model(folder, self.stored)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        device: str = "auto",
        precision: Precision = "auto",
        **download: Any,
    ) -> Captioner:
        """``captioner.load`` as other libraries of the Hugging Face hub spell it.

        The name may lack its ``hf:``. Further options are ``token``, ``cache_dir``,
        ``force_download`` and ``local_files_only`` of ``huggingface_hub.snapshot_download``.
        """
        name = str(pretrained_model_name_or_path)
        if not is_hub_name(name) and not Path(name).exists() and name.count("/") == 1:
            name = f"{PREFIX}{name}"
        return cls(load_model(name, revision, **download), device=device, precision=precision)

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **push_options: Any,
    ) -> str | None:
        """Write the (first) model as a model folder with a card, which ``save`` does not write.

        With ``push_to_hub`` it is pushed too, by default under the folder's name; see the method.

        Returns:
            The address of the commit, if the model was pushed.
        """
        self.save(save_directory)
        write_card(Path(save_directory))
        if not push_to_hub:
            return None
        return self.push_to_hub(repo_id or Path(save_directory).name, **push_options)

    def push_to_hub(self, repo_id: str, *, branch: str | None = None, **options: Any) -> str:
        """Push the model with a generated card to the Hugging Face hub; see docs/sharing.md.

        The repository is created if it does not exist. Options of the card are ``license``,
        ``datasets``, ``reports`` and ``picture``, a photo to publish with its attention; those of
        the commit are ``commit_message``, ``private``, ``token`` and ``create_pr`` of ``hub.push``.

        Returns:
            The address of the commit.

        Raises:
            ConfigError: There are several models, the model is exported, or an argument is invalid.
            ImageError: The photo of ``picture`` cannot be read.
            ModelError: The hub refuses or cannot be reached.
        """
        if len(self.ensemble.engines) > 1:
            raise ConfigError("an ensemble cannot be pushed; push each model on its own")
        target = parse(repo_id, branch)
        card = CardOptions(**{n: options.pop(n) for n in vars(CardOptions()) if n in options})
        with tempfile.TemporaryDirectory() as folder:
            self.save(f"{folder}/model")
            model = Path(folder, "model")
            files = files_to_push(model, target.repo, card, partial(caption_with, model))
            return push(files, target, **options)
