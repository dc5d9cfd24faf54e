"""Confidence: the calibrated probability that nothing in a caption is false.

A logistic model estimates it from the caption and the photo alone:

    confidence = familiarity sigmoid(intercept + sum_i weight_i (x_i - mean_i) / scale_i)

``FEATURES`` lists the x. Each style has its own intercept. Each x is limited to its range on the
photos that the model was fitted to, so that nothing is extrapolated. The familiarity is 1 for
photos and falls to 0 for images that do not look like photos; see ``Calibrator.familiarity``.

``captioner.evaluation.fit_confidence`` fits the model to judged captions. Without judgements, a
caption counts as right if its CIDEr-D against reference captions reaches a threshold (default:
0.5). The document frequencies are the model's own. The result is stored in the model folder as
``confidence.safetensors``. This module needs no torch.

Notation: F features, D size of a photo's vector, T words, S stems of the reading.
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
"""The features: log-probability per token, end included; log-odds of the word that is least
probably true; sum of the logarithms of the truths of all words. The last two are 0 without content
words, and for a model without a reading."""


class Observation(NamedTuple):
    """A caption of a photo with all inputs of the confidence model."""

    text: str
    words: tuple[str, ...]
    """The T words, as in the vocabulary."""
    found: Hypothesis
    """The caption as the search found it."""
    photo: NDArray[np.float32]
    """Mean feature of the photo's regions, as the decoder uses them, (D,)."""
    rows: NDArray[np.int64]
    """Row of each word in the reading, (T,) (see ``truth``)."""
    z: NDArray[np.float32]
    """Log-odds that the photo shows each stem, from the reading, (S,)."""

    def log_odds(self, truth: WordTruth | None) -> NDArray[np.float64]:
        """Return the log-odds that each word is true, (T,). Function words have NaN."""
        if truth is None:
            return np.full(len(self.rows), np.nan)
        return truth.log_odds(self.rows, self.found.token_log_probs, self.z)


@dataclass(frozen=True)
class Calibrator:
    """A fitted confidence model with all its numbers."""

    weights: NDArray[np.float64]
    """Weight of each feature, (F,)."""
    mean: NDArray[np.float64]
    """Mean of each feature, (F,)."""
    scale: NDArray[np.float64]
    """Scale of each feature, (F,)."""
    lowest: NDArray[np.float64]
    """Least value of each feature, to which smaller values are raised, (F,)."""
    highest: NDArray[np.float64]
    """Greatest value of each feature, to which larger values are lowered, (F,)."""
    intercepts: Mapping[str, float]
    """Intercept of each style. A model without styles has one for ``""``."""
    truth: WordTruth | None = None
    """The fitted truth of words, or None without a reading or before truth was fitted."""
    kinds: NDArray[np.float32] | None = None
    """Weights of a photo's vector and an intercept, (D + 1,), or None if all images count as
    photos. They compute the log-odds that an image is not a photo."""
    familiar: tuple[float, float] = (0.0, 1.0)
    """Two limits of the log-odds that an image is not a photo. Up to the first, the image is
    familiar. From the second on, its captions have no confidence."""
    search: Mapping[str, Any] = field(default_factory=dict)
    """The search options that the model was fitted for (see `search_key`)."""
    threshold: float | None = 0.5
    """CIDEr-D from which a caption counts as right, or None if fitted to judgements."""
    report: Mapping[str, Any] = field(default_factory=dict)
    """Cross-validated figures, for people to read."""

    def confidence(self, seen: Observation, style: str) -> float:
        """Return the confidence of a caption, 0 to 1, in one of the styles of ``intercepts``."""
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
        """Return the content of the file: ``kinds`` as an array, the rest as JSON in the header."""
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
_PLAIN = ("intercepts", "familiar", "search", "threshold", "report")
"""Fields of ``Calibrator`` in the header: those with a number per feature, and all others."""


def features(seen: Observation, truth: WordTruth | None) -> NDArray[np.float64]:
    """Return the features of a caption, (F,) (see ``FEATURES``)."""
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
    """Return the search options that a confidence depends on, in the form of JSON.

    Options of sampling are left out, because sampled captions have no confidence. Options marked
    ``ANY_CONFIDENCE`` are left out for one of three reasons. They do not change the best caption of
    a beam search, they have their own intercept (``style``), or they leave the confidence nearly as
    good (``neutral``, see docs/confidence.md).
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
    """Return why captions of a model with these styles have no confidence, or None."""
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
    """Read a file's JSON header and arrays.

    Raises:
        ModelError: The file is damaged or was written by a later version, or the block fails.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            (header,) = map(json.loads, file.metadata().values())
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if header["format_version"] > version:
            raise ValueError(f"format {header['format_version']}, not {version}")
        yield header, arrays
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{path} is damaged or of a later release ({error}); delete the file or {advice}"
        ) from error
