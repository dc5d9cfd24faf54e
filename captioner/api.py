"""The Python API: load a model, caption photos.

model = captioner.load()
caption = model.caption("photo.jpg")
captioner.overlay("photo.jpg", caption).save("attention.png")
"""

from __future__ import annotations

import io
import math
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, overload

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from captioner.caption import END_NAME, Alternative, Caption, CropBox, join_words
from captioner.confidence import Observation, no_confidence
from captioner.config import ExplanationMethod, SearchOptions
from captioner.data.images import Photo, is_photo, open_image, reduced_side
from captioner.data.prefetch import read_ahead, reader_threads
from captioner.decoding.arrays import Array, top_k
from captioner.decoding.search import Hypothesis
from captioner.decoding.words import encode_search_words
from captioner.errors import ConfigError, ImageError, OptionError
from captioner.extras import require_full_package
from captioner.hardware import Precision
from captioner.hub import PREFIX, is_hub_name, parse
from captioner.inference import ATTENTION_METHODS, Engine, Ensemble, Prepared, as_map
from captioner.model_config import SHIPPED_MODEL, find_model, is_exported
from captioner.onnx_engine import ExportedModel, OnnxEngine, read_exported
from captioner.visualization.notebook import PhotoCaption, shown_photo, with_photo
from captioner.vocabulary import END, NEVER_GENERATED

if TYPE_CHECKING:  # torch and the hub are imported when they are needed
    from captioner.model_folder import StoredModel
    from captioner.models.captioner import CaptionModel
    from captioner.sharing import Picture

P = TypeVar("P", bound=Photo)
Photos = list[P] | tuple[P, ...]
"""What returns a list."""

Alternatives = tuple[tuple[Alternative, ...], ...]

PUBLIC = (
    "caption", "captions", "device", "explain", "info", "known_words", "options", "precision",
    "push_to_hub", "save", "save_pretrained", "stored", "stream",
)  # fmt: skip
"""Names of a ``Captioner`` for its users; the others are for the package's own commands."""


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
        precision: ``auto`` (bf16 if the hardware supports it natively), ``fp32``, ``bf16``.

    Raises:
        ModelError: A folder cannot be loaded, or a model of the hub cannot be downloaded.
        ConfigError: The device is not available, the models have different vocabularies, or
            ``revision`` is not for a single model of the hub.
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
    exported = [is_exported(path) for path in paths]
    if any(exported) and not all(exported):
        raise ConfigError(
            f"{folders[exported.index(True)]} is exported and "
            f"{folders[exported.index(False)]} is not; give folders of one kind"
        )
    stored = [_read_model(path) for path in paths]
    return Captioner(*stored, device=device, precision=precision)


