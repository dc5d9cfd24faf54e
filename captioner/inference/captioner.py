"""The Python API: load a model, caption photos.

model = captioner.load()
caption = model.caption("photo.jpg")
captioner.overlay("photo.jpg", caption).save("attention.png")
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, overload

from PIL import Image

from captioner.data.images import Photo, is_photo, open_image, reduced_side
from captioner.data.prefetch import read_batches, reader_threads
from captioner.drawing.notebook import PhotoCaption, shown_photo, with_photo
from captioner.errors import ConfigError, ImageError, OptionError
from captioner.hardware import Precision
from captioner.inference.batches import BatchMethods
from captioner.inference.engine import Prepared
from captioner.inference.folder import (
    SHIPPED_MODEL,
    find_model,
    load_model,
    save_model,
)
from captioner.inference.hub import PREFIX, is_hub_name, parse, push
from captioner.options import ExplanationMethod, SearchOptions
from captioner.search.words import encode_search_words

if TYPE_CHECKING:  # it imports torch
    pass

P = TypeVar("P", bound=Photo)
Photos = list[P] | tuple[P, ...]
"""What returns a list."""


class _Read(NamedTuple):
    """A photo that was read."""

    prepared: Prepared
    shown: Image.Image | Path


class Result(NamedTuple):
    """Result for one photo: captions or an error."""

    photo: Photo
    captions: list[PhotoCaption]
    """Best first; empty if the photo cannot be read."""
    error: ImageError | None


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
        ConfigError: The device is not available, the models have different vocabularies, some
            are exported and others are not, or ``revision`` is not for a single model of the hub.
    """
    for folder in folders:
        if not isinstance(folder, str | Path):
            raise ConfigError(f"a model is {folder!r:.60}; give each folder by its own path")
    if revision is not None and len(folders) != 1:
        raise ConfigError(
            f"revision is {revision!r}, but there are {len(folders)} models; write "
            "hf:user/name@revision"
        )
    paths = [find_model(folder, revision) for folder in folders or (SHIPPED_MODEL,)]
    return Captioner(*map(load_model, paths), device=device, precision=precision)


