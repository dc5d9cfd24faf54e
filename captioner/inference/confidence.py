"""Confidence: a calibrated probability that a caption is right.

A caption is right if people have judged that nothing in it is false. Without judgements, right is
defined on photos with reference captions: the CIDEr-D of the caption against them, under the
model's own document frequencies, is at least a threshold (0.5 by default). A logistic model
estimates the probability from what is known without either:

    confidence = sigmoid(intercept of the style + sum_i weight_i (x_i - mean_i) / scale_i)

``FEATURES`` lists the x. Each is limited to its range on the photos that the model was fitted to,
so that nothing is extrapolated. The confidence of an image that is stranger than nearly all of
them, for which there are no references to learn from, is scaled down to 0; see
``Calibrator.strangeness``.

The model is fitted by ``captioner.evaluation.calibration`` and stored in the model folder, as
``confidence.safetensors``. This module needs no torch.

Notation: F features, D size of a photo's vector, K components.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from captioner.errors import ModelError
from captioner.inference.folder import CONFIDENCE
from captioner.options import SearchOptions
from captioner.text.tokenizer import caption_tokens

if TYPE_CHECKING:
    from captioner.search.search import Hypothesis

FORMAT_VERSION = 2

FEATURES = (
    "mean_log_prob",
    "min_log_prob",
    "mean_entropy",
    "max_entropy",
    "beam_share",
    "beam_overlap",
    "length",
    "rare_words",
    "rare_phrases",
    "photo_strength",
    "photo_unfamiliarity",
    "least_support",
    "joint_support",
)
"""Log-probability per token, that of the least probable word, mean and maximum entropy of the
distributions that the words were chosen from, logarithm of the caption's share of the probability
of its beam, overlap of its words with those of the beam's other captions, number of words, mean
rarity of its words and of its phrases of three words among the training captions, the two measures
of ``PhotoSpace``, and the two of ``WordReading``."""

ANY_VALUE = ("keywords", "neutral", "num_captions", "seed", "style", "top_k", "top_p")
"""Search options that do not change the best caption of a beam search, or have an intercept, or
leave the confidence nearly as good (``neutral``, see docs/confidence.md)."""

_Array = NDArray[np.float32]


class Observation(NamedTuple):
    """What is known of a caption without references."""

    text: str
    found: Hypothesis
    """The caption as the search found it, with its evidence."""
    photo: _Array
    """(D,) mean of the features of the photo's regions, as the decoder uses them."""