def _read_model(path: Path) -> StoredModel | ExportedModel:
    if is_exported(path):
        return read_exported(path)
    require_full_package(f"the model {path}, which is not exported,")
    try:
        import_module("torch")
    except ModuleNotFoundError:
        raise ConfigError(
            f"{path} needs torch, which is not installed; run: pip install torch (or give an "
            "exported folder, see captioner export)"
        ) from None
    from captioner.model_folder import load_model

    return load_model(path)


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
        for number, other in enumerate(others, 2):
            if other.vocabulary != stored.vocabulary:
                raise ConfigError(
                    f"the vocabularies of model 1 and model {number} differ "
                    f"({len(stored.vocabulary)} and {len(other.vocabulary)} words); an ensemble "
                    "needs models trained with the same vocabulary"
                )
        self.stored = stored
        """The (first) model as stored: network in float32, vocabulary, search options."""
        self.ensemble = Ensemble([_engine(one, device, precision) for one in (stored, *others)])
        self.engine = self.ensemble.engines[0]
        self.device = self.engine.device
        """Where the models run."""
        self.precision = self.engine.precision
        """In use: fp32, bf16 or int8."""

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

    def __dir__(self) -> list[str]:
        return list(PUBLIC)

    @property
    def model(self) -> CaptionModel:
        """The (first) model as a module of torch, copied for inference.

        Raises:
            ConfigError: It is exported.
        """
        self._with_weights()
        return cast("CaptionModel", self.engine.model)  # type: ignore[attr-defined]

    def _with_weights(self) -> StoredModel:
        """The (first) model in memory; raises ConfigError if it is exported."""
        if isinstance(self.stored, ExportedModel):
            raise ConfigError(
                f"{self.stored.folder} is exported; this needs the model folder that it was "
                "exported from"
            )
        return self.stored

    @property
    def info(self) -> dict[str, Any]:
        """The model's training data and scores."""
        return self.stored.info

    def save(self, folder: str | Path) -> None:
        """Write the (first) model as a model folder.

        Raises:
            ConfigError: It is exported.
        """
        stored = self._with_weights()
        from captioner.model_folder import save_model

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
        stored = _read_model(find_model(name, revision, **options))
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
        from captioner.model_card import write_card

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
        self._with_weights()
        from captioner.model_card import CardOptions
        from captioner.sharing import files_to_push, push

        target = parse(repo_id, branch)
        options = CardOptions(license, datasets, reports)
        shown = None if picture is None else self.card_picture(picture)
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

    def card_picture(self, photo: Photo) -> Picture:
        """A photo with its attention for a model card."""
        from captioner.sharing import Picture
        from captioner.visualization.figure import overlay

        image = open_image(photo)
        caption = self.caption(image)
        png = io.BytesIO()
        overlay(image, caption, panel_size=240).image().save(png, "PNG")
        return Picture(png.getvalue(), caption.text)

    def options(self, **changes: Any) -> SearchOptions:
        """The model's default search options with some of them changed.

        Raises:
            ConfigError: An option is unknown or out of range.
        """
        return self.stored.search.changed(**changes)

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
        self.check_method(method)
        read = self._read(photo)
        found = self.caption_batch(
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
        self.check_method(method)
        read = self._read(photo)
        explained = self.explain_batch(
            [read.prepared], [words], alternatives=alternatives, method=method, style=style
        )
        return with_photo(explained, read.shown)[0]

    def known_words(self, text: str) -> list[str]:
        """The words of a text, spelled as in the vocabulary.

        Raises:
            ConfigError: The text is empty or has words outside the vocabulary.
        """
        if not isinstance(text, str):
            raise ConfigError(f"the caption to explain is {text!r:.40}; give a string")
        words = self.stored.vocabulary.tokenize(text)
        unknown = [word for word in words if word not in self.stored.vocabulary]
        if unknown or not words:
            problem = f"the model does not know {', '.join(unknown)}" if unknown else "no words"
            raise ConfigError(f"{text!r}: {problem}; use words from the model's vocabulary")
        return words

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
        self.check_method(method)
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
                found = self.caption_batch(good, options, alternatives=alternatives, method=method)
                captions = iter(found)
                for photo, read in batch:
                    if isinstance(read, ImageError):
                        yield Result(photo, [], read)
                    else:
                        yield Result(photo, with_photo(next(captions), read.shown), None)

    def check_method(self, method: object) -> None:
        """Check that the maps can be computed by a method.

        Raises:
            ConfigError: It is unknown, or an ensemble does not support it.
        """
        self.ensemble.check_method(method)

    def prepare(self, image: Image.Image) -> Prepared:
        """Resize an image for the encoders.

        Args:
            image: From ``data.images.open_image``: RGB and upright.
        """
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
            alternatives: See ``caption``.
            method: See ``caption``.

        Returns:
            For each photo its captions, best first; at least one.

        Raises:
            ConfigError: A word in the options is unknown, or no caption satisfies the options.
        """
        self.check_method(method)
        if not photos:
            return []
        seeds = [zlib.crc32(photo.pixels[0].tobytes()) for photo in photos]
        crop_boxes = [photo.crop_box for photo in photos]
        grids = self.ensemble.encode(photos)
        return self._search(
            grids, crop_boxes, options, seeds, alternatives=alternatives, method=method
        )

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
        return self._search(grids, crop_boxes, options, seeds or range(len(features)))

    def no_confidence(self, options: SearchOptions) -> str | None:
        """Why captions found with these options have no confidence; None: they have one."""
        if len(self.ensemble.engines) > 1:
            return "an ensemble of models is not calibrated; use a single model"
        return no_confidence(self.stored.calibrator, options, self.stored.vocabulary.styles)

    def observe_batch(
        self, photos: Sequence[Prepared], options: SearchOptions
    ) -> list[Observation]:
        """What is known of the best caption of every photo, from which confidence is computed.

        Args:
            photos: From ``prepare``; at least one.
            options: Search options.
        """
        words = encode_search_words(options, self.stored.vocabulary)
        start = self.stored.vocabulary.start(options.style)
        seeds = [zlib.crc32(photo.pixels[0].tobytes()) for photo in photos]
        memories = self.ensemble.memories(self.ensemble.encode(photos))
        found = self.ensemble.search(memories, options, words, start, seeds, evidence=True)
        return self._observations(memories, found)

    def photo_vectors(self, photos: Sequence[Prepared]) -> NDArray[np.float32]:
        """Mean of the features of each photo's regions, as the decoder uses them: (B, D)."""
        return self.ensemble.summary(self.ensemble.memories(self.ensemble.encode(photos)))

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
            alternatives: See ``caption``.
            method: See ``caption``.
            style: Style of the captions; None: that of the model's search options.
        """
        captions = [self.stored.vocabulary.encode(words) for words in sentences]
        start = self.stored.vocabulary.start(self.stored.search.style if style is None else style)
        self.check_method(method)
        grids = self.ensemble.encode(photos)
        memories = self.ensemble.memories(grids)
        scores = self.ensemble.score(memories, [[tokens] for tokens in captions], start)
        explained = []
        for row, (photo, tokens) in enumerate(zip(photos, captions, strict=True)):
            length = len(tokens)
            log_probs = scores.log_probs[row, 0, np.arange(length + 1), [*tokens, END]]
            hypothesis = Hypothesis(
                tokens=tokens,
                token_log_probs=log_probs[:-1],
                alphas=scores.alphas[row, 0, :length],
                gates=scores.gates[row, 0, :length],
                log_prob=float(log_probs.sum()),
                ended=True,
            )
            others = self._alternatives(scores.log_probs[row, 0, :length], alternatives)
            maps = self._maps(method, grids, row, start, hypothesis)
            caption = self._caption(hypothesis, maps, photo.crop_box, others, method=method)
            explained.append(caption)
        return explained

    def _search(
        self,
        grids: Sequence[Any],
        crop_boxes: Sequence[CropBox],
        options: SearchOptions,
        seeds: Sequence[int],
        *,
        alternatives: int = 0,
        method: ExplanationMethod = "attention",
    ) -> list[list[Caption]]:
        words = encode_search_words(options, self.stored.vocabulary)
        start = self.stored.vocabulary.start(options.style)
        memories = self.ensemble.memories(grids)
        calibrator = None if self.no_confidence(options) else self.stored.calibrator
        evidence = calibrator is not None
        found = self.ensemble.search(memories, options, words, start, seeds, evidence=evidence)
        confidences: list[float | None] = [None] * len(found)
        if calibrator is not None:
            style = options.style or next(iter(self.stored.vocabulary.styles), "")
            observed = self._observations(memories, found)
            confidences = [calibrator.confidence(seen, style) for seen in observed]
        log_probs = None
        if alternatives:  # score the captions again, so that the search need not store every word
            tokens = [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in found]
            log_probs = self.ensemble.score(memories, tokens, start).log_probs
        return [
            [
                self._caption(
                    hypothesis,
                    self._maps(method, grids, row, start, hypothesis),
                    crop_box,
                    ()
                    if log_probs is None
                    else self._alternatives(log_probs[row, column], alternatives),
                    method=method,
                    confidence=None if column else confidences[row],
                )
                for column, hypothesis in enumerate(hypotheses)
            ]
            for row, (crop_box, hypotheses) in enumerate(zip(crop_boxes, found, strict=True))
        ]

    def _alternatives(self, log_probs: NDArray[np.float32], count: int) -> Alternatives:
        """The ``count`` most probable words at every position of (T, V)."""
        if type(count) is not int or count < 0:
            raise ConfigError(f"alternatives is {count!r}; give a whole number, 0 (none) or more")
        if count == 0:
            return ()
        allowed = log_probs.copy()
        allowed[:, list(NEVER_GENERATED)] = -math.inf
        best = top_k(allowed, min(count, allowed.shape[-1] - len(NEVER_GENERATED)))
        shown = self.stored.vocabulary.shown
        return tuple(
            tuple(
                Alternative(END_NAME if token == END else shown([token])[0], value)
                for token, value in zip(tokens, values, strict=True)
            )
            for tokens, values in zip(best[1].tolist(), best[0].tolist(), strict=True)
        )

    def _maps(
        self,
        method: ExplanationMethod,
        grids: Sequence[Any],
        row: int,
        start: int,
        hypothesis: Hypothesis,
    ) -> NDArray[np.float32]:
        """The maps of a caption as ``Caption.alphas`` describes them, (T, L)."""
        found = self.ensemble.explain(method, grids, row, start, hypothesis)
        return found if method in ATTENTION_METHODS else as_map(found)

    def _observations(
        self, memories: Sequence[Any], found: Sequence[Sequence[Hypothesis]]
    ) -> list[Observation]:
        """What is known of the best caption of every photo."""
        photos = self.ensemble.summary(memories)
        observed = []
        for (best, *_), photo in zip(found, photos, strict=True):
            assert best.evidence is not None  # collected on request
            observed.append(
                Observation(
                    text=self._text(best),
                    log_probs=best.token_log_probs,
                    log_prob=best.log_prob,
                    entropies=best.evidence.entropies,
                    share=best.evidence.share,
                    overlap=best.evidence.overlap,
                    photo=photo,
                )
            )
        return observed

    def _caption(
        self,
        hypothesis: Hypothesis,
        maps: NDArray[np.float32],
        crop_box: CropBox,
        alternatives: Alternatives,
        *,
        method: ExplanationMethod,
        confidence: float | None = None,
    ) -> Caption:
        return Caption(
            words=self.stored.vocabulary.shown(hypothesis.tokens),
            log_probs=hypothesis.token_log_probs,
            alphas=maps.reshape(len(maps), *self.engine.grid),
            gates=hypothesis.gates,
            log_prob=hypothesis.log_prob,
            crop_box=crop_box,
            alternatives=alternatives[: len(maps)],
            pieces=self.stored.vocabulary.pieces(hypothesis.tokens),
            geometry=self.engine.geometry.placed(self.engine.preprocessing.image_size, *crop_box),
            method=method,
            confidence=confidence,
        )

    def _text(self, hypothesis: Hypothesis) -> str:
        vocabulary = self.stored.vocabulary
        pieces = vocabulary.pieces(hypothesis.tokens)
        if pieces:
            return "".join(pieces).strip()
        return join_words(vocabulary.shown(hypothesis.tokens))

    def _read(self, photo: Photo) -> _Read:
        image = open_image(photo, min_side=reduced_side(self.ensemble.image_size))
        return _Read(self.prepare(image), shown_photo(image, photo))

    def _try_read(self, photo: Photo) -> tuple[Photo, _Read | ImageError]:
        try:
            return photo, self._read(photo)
        except ImageError as error:
            return photo, error


def _engine(stored: StoredModel | ExportedModel, device: str, precision: Precision) -> Engine:
    if isinstance(stored, ExportedModel):
        return OnnxEngine(stored, device, precision)
    from captioner.torch_engine import TorchEngine

    return TorchEngine(stored.model, device, precision)


def _captions_of(result: Result, number: int) -> list[PhotoCaption]:
    """The captions of a photo in a list; raises its error with its position."""
    if result.error is None:
        return result.captions
    raise type(result.error)(
        f"photos[{number}]: {result.error} (model.stream continues with the other photos)"
    ) from result.error