class Captioner(BatchMethods):
    """A loaded model, or an ensemble of several.

    The models of an ensemble share one vocabulary; their word probabilities are averaged. Search
    options, info and grid are the first model's; see also ``Ensemble``.

    Photos are captioned by ``caption``, ``captions``, ``explain`` and ``stream``. Programs that
    read and batch photos themselves use ``prepare`` and the methods whose names end in ``_batch``.
    """

    def __repr__(self) -> str:
        vocabulary, engines = self.stored.vocabulary, self.ensemble.engines
        facts: dict[str, object] = {
            "encoder": self.engine.name,
            "grid": self.engine.grid,
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

    def known_words(self, text: str) -> list[str]:
        """The words of a text, spelled as in the vocabulary.

        Raises:
            ConfigError: The text is empty or has words outside the vocabulary.
        """
        return self.stored.vocabulary.known_words(text)

    # --- photos ---

    @overload
    def caption(self, photo: Photo, **options: Any) -> PhotoCaption: ...

    @overload
    def caption(self, photo: Photos[P], **options: Any) -> list[PhotoCaption]: ...

    def caption(self, photo: Photo | Photos[Any], **options: Any) -> Any:
        """Caption one photo, or every photo of a list.

        Args:
            photo: A path; the bytes of an image file, or an open binary file; a PIL image; a NumPy
                array, see ``data.pixels.image_from_array``. Or a list of these.
            **options: Of ``stream``, e.g. ``beam_size=1`` or ``method="occlusion"``.

        Returns:
            The best caption, or a list of them; notebooks display a caption with its photo.

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
        return [best[0] for best in found] if isinstance(photo, list | tuple) else found[0]

    @overload
    def captions(self, photo: Photo, **options: Any) -> list[PhotoCaption]: ...

    @overload
    def captions(self, photo: Photos[P], **options: Any) -> list[list[PhotoCaption]]: ...

    def captions(self, photo: Photo | Photos[Any], **options: Any) -> Any:
        """The best ``num_captions`` captions, best first: a list, or one for each photo of a list.

        For arguments and errors see ``caption``.
        """
        if isinstance(photo, list | tuple):
            results = self.stream(photo, **options)
            return [_captions_of(result, number) for number, result in enumerate(results)]
        (result,) = self.stream([photo], **options)
        if result.error is not None:
            raise result.error
        return result.captions

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
            alternatives: See ``stream``.
            method: See ``stream``.
            style: Style that the caption is read in; None: the model's default.

        Returns:
            The caption with its attention, log-probabilities and gates.

        Raises:
            ImageError: The photo cannot be read.
            ConfigError: The text is empty or has words outside the vocabulary, or an ensemble does
                not support the method.
        """
        words = self.known_words(text)
        self._check(method, alternatives)
        read = self._read(photo)
        explained = self.explain_batch(
            [read.prepared], [words], alternatives=alternatives, method=method, style=style
        )
        return with_photo(explained, read.shown)[0]

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
            alternatives: Number of most probable words to return per position.
            method: How the maps are computed: ``attention``, ``attention_gate``,
                ``gradient_input``, ``grad_cam`` or ``occlusion``; see ``model.explanations``.
            batch_size: Photos that are captioned together.
            **search: Fields of ``SearchOptions`` to change, e.g. ``beam_size=1``.

        Raises:
            ConfigError: An option is invalid; at once, not with the first result.
        """
        options = self.options(**search)
        encode_search_words(options, self.stored.vocabulary)
        self.stored.vocabulary.start(options.style)
        self._check(method, alternatives)
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
        on_cpu = str(self.device).startswith("cpu")  # which is busy encoding
        threads = 2 if on_cpu else reader_threads()
        with closing(read_batches(self._read, photos, batch_size, threads=threads)) as batches:
            for batch in batches:
                good = [read.prepared for _, read in batch if isinstance(read, _Read)]
                found = self.caption_batch(good, options, alternatives=alternatives, method=method)
                captions = iter(found)
                for photo, read in batch:
                    if isinstance(read, ImageError):
                        yield Result(photo, [], read)
                    else:
                        yield Result(photo, with_photo(next(captions), read.shown), None)

    def _read(self, photo: Photo) -> _Read:
        image = open_image(photo, min_side=reduced_side(self.ensemble.image_size))
        return _Read(self.prepare(image), shown_photo(image, photo))

    # --- folders and the hub ---

    def save(self, folder: str | Path) -> None:
        """Write the (first) model as a model folder.

        Raises:
            ConfigError: It is exported.
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
        """Load a model as other libraries of the Hugging Face hub do; see also ``captioner.load``.

        Args:
            pretrained_model_name_or_path: A model or run folder, or a model of the hub, with or
                without ``hf:``.
            revision: Branch, tag or commit of a model of the hub.
            device: See ``load``.
            precision: See ``load``.
            **download: ``token``, ``cache_dir``, ``force_download`` and ``local_files_only`` of
                ``huggingface_hub.snapshot_download``, for a model of the hub.

        Raises:
            CaptionerError: See ``load``.
        """
        name = str(pretrained_model_name_or_path)
        if not is_hub_name(name) and not Path(name).exists() and name.count("/") == 1:
            name = f"{PREFIX}{name}"
        stored = load_model(find_model(name, revision, **download))
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
        branch: str | None = None,
        picture: Photo | None = None,
        license: str | None = None,  # noqa: A002 - its name in the header
        datasets: Sequence[str] = (),
        reports: Sequence[str | Path] = (),
        **commit: Any,
    ) -> str:
        """Push the model with a generated card to the Hugging Face hub; see docs/sharing.md.

        Args:
            repo_id: ``user/name``, with or without ``hf:``; created if it does not exist.
            branch: Default: the main branch.
            picture: For the card: a photo, which is published with its attention.
            license: For the card; see ``CardOptions``.
            datasets: For the card; see ``CardOptions``.
            reports: For the card; see ``CardOptions``.
            **commit: ``commit_message``, ``private``, ``token`` and ``create_pr`` of ``hub.push``.

        Returns:
            The address of the commit.

        Raises:
            ConfigError: There are several models, the model is exported, or an argument is invalid.
            ImageError: The photo of ``picture`` cannot be read.
            ModelError: The hub refuses or cannot be reached.
        """
        if len(self.ensemble.engines) > 1:
            raise ConfigError("an ensemble cannot be pushed; push each model on its own")
        from captioner.inference.card import CardOptions, files_to_push, picture_of

        target = parse(repo_id, branch)
        shown = None if picture is None else picture_of(self, picture)
        options = CardOptions(license, datasets, reports, shown)
        with tempfile.TemporaryDirectory() as folder:
            self.save(f"{folder}/model")
            files = files_to_push(Path(folder, "model"), target.repo, options)
            return push(files, target, **commit)


def _captions_of(result: Result, number: int) -> list[PhotoCaption]:
    """The captions of a photo in a list; raises its error with its position."""
    if result.error is None:
        return result.captions
    raise type(result.error)(
        f"photos[{number}]: {result.error} (model.stream continues with the other photos)"
    ) from result.error
