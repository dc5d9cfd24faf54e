"""The functions and the class with which Python programs load a model and caption photos.

Example:
    model = captioner.load()
    caption = model.caption("photo.jpg")
    captioner.overlay("photo.jpg", caption).save("attention.png")
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, cast, overload

from PIL import Image

from captioner.caption_types import Caption
from captioner.data.folders import find_images, without_pictures
from captioner.data.images import Photo, is_photo, open_image, reduced_side
from captioner.data.reading import read_batches, reader_threads
from captioner.errors import ConfigError, ImageError
from captioner.hardware import Precision
from captioner.hints import SEARCH_OPTIONS, Hinting, hinted, unknown_option
from captioner.inference.batch_captioner import BatchCaptioner
from captioner.inference.card import files_to_push, write_card
from captioner.inference.engine import Prepared
from captioner.inference.folder import load_model, save_model
from captioner.inference.hub import PREFIX, is_hub_name, parse, push
from captioner.inference.names import SHIPPED_MODEL
from captioner.inference.photo_caption import PhotoCaption, shown_photo, with_photo
from captioner.options import CardOptions, ExplanationMethod, SearchOptions
from captioner.schema import option_fields
from captioner.search.words import encode_search_words

P = TypeVar("P", bound=Photo)
Photos = list[P] | tuple[P, ...]
"""A list or tuple of photos, for which ``Captioner.caption`` returns a list of captions."""

_STREAM_OPTIONS = ("alternatives", "method", "batch_size", "words", "keep_photos")


class Result(NamedTuple):
    """The captions of one photo, or the error if the photo cannot be read."""

    photo: Photo
    captions: Sequence[Caption]
    """The captions, best first. Empty after an error. Each caption is a `PhotoCaption`, unless
    ``keep_photos`` is false."""
    error: ImageError | None

    def __repr__(self) -> str:  # the bytes or the array of a photo would fill the screen
        photo = self.photo if isinstance(self.photo, str | os.PathLike) else type(self.photo)
        return f"<Result {photo}: {self.error or ', '.join(map(repr, self.captions))}>"


@hinted
def load(
    *folders: str | Path,
    revision: str | None = None,
    device: str = "auto",
    precision: Precision = "auto",
) -> Captioner:
    """Load a model, or several models as an ensemble.

    Args:
        *folders: Model folders, run folders, or models on the Hugging Face hub
            (``hf:user/name`` or ``hf:user/name@revision``). Without folders, the model included in
            the package is loaded.
        revision: Branch, tag or commit of a model on the hub.
        device: ``auto`` (a GPU if available), ``cpu``, ``cuda``, ``cuda:1``, ``mps``, ...
        precision: ``auto``, ``fp32``, ``tf32``, ``bf16`` or ``fp16``. On a CPU, ``auto`` runs the
            model's exported graphs without torch, if the model has graphs. In all other cases,
            ``auto`` selects the fastest precision that the hardware supports natively.

    Raises:
        ModelError: A folder cannot be loaded, or a model cannot be downloaded from the hub.
        ConfigError: The device or torch is not available, the models cannot be averaged, or an
            option is invalid. ``revision`` is invalid for a local folder.
    """
    for folder in folders:
        if not isinstance(folder, str | Path):
            raise ConfigError(
                f"{folder!r:.60} is not a model folder; pass each folder as a separate argument"
            )
    models = [load_model(folder, revision) for folder in folders or (SHIPPED_MODEL,)]
    return Captioner(*models, device=device, precision=precision)


@overload
def caption(photo: Photo, **options: Any) -> PhotoCaption: ...


@overload
def caption(photo: Photos[P], **options: Any) -> list[PhotoCaption]: ...


@hinted
def caption(photo: Photo | Photos[Any], **options: Any) -> PhotoCaption | list[PhotoCaption]:
    """Return the best caption of a photo, using the model included in the package.

    This function is available as ``captioner.caption``. The first call loads the model, and later
    calls reuse it. For arguments and errors see `Captioner.caption`.
    """
    return _shipped_model().caption(photo, **options)


@cache
def _shipped_model() -> Captioner:
    """Load the model included in the package, once per process."""
    return load()


def caption_with(folder: Path, image: Image.Image) -> Caption:
    """Caption a photo for the card of a model, with the float32 weights of the model folder."""
    return load(folder, precision="fp32").caption(image)


@hinted
class Captioner(BatchCaptioner, Hinting):
    """A loaded model, or an ensemble of several.

    The models of an ensemble share one vocabulary, and their word probabilities are averaged. An
    ensemble has the search options, info and grid of its first model (see also ``Ensemble``).

    To caption photos, use ``caption``, ``captions``, ``explain`` or ``stream``. A call of the
    object, ``model(photo)``, is short for ``model.caption(photo)``. Programs that read and batch
    photos themselves use ``prepare`` and the methods with names that end in ``_batch``.
    """

    _hints: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("generate", "predict", "describe", "forward", "run", "infer"), "caption"),
        **dict.fromkeys(("caption_batch_size", "batch", "map", "pipe", "caption_folder"), "stream"),
        **dict.fromkeys(
            ("attend", "overlay", "show", "plot", "heatmap", "attention"),
            "use captioner.overlay(photo, model.caption(photo))",
        ),
        **dict.fromkeys(("tags", "tag", "keywords"), "use model.caption(photo, keywords=8)"),
        **dict.fromkeys(
            ("vocab", "vocabulary", "words"), "use model.stored.vocabulary, or model.info"
        ),
        "tokenizer": "use captioner.tokenize, or model.known_words(text)",
        **dict.fromkeys(
            ("to", "cuda", "cpu", "half", "float"),
            'pass the device: captioner.load(device="cuda")',
        ),
        **dict.fromkeys(("eval", "train"), "model.model is the network, a torch module"),
        **dict.fromkeys(("config", "settings"), "use model.info, or model.options()"),
        "name": "print(model) describes the model",
        "score": "use model.explain(photo, text).log_prob",
    }

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
        """Facts about the model's training data and scores, for information only."""
        return self.stored.info

    # --- photos ---

    @overload
    def caption(self, photo: Photo, **options: Any) -> PhotoCaption: ...

    @overload
    def caption(self, photo: Photos[P], **options: Any) -> list[PhotoCaption]: ...

    def caption(
        self, photo: Photo | Photos[Any], **options: Any
    ) -> PhotoCaption | list[PhotoCaption]:
        """Return the best caption of a photo, or a list of captions for several photos.

        A photo is a path, the bytes of an image file, an open binary file, a PIL image or a NumPy
        array (see ``data.images.image_from_array``). For several photos, pass a list, a tuple or
        the path of a folder. The captions of a folder are in the natural order of the file names.
        ``caption.photo`` is the path of the photo. Subfolders are not searched.

        Args:
            photo: The photo or photos.
            **options: Options of ``stream``, such as ``beam_size=1`` or ``method="occlusion"``.

        Raises:
            ImageError: A photo cannot be read. (``stream`` continues with the other photos.)
            DataError: The folder contains no photos.
            ConfigError: An option is unknown or invalid, or ``num_captions`` is not 1.
        """
        wanted = options.get("num_captions", 1)
        if wanted != 1:
            raise ConfigError(
                f"num_captions is {wanted!r}, but caption() returns one caption per photo; use "
                "captions()"
            )
        several = _several(photo)
        found: Any = self.captions(cast("Photo", photo) if several is None else several, **options)
        return found[0] if several is None else [best for best, *_ in found]

    __call__ = caption

    @overload
    def captions(
        self, photo: Photo, num_captions: int | None = None, **options: Any
    ) -> list[PhotoCaption]: ...

    @overload
    def captions(
        self, photo: Photos[P], num_captions: int | None = None, **options: Any
    ) -> list[list[PhotoCaption]]: ...

    def captions(
        self, photo: Photo | Photos[Any], num_captions: int | None = None, **options: Any
    ) -> list[PhotoCaption] | list[list[PhotoCaption]]:
        """Return the best ``num_captions`` captions of a photo as a list, best first.

        For several photos, return one list per photo. For arguments and errors see ``caption``.
        """
        several = _several(photo)
        photos: Any = [photo] if several is None else several
        if num_captions is not None:
            options["num_captions"] = num_captions
        found: list[Any] = []
        for number, result in enumerate(self.stream(photos, **options)):
            if (error := result.error) is not None:
                at = f"photos[{number}]: {error} (to skip such photos, use model.stream)"
                raise error if several is None else type(error)(at)
            found.append(result.captions)
        return found[0] if several is None else found

    def explain(
        self,
        photo: Photo,
        text: str,
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
        style: str | None = None,
    ) -> PhotoCaption:
        """Add attention maps, log-probabilities and gates to your own caption of a photo.

        Args:
            photo: A single photo in any form that ``caption`` accepts.
            text: Your caption.
            alternatives: Number of most probable words to return at each position.
            method: Method that computes the maps, such as ``attention`` or ``occlusion``.
            style: Style in which the model scores the caption (default: the model's own default).

        Raises:
            ImageError: The photo cannot be read.
            ConfigError: The text is empty or has words outside the vocabulary, or the model does
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
        """Caption any number of photos in batches, in their order and in constant memory.

        Threads read the next photos while the model runs. A photo that cannot be read yields a
        result with its error. All other errors are raised by the call itself, before the first
        result.

        Args:
            photos: A photo or the path of a folder, as in ``caption``, or any iterable of photos.
                An iterable is consumed lazily.
            alternatives: Number of most probable words to return for each position of a caption.
            method: Method that computes the maps: ``attention``, ``attention_gate``,
                ``gradient_input``, ``grad_cam`` or ``occlusion`` (see ``model.explanations``).
            batch_size: Number of photos that are captioned together.
            words: Captions of your own, which are explained for every photo. The search is then
                skipped, so ``style`` is the only search option that can be set.
            keep_photos: Keep the photo with its captions, so that notebooks can display it. If the
                photo is not a path, a smaller copy is kept.
            **search: Fields of ``SearchOptions`` to change, e.g. ``beam_size=1``.

        Raises:
            ConfigError: An option is unknown or invalid.
            DataError: The folder contains no photos.
        """
        fields = option_fields(SearchOptions)
        for name in search:
            if name not in fields:
                raise unknown_option(name, (*fields, *_STREAM_OPTIONS), SEARCH_OPTIONS)
        options = self.options(**search)
        encode_search_words(options, self.stored.vocabulary)
        self._check(method, alternatives, options)
        texts = [self.known_words(text) for text in words]
        if texts and (refused := sorted(search.keys() - {"style"})):
            raise ConfigError(
                f"words sets the caption, so the search option {refused[0]} has no effect; leave "
                "out one of them"
            )
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size!r}; use an integer of at least 1")
        folder = _several(photos) if isinstance(photos, str | os.PathLike) else None
        one_photo = folder is None and is_photo(photos)
        several = cast("Iterable[Photo]", [photos] if one_photo else folder or photos)
        on_cpu = str(self.device).startswith("cpu")  # leave the other cores to the model
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
        """Return a photo prepared for the encoders, and the photo that its captions keep.

        The second value is the path of the photo or a small copy, or None if ``keep`` is false.
        """
        image = self._open(photo)
        return self.prepare(image), shown_photo(image, photo) if keep else None

    def _open(self, photo: Photo) -> Image.Image:
        """Open a photo, at no higher resolution than the encoders need."""
        return open_image(photo, min_side=reduced_side(self.ensemble.image_size))

    # --- folders and the hub ---

    def save(self, folder: str | Path) -> None:
        """Write the model to a model folder. Of an ensemble, only the first model is written.

        Raises:
            ConfigError: The model was exported without its weights.
        """
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
        """Load a model as ``captioner.load`` does, under the name that Hugging Face libraries use.

        The prefix ``hf:`` of a name may be omitted. Further options such as ``token``,
        ``cache_dir``, ``force_download`` and ``local_files_only`` are passed to
        ``huggingface_hub.snapshot_download``.
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
        """Write a model folder as ``save`` does, and add a model card.

        If ``push_to_hub`` is true, the model is also pushed to the hub, by default under the
        folder's name. For ``push_options`` see the method `push_to_hub`.

        Returns:
            The URL of the commit if the model was pushed, otherwise None.
        """
        self.save(save_directory)
        write_card(Path(save_directory))
        if not push_to_hub:
            return None
        return self.push_to_hub(repo_id or Path(save_directory).name, **push_options)

    def push_to_hub(self, repo_id: str, *, branch: str | None = None, **options: Any) -> str:
        """Push the model with a generated card to the Hugging Face hub (see docs/sharing.md).

        The repository is created if it does not exist.

        Args:
            repo_id: Name of the repository: ``user/name``.
            branch: Branch to commit to; None selects the main branch.
            **options: Options for the card: ``license``, ``datasets``, ``reports`` and ``picture``
                (a photo to publish with its attention). Options for the commit, as in
                ``hub.push``: ``commit_message``, ``private``, ``token`` and ``create_pr``.

        Returns:
            The URL of the commit.

        Raises:
            ConfigError: The model is an ensemble or exported, or an argument is invalid.
            ImageError: The photo of ``picture`` cannot be read.
            ModelError: The hub rejects the commit or cannot be reached.
        """
        if len(self.ensemble.engines) > 1:
            raise ConfigError("an ensemble cannot be pushed; push each model separately")
        target = parse(repo_id, branch)
        card = CardOptions(**{n: options.pop(n) for n in vars(CardOptions()) if n in options})
        with tempfile.TemporaryDirectory() as folder:
            self.save(f"{folder}/model")
            model = Path(folder, "model")
            files = files_to_push(model, target.repo, card, partial(caption_with, model))
            return push(files, target, **options)


def _several(photo: object) -> list[Any] | None:
    """Return the photos in a list or in a folder, or None for a single photo."""
    if isinstance(photo, list | tuple):
        return [*photo]
    if isinstance(photo, str | os.PathLike) and os.path.isdir(photo):  # noqa: PTH112 - no errors
        return without_pictures(find_images([os.fspath(photo)]))
    return None