@dataclass(frozen=True)
class PhotoSpace:
    """Where the vectors of the training photos lie: around a mean, along K components."""

    mean: _Array
    """(D,)."""
    components: _Array
    """(K, D), orthonormal: the principal components of the training photos."""

    @classmethod
    def fit(cls, photos: NDArray[np.floating[Any]], components: int = 128) -> PhotoSpace:
        """Principal components of the vectors of photos, (N, D).

        At most N / 20 of them, so that they describe other photos nearly as well as these.
        """
        photos = np.asarray(photos, np.float64)
        mean = photos.mean(axis=0)
        rows = np.linalg.svd(photos - mean, full_matrices=False)[2]
        count = max(1, min(components, len(photos) // 20, photos.shape[1] - 1))
        return cls(mean.astype(np.float32), rows[:count].astype(np.float32))

    def measure(self, photo: _Array) -> tuple[float, float]:
        """Strength and unfamiliarity of a photo's vector, (D,).

        Returns:
            Distance from the mean, and the share of it that the components do not explain, 0 to 1.
        """
        away = np.asarray(photo, np.float32) - self.mean
        strength = float(np.linalg.norm(away))
        inside = float(np.linalg.norm(self.components @ away))
        outside = max(strength**2 - inside**2, 0.0) ** 0.5
        return strength, outside / max(strength, 1e-12)


@dataclass(frozen=True)
class WordReading:
    """How much photos speak for words, whatever the decoder says: a logistic reading of vectors.

    The log-odds that people use a word for a photo are linear in its vector.
    """

    words: tuple[str, ...] = ()
    weights: _Array = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """(W, D)."""
    biases: _Array = field(default_factory=lambda: np.zeros(0, np.float32))
    """(W,)."""

    def measure(self, photo: _Array, caption: Sequence[str]) -> tuple[float, float]:
        """Support of a caption by a photo's vector, (D,).

        Returns:
            Log-odds of its least supported word, and logarithm of the product of the probabilities
            of its words; those that the reading does not know are left out. 0 and 0 without any.
        """
        rows = [self.index[word] for word in caption if word in self.index]
        if not rows:
            return 0.0, 0.0
        odds = self.weights[rows] @ photo + self.biases[rows]
        return float(odds.min()), -float(np.logaddexp(0, -odds).sum())

    @cached_property
    def index(self) -> dict[str, int]:
        """The row of each word."""
        return {word: row for row, word in enumerate(self.words)}


@dataclass(frozen=True)
class PhraseTable:
    """How rare words and phrases of three words are in the training captions.

    Rarity is ln(photos / photos whose captions contain the phrase), as in CIDEr. Phrases are kept
    as 32-bit hashes; one that is not in the table is as rare as one of a single photo.
    """

    hashes: NDArray[np.uint32]
    """(P,), sorted."""
    rarities: NDArray[np.float16]
    """(P,)."""
    unknown: float
    """Rarity of a phrase that is not in the table."""

    @classmethod
    def count(cls, documents: int, counts: Mapping[str, int]) -> PhraseTable:
        """Build the table from document frequencies."""
        table = {_hash(gram.split()): n for gram, n in counts.items() if gram.count(" ") in (0, 2)}
        hashes = np.array(sorted(table), np.uint32)
        rarities = [np.log(documents / table[int(value)]) for value in hashes]
        return cls(hashes, np.array(rarities, np.float16), float(np.log(documents)))

    def mean_rarity(self, words: Sequence[str], order: int) -> float:
        """Mean rarity of the phrases of this many words; of a shorter caption, of a rare one."""
        grams = list(zip(*(words[start:] for start in range(order)), strict=False))
        return sum(map(self._rarity, grams)) / len(grams) if grams else self.unknown

    def _rarity(self, gram: Iterable[str]) -> float:
        value = _hash(gram)
        index = int(np.searchsorted(self.hashes, np.uint32(value)))
        found = index < len(self.hashes) and int(self.hashes[index]) == value
        return float(self.rarities[index]) if found else self.unknown


def _hash(gram: Iterable[str]) -> int:
    return zlib.crc32(" ".join(gram).encode("utf-8", "surrogatepass"))


@dataclass(frozen=True)
class Calibrator:
    """A fitted confidence model, with everything that it needs."""

    weights: NDArray[np.float64]
    """(F,)."""
    mean: NDArray[np.float64]
    """(F,)."""
    scale: NDArray[np.float64]
    """(F,)."""
    lowest: NDArray[np.float64]
    """(F,) features are limited to this range."""
    highest: NDArray[np.float64]
    """(F,)."""
    intercepts: Mapping[str, float]
    """By style; of a model without styles, of ``""``."""
    familiar: tuple[float, float]
    """Photos are familiar up to the first strangeness, and have no confidence at the second."""
    space: PhotoSpace
    phrases: PhraseTable
    reading: WordReading = WordReading()
    kinds: _Array | None = None
    """(D + 1,) weights of a photo's vector, and an intercept: log-odds that an image is none."""
    search: Mapping[str, Any] = field(default_factory=dict)
    """The search options that it was fitted for, without ``ANY_VALUE``."""
    threshold: float | None = 0.5
    """CIDEr-D from which a caption counts as right; None: fitted to judgements."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """Cross-validated figures, for people to read."""

    def strangeness(self, photo: _Array) -> float:
        """How unlike photos an image is, from its vector, (D,).

        Log-odds that it is no photo, if the calibrator was fitted to other kinds of images too;
        else its unfamiliarity, see ``PhotoSpace``.
        """
        if self.kinds is None:
            return self.space.measure(photo)[1]
        return float(self.kinds[:-1] @ photo + self.kinds[-1])

    def confidence(self, seen: Observation, style: str) -> float:
        """The confidence of a caption in one of the styles of ``intercepts``, 0 to 1."""
        limited = np.clip(
            features(seen, self.space, self.phrases, self.reading), self.lowest, self.highest
        )
        sum_ = float(self.weights @ ((limited - self.mean) / self.scale)) + self.intercepts[style]
        return sigmoid(sum_) * self.familiarity(seen.photo)

    def familiarity(self, photo: _Array) -> float:
        """1 for nearly all photos, falling to 0 for stranger images; see ``familiar``."""
        start, end = self.familiar
        return min(max((end - self.strangeness(photo)) / (end - start), 0.0), 1.0)

    def to_bytes(self) -> bytes:
        """Content of the file: arrays, and the rest as JSON in its header."""
        arrays: dict[str, NDArray[Any]] = {
            "space.mean": self.space.mean,
            "space.components": self.space.components.astype(np.float16),
            "phrases.hashes": self.phrases.hashes,
            "phrases.rarities": self.phrases.rarities,
            "reading.weights": self.reading.weights.astype(np.float16),
            "reading.biases": self.reading.biases,
        }
        if self.kinds is not None:
            arrays["kinds"] = self.kinds
        header = {
            "format_version": FORMAT_VERSION,
            **{
                n: dict(zip(FEATURES, getattr(self, n).tolist(), strict=True)) for n in _OF_FEATURES
            },
            **{name: getattr(self, name) for name in _PLAIN},
            "unknown_rarity": self.phrases.unknown,
            "words": self.reading.words,
        }
        return save(arrays, metadata={"confidence": json.dumps(header, allow_nan=False)})


_OF_FEATURES = ("weights", "mean", "scale", "lowest", "highest")
_PLAIN = ("intercepts", "familiar", "search", "threshold", "report")
"""Fields of ``Calibrator`` in the header: with a number for each feature, and as they are."""


def features(
    seen: Observation, space: PhotoSpace, phrases: PhraseTable, reading: WordReading
) -> NDArray[np.float64]:
    """The features of a caption, (F,); see ``FEATURES``."""
    words, found = caption_tokens(seen.text), seen.found
    log_probs, evidence = found.token_log_probs, found.evidence
    assert evidence is not None  # collected on request
    length = len(log_probs)
    return np.array(
        [
            found.log_prob / (length + 1),
            float(log_probs.min()) if length else found.log_prob,
            float(evidence.entropies.mean()) if length else 0.0,
            float(evidence.entropies.max()) if length else 0.0,
            np.log(max(evidence.share, 1e-6)),
            evidence.overlap,
            length,
            phrases.mean_rarity(words, 1),
            phrases.mean_rarity(words, 3),
            *space.measure(seen.photo),
            *reading.measure(seen.photo, words),
        ],
        np.float64,
    )


def sigmoid(value: float) -> float:
    """1 / (1 + exp(-value)), without overflow."""
    return float(np.exp(-np.logaddexp(0.0, -value)))


def search_key(options: SearchOptions) -> dict[str, Any]:
    """The search options that a confidence depends on, as JSON has them."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(options).items()
        if name not in ANY_VALUE
    }


def no_confidence(
    calibrator: Calibrator | None, options: SearchOptions, styles: Sequence[str]
) -> str | None:
    """Why captions of a model with these styles have no confidence; None: they have one."""
    if calibrator is None:
        return "the model is not calibrated; run captioner calibrate"
    given, fitted = search_key(options), calibrator.search
    names = [name for name, value in given.items() if value != fitted[name]]
    if min(given["beam_size"], fitted["beam_size"]) > 1:  # any beam is nearly as good
        names = [name for name in names if name != "beam_size"]
    if options.temperature:  # sampling: the options of beam search do not count
        names = ["temperature"]
    if names:
        values = ", ".join(f"{name} {_shown(fitted[name])}" for name in names)
        return (
            f"the model is calibrated for {values}; leave out {', '.join(names)}, or calibrate a "
            "copy of the model for other values"
        )
    style = options.style or next(iter(styles), "")
    if style not in calibrator.intercepts:
        known = ", ".join(calibrator.intercepts)
        return f"the model is calibrated for style {known}, not {style}; run captioner calibrate"
    return None


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value == [] else str(value)


def read_calibrator(folder: Path) -> Calibrator | None:
    """Read the calibrator of a model folder, if it has one; for errors see `read_arrays`."""
    path = folder / CONFIDENCE
    if not path.is_file():
        return None
    with read_arrays(path, FORMAT_VERSION, "run captioner calibrate again") as (header, arrays):
        fields: dict[str, Any] = {name: header[name] for name in _PLAIN}
        fields["familiar"] = tuple(fields["familiar"])
        # Options that are newer than the file had their default.
        fields["search"] = {**search_key(SearchOptions()), **fields["search"]}
        for name in _OF_FEATURES:
            fields[name] = np.array([header[name][feature] for feature in FEATURES])
        return Calibrator(
            **fields,
            space=PhotoSpace(arrays["space.mean"], arrays["space.components"].astype(np.float32)),
            phrases=PhraseTable(
                arrays["phrases.hashes"], arrays["phrases.rarities"], header["unknown_rarity"]
            ),
            reading=WordReading(
                tuple(header["words"]),
                arrays["reading.weights"].astype(np.float32),
                arrays["reading.biases"],
            ),
            kinds=arrays.get("kinds"),
        )


@contextmanager
def read_arrays(
    path: Path, version: int, advice: str
) -> Iterator[tuple[dict[str, Any], dict[str, NDArray[Any]]]]:
    """Read a file's JSON header and arrays; ModelError: it is damaged, or the block fails."""
    try:
        with safe_open(path, framework="numpy") as file:
            (header,) = map(json.loads, file.metadata().values())
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if header["format_version"] != version:
            raise ValueError(f"format {header['format_version']}, not {version}")
        yield header, arrays
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{path} is damaged or of another release ({error}); {advice}, or delete the file"
        ) from error
