"""The Python API: load a model, caption photos.

model = captioner.load()
caption = model.caption("photo.jpg")
captioner.overlay("photo.jpg", caption).save("attention.png")
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, overload

from PIL import Image

from captioner.data.images import Photo, is_photo, open_image, reduced_side
from captioner.data.prefetch import read_ahead, reader_threads
from captioner.drawing.notebook import PhotoCaption, shown_photo, with_photo
from captioner.errors import ConfigError, ImageError, OptionError
from captioner.hardware import Precision
from captioner.inference.batch_captioner import BatchCaptioner, check_alternatives
from captioner.inference.engine import Prepared
from captioner.inference.hub import PREFIX, is_hub_name, parse
from captioner.inference.loading import read_model, read_models, with_weights
from captioner.inference.model_config import find_model
from captioner.inference.onnx_engine import ExportedModel
from captioner.options import ExplanationMethod, SearchOptions
from captioner.search.words import encode_search_words

if TYPE_CHECKING:  # torch and the hub are imported when they are needed
    from captioner.inference.folder import StoredModel
    from captioner.inference.sharing import Picture

P = TypeVar("P", bound=Photo)
Photos = list[P] | tuple[P, ...]
"""What returns a list."""


class Result(NamedTuple):
    """Result for one photo: captions or an error."""

    photo: Photo
    captions: list[PhotoCaption]
    """Best first; empty if the photo cannot be read."""
    error: ImageError | None


class _Read(NamedTuple):
    """A photo that was read."""

    prepared: Prepared
    shown: Image.Image | Path


def load(
    *folders: str | Path,
    revision: str | None = None,
    device: str = "auto",
    precision: Precision = "auto",
) -> Captioner:
    """Load a model, or several models as an ensemble.

    Args:
        *folders: Model, run or exported folders, or models of the Hugging Face hub
            (``hf:user/name`` or ``hf:user/name@revision``); none: the model included in the
            package. Exported folders run with ONNX Runtime, and torch is not imported.
        revision: Branch, tag or commit of a single model of the hub.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:1``, ``mps``, ...
        precision: ``auto``, ``fp32``, ``tf32``, ``bf16`` or ``fp16``; ``auto`` is the fastest that
            the hardware supports natively.

    Raises:
        ModelError: A folder cannot be loaded, or a model of the hub cannot be downloaded.
        ConfigError: The device is not available, the models have different vocabularies, or
            ``revision`` is not for a single model of the hub.
    """
    models = read_models(*folders, revision=revision)
    return Captioner(*models, device=device, precision=precision)


class Captioner:
    """A loaded model, or an ensemble of several.

    The models of an ensemble share one vocabulary; their word probabilities are averaged. Search
    options, info and grid are the first model's; see also ``Ensemble``.
    """

    def __init__(
        self,
        stored: StoredModel | ExportedModel,
        *others: StoredModel | ExportedModel,
        device: str = "auto",
        precision: Precision = "auto",
    ) -> None:
        """Prepare models for inference.

        Args:
            stored: A model in memory, from ``load_model`` or ``read_exported``.
            *others: More models with the same vocabulary, for an ensemble.
            device: See ``load``.
            precision: See ``load``.

        Raises:
            ConfigError: The device or precision is not available, or the vocabularies differ.
        """
        self.batch_captioner = BatchCaptioner(stored, *others, device=device, precision=precision)
        """For programs that read and batch photos themselves."""
        self.stored = stored
        """The (first) model as stored: network in float32, vocabulary, search options."""
        self.device = self.batch_captioner.device
        """Where the models run."""
        self.precision = self.batch_captioner.precision
        """In use: fp32, tf32, bf16, fp16 or int8."""

    def __repr__(self) -> str:
        vocabulary, engines = self.stored.vocabulary, self.batch_captioner.ensemble.engines
        facts: dict[str, object] = {
            "encoder": engines[0].name,
            "grid": engines[0].grid,
            "words": len(vocabulary.words),
            "styles": list(vocabulary.styles),
            "device": str(self.device),
            "precision": self.precision,
        }
        if len(engines) > 1:
            facts = {"models": len(engines), **facts}
        return f"<Captioner {', '.join(f'{name} {value}' for name, value in facts.items())}>"

    @property
    def info(self) -> dict[str, Any]:
        """The model's training data and scores."""
        return self.stored.info

    def save(self, folder: str | Path) -> None:
        """Write the (first) model as a model folder.

        Raises:
            ConfigError: It is exported.
        """
        stored = with_weights(self.stored)
        from captioner.inference.folder import save_model

        save_model(folder, stored)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        device: str = "auto",
        precision: Precision = "auto",
    ) -> Captioner:
        """Load a model as other libraries of the Hugging Face hub do; see also ``captioner.load``.

        Args:
            pretrained_model_name_or_path: A model or run folder, or a model of the hub, with or
                without ``hf:``.
            revision: Branch, tag or commit of a model of the hub.
            token: Token of the hub; default: the one that is stored.
            cache_dir: Default: that of huggingface_hub.
            force_download: Download again what is in the cache.
            local_files_only: Do not connect: use the cache only.
            device: See ``load``.
            precision: See ``load``.

        Raises:
            CaptionerError: See ``load``.
        """
        name = str(pretrained_model_name_or_path)
        if not is_hub_name(name) and not Path(name).exists() and name.count("/") == 1:
            name = f"{PREFIX}{name}"
        options: dict[str, Any] = {}
        if is_hub_name(name):
            options = {"token": token, "cache_dir": cache_dir, "force_download": force_download}
            options["local_files_only"] = local_files_only
        stored = read_model(find_model(name, revision, **options))
        return cls(stored, device=device, precision=precision)

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **push_options: Any,
    ) -> str | None:
        """Write the (first) model as a model folder with a card; ``save`` writes no card.

        Args:
            save_directory: The folder.
            repo_id: ``user/name`` for ``push_to_hub``; default: the folder's name.
            push_to_hub: Push the model as well.
            **push_options: Of ``push_to_hub``.

        Returns:
            The address of the commit, if the model was pushed.

        Raises:
            CaptionerError: The folder cannot be written, or the model cannot be pushed.
        """
        from captioner.inference.card import write_card

        self.save(save_directory)
        write_card(Path(save_directory))
        if not push_to_hub:
            return None
        return self.push_to_hub(repo_id or Path(save_directory).name, **push_options)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload a captioner model",
        private: bool | None = None,
        token: str | bool | None = None,
        branch: str | None = None,
        create_pr: bool = False,
        license: str | None = None,  # noqa: A002 - its name in the header
        datasets: Sequence[str] = (),
        reports: Sequence[str | Path] = (),
        picture: Photo | None = None,
    ) -> str:
        """Push the model with a generated card to the Hugging Face hub; see docs/sharing.md.

        Args:
            repo_id: ``user/name``, with or without ``hf:``; created if it does not exist.
            commit_message: Message of the commit.
            private: Whether only you see a new repository; None: your account's default.
            token: Default: the one that is stored.
            branch: Default: the main branch.
            create_pr: Open a pull request instead.
            license: For the card: its identifier on the hub, such as ``apache-2.0``.
            datasets: For the card: names of the training data on the hub.
            reports: For the card: reports of ``captioner evaluate -o``.
            picture: For the card: a photo, which is published with its attention.

        Returns:
            The address of the commit.

        Raises:
            ConfigError: There are several models, the model is exported, or an argument is invalid.
            ImageError: The photo of ``picture`` cannot be read.
            ModelError: The hub refuses or cannot be reached.
        """
        if len(self.batch_captioner.ensemble.engines) > 1:
            raise ConfigError("an ensemble cannot be pushed; push each model on its own")
        with_weights(self.stored)
        from captioner.inference.card import CardOptions
        from captioner.inference.sharing import files_to_push, push

        target = parse(repo_id, branch)
        options = CardOptions(license, datasets, reports)
        shown = None if picture is None else card_picture(self, picture)
        with tempfile.TemporaryDirectory() as folder:
            self.save(f"{folder}/model")
            files = files_to_push(Path(folder, "model"), target.repo, options, shown)
            return push(
                files,
                target,
                message=commit_message,
                private=private,
                token=token,
                create_pr=create_pr,
            )

    def options(self, **changes: Any) -> SearchOptions:
        """The model's default search options with some of them changed.

        Raises:
            ConfigError: An option is unknown or out of range.
        """
        return self.batch_captioner.options(**changes)

    @overload
    def caption(
        self,
        photo: Photo,
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
        batch_size: int = 32,
        **search: Any,
    ) -> PhotoCaption: ...

    @overload
    def caption(
        self,
        photo: Photos[P],
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
        batch_size: int = 32,
        **search: Any,
    ) -> list[PhotoCaption]: ...

    def caption(
        self,
        photo: Photo | Photos[Any],
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
        batch_size: int = 32,
        **search: Any,
    ) -> PhotoCaption | list[PhotoCaption]:
        """Caption one photo, or every photo of a list.

        Args:
            photo: A path; the bytes of an image file, or an open binary file; a PIL image; a NumPy
                array, see ``data.arrays.image_from_array``. Or a list of these.
            alternatives: Number of most probable words to return per position.
            method: How the maps are computed: ``attention``, ``attention_gate``,
                ``gradient_input``, ``grad_cam`` or ``occlusion``; see ``models.explanations``.
            batch_size: Photos of a list that are captioned together.
            **search: Fields of ``SearchOptions`` to change, e.g. ``beam_size=1``.

        Returns:
            The best caption, or a list of them; notebooks display a caption with its photo.

        Raises:
            ImageError: A photo cannot be read. (``stream`` continues with the others.)
            ConfigError: A search option is invalid, ``num_captions`` is not 1, or an ensemble does
                not support the method.
        """
        wanted = search.get("num_captions", 1)
        if wanted != 1:
            raise ConfigError(
                f"num_captions is {wanted!r}, but caption() returns one per photo; use captions()"
            )
        found: Any = self.captions(
            photo, alternatives=alternatives, method=method, batch_size=batch_size, **search
        )
        return [best[0] for best in found] if isinstance(photo, list | tuple) else found[0]

    @overload
    def captions(
        self,
        photo: Photo,
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
        batch_size: int = 32,
        **search: Any,
    ) -> list[PhotoCaption]: ...

    @overload
    def captions(
        self,
        photo: Photos[P],
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
        batch_size: int = 32,
        **search: Any,
    ) -> list[list[PhotoCaption]]: ...

    def captions(
        self,
        photo: Photo | Photos[Any],
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
        batch_size: int = 32,
        **search: Any,
    ) -> Any:
        """The best ``num_captions`` captions, best first: a list, or one for each photo of a list.

        For arguments and errors see ``caption``.
        """
        if isinstance(photo, list | tuple):
            results = self.stream(
                photo, alternatives=alternatives, method=method, batch_size=batch_size, **search
            )
            return [_captions_of(result, number) for number, result in enumerate(results)]
        options = self.options(**search)
        self.batch_captioner.check_method(method)
        read = self._read(photo)
        found = self.batch_captioner.caption_batch(
            [read.prepared], options, alternatives=alternatives, method=method
        )[0]
        return with_photo(found, read.shown)

    def explain(
        self,
        photo: Photo,
        text: str,
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
        style: str | None = None,
    ) -> PhotoCaption:
        """Attention and word probabilities for a given caption.

        Args:
            photo: One photo, as in ``caption``.
            text: The caption; tokenized as captions are.
            alternatives: See ``caption``.
            method: See ``caption``.
            style: Style that the caption is read in; None: the model's default.

        Returns:
            The caption with its attention, log-probabilities and gates.

        Raises:
            ImageError: The photo cannot be read.
            ConfigError: The text is empty or has words outside the vocabulary, or an ensemble does
                not support the method.
        """
        words = self.known_words(text)
        self.batch_captioner.check_method(method)
        read = self._read(photo)
        explained = self.batch_captioner.explain_batch(
            [read.prepared], [words], alternatives=alternatives, method=method, style=style
        )
        return with_photo(explained, read.shown)[0]

    def known_words(self, text: str) -> list[str]:
        """The words of a text, spelled as in the vocabulary.

        Raises:
            ConfigError: The text is empty or has words outside the vocabulary.
        """
        return self.stored.vocabulary.known_words(text)

    def stream(
        self,
        photos: Iterable[Photo] | Photo,
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
        batch_size: int = 32,
        **search: Any,
    ) -> Iterator[Result]:
        """Caption any number of photos in batches, in order and in constant memory.

        Threads read the next photos while the model runs. A photo that cannot be read yields a
        result with its error.

        Args:
            photos: Photos as in ``caption``, consumed lazily; or one photo.
            alternatives: See ``caption``.
            method: See ``caption``.
            batch_size: Photos that are captioned together.
            **search: See ``caption``.

        Raises:
            ConfigError: An option is invalid; at once, not with the first result.
        """
        options = self.options(**search)
        encode_search_words(options, self.stored.vocabulary)
        self.stored.vocabulary.start(options.style)
        self.batch_captioner.check_method(method)
        check_alternatives(alternatives)
        if not isinstance(batch_size, int) or batch_size < 1:
            raise OptionError("{batch_size} is {given!r}; give an integer >= 1", given=batch_size)
        several = cast("Iterable[Photo]", [photos] if is_photo(photos) else photos)
        return self._results(several, options, batch_size, alternatives, method)

    def _results(
        self,
        photos: Iterable[Photo],
        options: SearchOptions,
        batch_size: int,
        alternatives: int,
        method: ExplanationMethod,
    ) -> Iterator[Result]:
        # While one batch is captioned, the next one is read.
        on_cpu = str(self.device).startswith("cpu")  # which is busy encoding
        threads = 2 if on_cpu else reader_threads()
        ahead = batch_size + threads - 1
        read_photos = read_ahead(self._try_read, photos, ahead=ahead, threads=threads)
        with closing(read_photos):
            while batch := list(islice(read_photos, batch_size)):
                good = [read.prepared for _, read in batch if isinstance(read, _Read)]
                found = self.batch_captioner.caption_batch(
                    good, options, alternatives=alternatives, method=method
                )
                captions = iter(found)
                for photo, read in batch:
                    if isinstance(read, ImageError):
                        yield Result(photo, [], read)
                    else:
                        yield Result(photo, with_photo(next(captions), read.shown), None)

    def _read(self, photo: Photo) -> _Read:
        size = self.batch_captioner.ensemble.image_size
        image = open_image(photo, min_side=reduced_side(size))
        return _Read(self.batch_captioner.prepare(image), shown_photo(image, photo))

    def _try_read(self, photo: Photo) -> tuple[Photo, _Read | ImageError]:
        try:
            return photo, self._read(photo)
        except ImageError as error:
            return photo, error


def _captions_of(result: Result, number: int) -> list[PhotoCaption]:
    """The captions of a photo in a list; raises its error with its position."""
    if result.error is None:
        return result.captions
    raise type(result.error)(
        f"photos[{number}]: {result.error} (model.stream continues with the other photos)"
    ) from result.error


def card_picture(model: Captioner, photo: Photo) -> Picture:
    """A photo with its attention for a model card."""
    from captioner.drawing.figure import overlay
    from captioner.inference.sharing import Picture

    image = open_image(photo)
    caption = model.caption(image)
    return Picture(overlay(image, caption, panel_size=240).encode(".png"), caption.text)
