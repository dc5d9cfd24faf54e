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

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioner.caption import Caption, CropBox
from captioner.data.images import Photo, is_photo, open_image, reduced_side
from captioner.data.prefetch import read_batches, reader_threads
from captioner.drawing.notebook import PhotoCaption, shown_photo, with_photo
from captioner.errors import ConfigError, ImageError, OptionError
from captioner.hardware import Precision
from captioner.inference.captions import (
    Alternatives,
    given_hypothesis,
    make_caption,
    most_probable,
    observe,
)
from captioner.inference.confidence import Observation, no_confidence
from captioner.inference.engine import Engine, Ensemble, Prepared
from captioner.inference.folder import (
    SHIPPED_MODEL,
    Graphs,
    StoredModel,
    find_model,
    load_model,
    save_model,
)
from captioner.inference.hub import PREFIX, is_hub_name, parse
from captioner.options import ExplanationMethod, SearchOptions
from captioner.search.arrays import Array
from captioner.search.search import Hypothesis
from captioner.search.words import encode_search_words

if TYPE_CHECKING:  # the hub is imported when it is needed
    from captioner.inference.sharing import Picture
    from captioner.model.captioner import CaptionModel

P = TypeVar("P", bound=Photo)
Photos = list[P] | tuple[P, ...]
"""What returns a list."""


class _Read(NamedTuple):
    """A photo that was read."""

    prepared: Prepared
    shown: Image.Image | Path


class _Encoded(NamedTuple):
    """Photos that were encoded."""

    grids: Sequence[Any]
    crop_boxes: Sequence[CropBox]
    seeds: Sequence[int]


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


