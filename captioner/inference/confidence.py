"""Confidence: the calibrated probability that nothing in a caption is false.

A logistic model estimates the confidence from the caption and the photo:

    confidence = familiarity sigmoid(intercept + sum_i weight_i (x_i - mean_i) / scale_i)

``FEATURES`` lists the features x_i. Each style has its own intercept. Each feature is limited to
its range on the photos that the model was fitted to, so that the model never extrapolates. The
familiarity is 1 for photos and falls to 0 for images that do not look like photos (see
``Calibrator.familiarity``).

``captioner.evaluation.fit_confidence`` fits the model to judged captions. Without judgements, a
caption counts as right if its CIDEr-D against reference captions reaches a threshold (default:
0.5). CIDEr-D uses the document frequencies in the model folder. The fitted model is stored in the
same folder as ``confidence.safetensors``. This module does not need torch.

Notation: F features, D size of a photo's vector, T words, S word stems that the captioning model
can recognize in a photo (see ``inference.reading``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from captioner.errors import ModelError
from captioner.inference.names import CONFIDENCE
from captioner.inference.truth import WordTruth
from captioner.options import Role, SearchOptions
from captioner.schema import marked

if TYPE_CHECKING:
    from captioner.search.search import Hypothesis

FORMAT_VERSION = 3

FEATURES = ("mean_log_prob", "least_true", "all_true")
"""The names of the F features.

mean_log_prob: log-probability of the caption per token, including the end token.
least_true: log-odds of the content word that is least likely to be true.
all_true: log-probability that all content words are true.