class Captioner:
    """A loaded model, or an ensemble of several.

    The models of an ensemble share one vocabulary; their word probabilities are averaged. Search
    options, info and grid are the first model's; see also ``Ensemble``.

    Photos are captioned by ``caption``, ``captions``, ``explain`` and ``stream``. Programs that
    read and batch photos themselves use ``prepare`` and the methods whose names end in ``_batch``.
    """

    def __init__(
        self,
        stored: StoredModel,
        *others: StoredModel,
        device: str = "auto",
        precision: Precision = "auto",
    ) -> None:
        """Prepare models for inference.

        Args:
            stored: A model in memory, from ``load_model``.
            *others: More models with the same vocabulary, for an ensemble.
            device: See ``load``.
            precision: See ``load``.

        Raises:
            ConfigError: The device or precision is not available, or the models cannot be averaged.
        """
        for number, other in enumerate(others, 2):
            _check_ensemble(stored, other, number)
        self.stored = stored
        """The (first) model as stored: network in float32, vocabulary, search options."""
        self.ensemble = Ensemble(
            [_engine(one.network, device, precision) for one in (stored, *others)]
        )
        self.engine = self.ensemble.engines[0]
        self.device = self.engine.device
        """Where the models run."""
        self.precision = self.engine.precision
        """In use: fp32, tf32, bf16, fp16 or int8."""

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

    @property
    def model(self) -> CaptionModel:
        """The (first) network, copied for inference.

        Raises:
            ConfigError: It is exported.
        """
        network: CaptionModel = getattr(self.engine, "model", None) or self.stored.model
        return network

    def options(self, **changes: Any) -> SearchOptions:
        """The model's default search options with some of them changed.

        Raises:
            ConfigError: An option is unknown or out of range.
        """
        return self.stored.search.changed(**changes)

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
                array, see ``data.arrays.image_from_array``. Or a list of these.
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

    # --- batches ---

    def prepare(self, image: Image.Image) -> Prepared:
        """Resize an image from ``data.images.open_image``, RGB and upright, for the encoders."""
        return self.ensemble.prepare(image)

    def caption_batch(
        self,
        photos: Sequence[Prepared],
        options: SearchOptions,
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
    ) -> list[list[Caption]]:
        """Caption prepared photos together.

        Args:
            photos: From ``prepare``.
            options: Search options.
            alternatives: See ``stream``.
            method: See ``stream``.

        Returns:
            For each photo its captions, best first; at least one.

        Raises:
            ConfigError: A word in the options is unknown, or no caption satisfies the options.
        """
        self._check(method, alternatives)
        if not photos:
            return []
        encoded = self._encode(photos)
        return self._search(encoded, options, alternatives=alternatives, method=method)

    def caption_features(
        self,
        features: Array,
        crop_boxes: Sequence[CropBox],
        options: SearchOptions,
        seeds: Sequence[int] | None = None,
    ) -> list[list[Caption]]:
        """Caption photos from cached features; one model only.

        Args:
            features: From a ``FeatureCache``, (B, L, D), on any device.
            crop_boxes: The part of each photo that the model sees.
            options: Search options.
            seeds: A random seed per photo, for sampling; None: its index.

        Returns:
            See ``caption_batch``.

        Raises:
            ConfigError: There are several models.
        """
        grids = self.ensemble.encode_features(features)
        return self._search(_Encoded(grids, crop_boxes, seeds or range(len(features))), options)

    def explain_batch(
        self,
        photos: Sequence[Prepared],
        sentences: Sequence[Sequence[str]],
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
        style: str | None = None,
    ) -> list[Caption]:
        """Attention and word probabilities for given captions, one per photo.

        Args:
            photos: From ``prepare``.
            sentences: The words of each caption, all in the vocabulary.
            alternatives: See ``stream``.
            method: See ``stream``.
            style: Style of the captions; None: that of the model's search options.
        """
        vocabulary = self.stored.vocabulary
        captions = [vocabulary.encode(words) for words in sentences]
        start = vocabulary.start(self.stored.search.style if style is None else style)
        self._check(method, alternatives)
        if not photos:
            return []
        encoded = self._encode(photos)
        tokens = [[caption] for caption in captions]
        scores = self.ensemble.score(self.ensemble.memories(encoded.grids), tokens, start)
        found = [[given_hypothesis(scores, row, caption)] for row, caption in enumerate(captions)]
        others = most_probable(scores, tokens, alternatives, vocabulary) if alternatives else []
        explained = self._captions(found, encoded, start, method, others=others)
        return [caption for [caption] in explained]

    def observe_batch(
        self, photos: Sequence[Prepared], options: SearchOptions
    ) -> list[Observation]:
        """What is known of the best caption of every photo, from which confidence is computed.

        Args:
            photos: From ``prepare``; at least one.
            options: Search options.
        """
        encoded = self._encode(photos)
        memories = self.ensemble.memories(encoded.grids)
        return self._observations(
            memories, self._find(memories, encoded.seeds, options, evidence=True)
        )

    def photo_vectors(self, photos: Sequence[Prepared]) -> NDArray[np.float32]:
        """Mean of the features of each photo's regions, as the decoder uses them: (B, D)."""
        return self.ensemble.summary(self.ensemble.memories(self._encode(photos).grids))

    def check_method(self, method: object) -> None:
        """See ``Ensemble.check_method``."""
        self.ensemble.check_method(method)

    def no_confidence(self, options: SearchOptions) -> str | None:
        """Why captions found with these options have no confidence; None: they have one."""
        if len(self.ensemble.engines) > 1:
            return "an ensemble of models is not calibrated; use a single model"
        return no_confidence(self.stored.calibrator, options, self.stored.vocabulary.styles)

    def _check(self, method: object, alternatives: object) -> None:
        self.ensemble.check_method(method)
        if type(alternatives) is not int or alternatives < 0:
            raise ConfigError(
                f"alternatives is {alternatives!r}; give a whole number, 0 (none) or more"
            )

    def _encode(self, photos: Sequence[Prepared]) -> _Encoded:
        return _Encoded(
            self.ensemble.encode(photos),
            [photo.crop_box for photo in photos],
            [photo.seed for photo in photos],
        )

    def _search(
        self,
        encoded: _Encoded,
        options: SearchOptions,
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
    ) -> list[list[Caption]]:
        """Search for the captions of photos; see ``caption_batch``."""
        memories = self.ensemble.memories(encoded.grids)
        calibrator = None if self.no_confidence(options) else self.stored.calibrator
        found = self._find(memories, encoded.seeds, options, evidence=calibrator is not None)
        confidences: list[float] = []
        if calibrator is not None:
            style = options.style or next(iter(self.stored.vocabulary.styles), "")
            observed = self._observations(memories, found)
            confidences = [calibrator.confidence(seen, style) for seen in observed]
        start = self.stored.vocabulary.start(options.style)
        others: list[list[Alternatives]] = []
        if alternatives:  # score the captions again, so that the search need not store every word
            tokens = [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in found]
            scores = self.ensemble.score(memories, tokens, start)
            others = most_probable(scores, tokens, alternatives, self.stored.vocabulary)
        return self._captions(found, encoded, start, method, others=others, confidences=confidences)

    def _find(
        self,
        memories: Sequence[Any],
        seeds: Sequence[int],
        options: SearchOptions,
        *,
        evidence: bool,
    ) -> list[list[Hypothesis]]:
        words = encode_search_words(options, self.stored.vocabulary)
        start = self.stored.vocabulary.start(options.style)
        return self.ensemble.search(memories, options, words, start, seeds, evidence=evidence)

    def _observations(
        self, memories: Sequence[Any], found: Sequence[Sequence[Hypothesis]]
    ) -> list[Observation]:
        pairs = zip(found, self.ensemble.summary(memories), strict=True)
        return [observe(best, photo, self.stored.vocabulary) for (best, *_), photo in pairs]

    def _captions(
        self,
        found: Sequence[Sequence[Hypothesis]],
        encoded: _Encoded,
        start: int,
        method: ExplanationMethod,
        *,
        others: Sequence[Sequence[Alternatives]],
        confidences: Sequence[float] = (),
    ) -> list[list[Caption]]:
        """The captions of photos with their maps; the best of each with its confidence, if any."""
        return [
            [
                make_caption(
                    hypothesis,
                    self.ensemble.explain(method, encoded.grids, row, start, hypothesis),
                    encoded.crop_boxes[row],
                    self.engine,
                    self.stored.vocabulary,
                    method=method,
                    alternatives=others[row][column] if others else (),
                    confidence=confidences[row] if confidences and column == 0 else None,
                )
                for column, hypothesis in enumerate(hypotheses)
            ]
            for row, hypotheses in enumerate(found)
        ]

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
        stored = load_model(find_model(name, revision, **options))
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
        if len(self.ensemble.engines) > 1:
            raise ConfigError("an ensemble cannot be pushed; push each model on its own")
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


def _engine(network: CaptionModel | Graphs, device: str, precision: Precision) -> Engine:
    if isinstance(network, Graphs):
        from captioner.inference.onnx_engine import OnnxEngine

        return OnnxEngine(network, device, precision)
    from captioner.inference.torch_engine import TorchEngine

    return TorchEngine(network, device, precision)


def _check_ensemble(first: StoredModel, other: StoredModel, number: int) -> None:
    """Raise ConfigError unless model ``number`` can be averaged with the first."""
    kinds = ["is exported" if isinstance(m.network, Graphs) else "is not" for m in (first, other)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"model 1 {kinds[0]} and model {number} {kinds[1]}; give models of one kind"
        )
    one, two = first.vocabulary, other.vocabulary
    if one == two:
        return
    if (one.words, one.subwords) == (two.words, two.subwords):
        styles = " and ".join(", ".join(each.styles) or "none" for each in (one, two))
        raise ConfigError(
            f"the styles of model 1 and model {number} differ ({styles}); an ensemble needs models "
            "trained with the same styles, in the same order"
        )
    raise ConfigError(
        f"the vocabularies of model 1 and model {number} differ ({len(one)} and {len(two)} words); "
        "an ensemble needs models trained with the same vocabulary"
    )


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