The last two features are 0 if the caption has no content words or the model has no reading.
"""


class Observation(NamedTuple):
    """A caption of a photo, with all inputs of the confidence model."""

    text: str
    words: tuple[str, ...]
    """The T words, as in the vocabulary."""
    found: Hypothesis
    """The caption as the search found it."""
    photo: NDArray[np.float32]
    """The photo's vector: the mean of the features of its regions, as the decoder uses them,
    (D,)."""
    rows: NDArray[np.int64]
    """Index of each word's stem, (T,). Content words without a stem have ``UNKNOWN_WORD`` (-2), and
    function words have ``FUNCTION_WORD`` (-1)."""
    z: NDArray[np.float32]
    """Natural log-odds that the photo shows each of S word stems, such as dog for dogs, (S,)."""

    def log_odds(self, truth: WordTruth | None) -> NDArray[np.float64]:
        """Return the log-odds that each word is true of the photo, (T,). Function words have NaN.

        ``truth`` is the fitted equation for them, or None if it was not fitted.
        """
        if truth is None:
            return np.full(len(self.rows), np.nan)
        return truth.log_odds(self.rows, self.found.token_log_probs, self.z)


@dataclass(frozen=True)
class Calibrator:
    """A fitted model of the confidence, the probability that nothing in a caption is false."""

    weights: NDArray[np.float64]
    """Weight of each feature, (F,)."""
    mean: NDArray[np.float64]
    """Mean of each feature, (F,). It is subtracted from the feature."""
    scale: NDArray[np.float64]
    """Scale of each feature, (F,). The feature is divided by it."""
    lowest: NDArray[np.float64]
    """Lower limit of each feature, (F,). Smaller values are raised to this limit."""
    highest: NDArray[np.float64]
    """Upper limit of each feature, (F,). Larger values are lowered to this limit."""
    intercepts: Mapping[str, float]
    """Intercept of each style. A model without styles has one intercept, with the key ``""``."""
    truth: WordTruth | None = None
    """The fitted equation for the truth of each word, or None if it was not fitted. Truth is the
    probability that the word is true of the photo."""
    kinds: NDArray[np.float32] | None = None
    """Coefficients of a linear model for the log-odds that an image is not a photo, (D + 1,). The
    last coefficient is the intercept. None if all images count as photos."""
    familiar: tuple[float, float] = (0.0, 1.0)
    """Two limits for the log-odds that an image is not a photo. The familiarity is 1 up to the
    first limit, falls linearly, and is 0 from the second limit on."""
    search: Mapping[str, Any] = field(default_factory=dict)
    """The search options that the model was fitted for (see `search_key`)."""
    threshold: float | None = 0.5
    """Least CIDEr-D of a caption that counts as right, or None if the model was fitted to
    judgements."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """Cross-validated scores of the confidence model, for information only."""

    def confidence(self, seen: Observation, style: str) -> float:
        """Return the confidence of a caption, 0 to 1. The style is a key of ``intercepts``."""
        limited = np.clip(features(seen, self.truth), self.lowest, self.highest)
        sum_ = float(self.weights @ ((limited - self.mean) / self.scale)) + self.intercepts[style]
        return sigmoid(sum_) * self.familiarity(seen.photo)

    def familiarity(self, photo: NDArray[np.float32]) -> float:
        """Return how much an image looks like a photo, from 1 down to 0.

        Args:
            photo: The vector of the image, (D,).
        """
        if self.kinds is None:
            return 1.0
        start, end = self.familiar
        strangeness = float(self.kinds[:-1] @ photo + self.kinds[-1])
        return min(max((end - strangeness) / (end - start), 0.0), 1.0)

    def to_bytes(self) -> bytes:
        """Return the content of ``confidence.safetensors``.

        ``kinds`` is stored as an array. All other fields are stored as JSON in the header.
        """
        header = {
            "format_version": FORMAT_VERSION,
            **{
                n: dict(zip(FEATURES, getattr(self, n).tolist(), strict=True)) for n in _OF_FEATURES
            },
            **{name: getattr(self, name) for name in _PLAIN},
            "truth": None if self.truth is None else asdict(self.truth),
        }
        arrays = {} if self.kinds is None else {"kinds": self.kinds}
        return save(arrays, metadata={"confidence": json.dumps(header, allow_nan=False)})


_OF_FEATURES = ("weights", "mean", "scale", "lowest", "highest")
"""Fields of ``Calibrator`` that contain one number per feature."""
_PLAIN = ("intercepts", "familiar", "search", "threshold", "report")
"""Fields of ``Calibrator`` that are stored unchanged in the header."""


def features(seen: Observation, truth: WordTruth | None) -> NDArray[np.float64]:
    """Return the features of a caption from which its confidence is computed, (F,).

    ``FEATURES`` lists them. ``truth`` is the equation for the probability that each word is true of
    the photo, or None if the model has no such equation.
    """
    odds = seen.log_odds(truth)
    odds = odds[~np.isnan(odds)]
    return np.array(
        [
            seen.found.log_prob / (len(seen.rows) + 1),
            odds.min() if len(odds) else 0.0,
            -np.logaddexp(0, -odds).sum(),
        ],
        np.float64,
    )


def sigmoid(value: float) -> float:
    """Return 1 / (1 + exp(-value)) without overflow."""
    return float(np.exp(-np.logaddexp(0.0, -value)))


def search_key(options: SearchOptions) -> dict[str, Any]:
    """Return the search options that affect the confidence, as JSON values.

    Sampling options are left out, because sampled captions have no confidence. Options marked
    ``ANY_CONFIDENCE`` are left out, because most of them do not change the best caption of a beam
    search. Among them, ``style`` has its own intercept, and ``neutral`` makes the confidence only
    slightly less accurate (docs/confidence.md).
    """
    left_out = {
        *marked(SearchOptions, Role.ANY_CONFIDENCE),
        *marked(SearchOptions, Role.SAMPLING),
    }
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(options).items()
        if name not in left_out
    }


def no_confidence(
    calibrator: Calibrator | None, options: SearchOptions, styles: Sequence[str]
) -> str | None:
    """Return the reason why a search computes no confidence, or None if it computes one.

    Args:
        calibrator: The calibrator of the model, or None if the model is not calibrated.
        options: The search options.
        styles: The styles of the model.
    """
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
        return (
            f"the model is calibrated for style {known}, not {style}; set style to a calibrated "
            f"style, or run captioner calibrate with --styles {style}"
        )
    return None


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value == [] else str(value)


def read_calibrator(folder: Path) -> Calibrator | None:
    """Read the calibrator of a model folder, or return None if the model is not calibrated.

    A file in the format of an earlier version is ignored.

    Raises:
        ModelError: The file is damaged or was written by a later version.
    """
    path = folder / CONFIDENCE
    if not path.is_file():
        return None
    with read_arrays(path, FORMAT_VERSION, "calibrate the model again") as (header, arrays):
        if header["format_version"] < FORMAT_VERSION:
            return None
        fields: dict[str, Any] = {name: header[name] for name in _PLAIN}
        fields["familiar"] = tuple(fields["familiar"])
        # Options that were added after the file was written had their defaults then.
        fields["search"] = {**search_key(SearchOptions()), **fields["search"]}
        for name in _OF_FEATURES:
            fields[name] = np.array([header[name][feature] for feature in FEATURES])
        truth = header["truth"] and WordTruth(**header["truth"])
        return Calibrator(**fields, truth=truth, kinds=arrays.get("kinds"))


@contextmanager
def read_arrays(
    path: Path, version: int, advice: str
) -> Iterator[tuple[dict[str, Any], dict[str, NDArray[Any]]]]:
    """Read the JSON header and the arrays of a safetensors file.

    Args:
        path: The file.
        version: Latest version of the format that this code can read.
        advice: The end of the error message. It names an alternative to deleting the file.

    Raises:
        ModelError: The file is damaged or was written by a later version, or the block cannot use
            its content.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            (header,) = map(json.loads, file.metadata().values())
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if header["format_version"] > version:
            raise ValueError(f"format {header['format_version']}, supported: {version}")
        yield header, arrays
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{path} is damaged or from a later captioner release ({error}); update captioner, "
            f"delete the file, or {advice}"
        ) from error
