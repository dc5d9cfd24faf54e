"""The evaluation report: scores with intervals, statistics, a signature and per-image results.

A report is JSON data; ``as_text`` formats it as text. ``read_captions_of`` reads the captions of a
report or of a COCO results file, so that two systems can be compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from captioner.errors import DataError
from captioner.evaluation.bootstrap import (
    MIN_IMAGES,
    RESAMPLES,
    compare,
    interval,
    resample_blocks,
)
from captioner.evaluation.faithfulness_report import as_lines as faithfulness_lines
from captioner.evaluation.frequencies import DocumentFrequencies
from captioner.evaluation.grounding import Grounding
from captioner.evaluation.metrics import PYCOCOEVALCAP, Scores, cider_warning, score, signature
from captioner.evaluation.statistics import describe, describe_texts
from captioner.files import read_input
from captioner.text.tokenizer import has_unspaced
from captioner.version import __version__

Report = dict[str, Any]
"""``metrics`` (pycocoevalcap's names and scale), ``intervals`` (95%, low and high), ``statistics``,
``signature``, ``images``, ``per_image``, and keys that the caller adds."""


def as_json(report: Report) -> str:
    """The report as JSON text; NaN becomes null."""

    def plain(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: plain(value) for key, value in part.items()}
        if isinstance(part, list | tuple):
            return [plain(value) for value in part]
        return None if isinstance(part, float) and math.isnan(part) else part

    text = json.dumps(plain(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # Lone surrogates, which UTF-8 cannot encode, become JSON escapes.
    return text.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class CaptionEvaluator:
    """Scores captions against references, with the same settings for all systems compared."""

    references: Mapping[int, Sequence[str]]
    """All reference captions by image id."""
    frequencies: DocumentFrequencies | None = None
    """Frozen document frequencies; adds CIDEr_D."""
    java: Sequence[str] = ()
    """METEOR, SPICE or both."""
    download: bool = False
    """Let pycocoevalcap download CoreNLP for SPICE."""

    def score(self, captions: Mapping[int, str]) -> Scores:
        """Score one caption per image; see ``metrics.score``."""
        return score(
            captions,
            self.references,
            frequencies=self.frequencies,
            java=self.java,
            download=self.download,
        )

    def signature(self, images: Iterable[int]) -> str:
        """Versions, tokenizer, metrics and a digest of the images and their references.

        Scores are comparable if their signatures are equal.
        """
        ids = sorted(images)
        counts = [len(self.references[i]) for i in ids]
        content = json.dumps([[i, sorted(self.references[i])] for i in ids])
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        characters = any(has_unspaced(text) for i in ids for text in self.references[i])
        each = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        return (
            f"captioner {__version__}, pycocoevalcap {PYCOCOEVALCAP} | "
            f"{signature(self.frequencies, self.java, characters=characters)} | "
            f"{len(ids)} images | {each} "
            f"reference{'' if each == '1' else 's'} an image | references {digest}"
        )


def build(
    captions: Mapping[int, str], evaluator: CaptionEvaluator, known: Iterable[str] | None = None
) -> tuple[Report, Scores]:
    """Score captions with bootstrap intervals and statistics.

    Args:
        captions: Caption by image id.
        evaluator: Scores the captions.
        known: Training captions, if available, to find new captions.

    Raises:
        DataError: There are no captions, or an image has no references.
    """
    scores = evaluator.score(captions)
    enough = len(captions) >= MIN_IMAGES
    (resampled,) = _resample(scores) if enough else [{}]
    references = [text for image_id in captions for text in evaluator.references[image_id]]
    report: Report = {
        "metrics": scores.corpus,
        "intervals": {
            name: list(interval(resampled[name])) if enough else None for name in scores.corpus
        },
        "resamples": RESAMPLES if enough else 0,
        "statistics": {**describe(captions, known), "references": describe_texts(references)},
        "signature": evaluator.signature(captions),
        "images": len(captions),
    }
    warnings = [
        cider_warning(len(captions), evaluator.frequencies is not None),
        None if enough else _too_few(len(captions), "images", "confidence intervals"),
    ]
    report["warnings"] = [warning for warning in warnings if warning]
    return report, scores


def _resample(*systems: Scores) -> list[dict[str, NDArray[np.float64]]]:
    """Scores of each system, of the same images, in the same resamples of them."""
    blocks = [
        [system.resample(rows) for system in systems]
        for rows in resample_blocks(len(systems[0].images))
    ]
    return [
        {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        for parts in zip(*blocks, strict=True)
    ]


def attention(measured: Grounding) -> dict[str, Any]:
    """The attention part of a report: summary and every name."""
    found = measured.summary()
    photos = found["photos_with_names"]
    if photos < MIN_IMAGES:
        found["warning"] = _too_few(photos, "photos with names", "confidence intervals")
    return found | {"per_name": [dataclasses.asdict(one) for one in measured.occurrences]}


def _too_few(count: int, unit: str, purpose: str) -> str:
    return f"{count} {unit} are too few for {purpose} (needs {MIN_IMAGES})"


def per_image(captions: Mapping[int, str], scores: Scores) -> list[dict[str, Any]]:
    """Caption and scores of each image, by id."""
    return [{"image_id": i, "caption": captions[i], **scores.images[i]} for i in sorted(captions)]


def difference(
    captions: Mapping[int, str],
    others: Mapping[int, str],
    evaluator: CaptionEvaluator,
    scores: Scores | None = None,
) -> dict[str, Any]:
    """Compare two systems on the images that both captioned.

    Args:
        captions: Caption by image id.
        others: Captions of the other system.
        evaluator: Scores both.
        scores: Scores of ``captions``, if already computed.

    Returns:
        ``images``, and under ``metrics`` for each metric ``this`` and ``other`` (the scores),
        ``difference`` (this minus other), ``interval`` (95%), ``p_value`` and ``significant``; the
        last three are None for too few images.

    Raises:
        DataError: The systems have no image in common.
    """
    shared = sorted(captions.keys() & others.keys())
    if not shared:
        raise DataError("the two systems have no image in common; compare captions of one set")
    if scores is None or len(shared) < len(captions):
        scores = evaluator.score({i: captions[i] for i in shared})
    other_scores = evaluator.score({i: others[i] for i in shared})
    metrics: dict[str, dict[str, Any]] = {
        name: {
            "this": value,
            "other": other_scores.corpus[name],
            "difference": value - other_scores.corpus[name],
        }
        for name, value in scores.corpus.items()
        if name in other_scores.corpus
    }
    found: dict[str, Any] = {"images": len(shared), "metrics": metrics}
    if len(shared) < MIN_IMAGES:
        found["warning"] = _too_few(len(shared), "images", "a significance test")
        for name in metrics:
            metrics[name] |= dict.fromkeys(("interval", "p_value", "significant"))
        return found
    this, other = _resample(scores, other_scores)
    for name, metric in metrics.items():
        test = compare(metric["this"], metric["other"], this[name], other[name])
        metrics[name] |= {
            "interval": [test.low, test.high],
            "p_value": test.p_value,
            "significant": test.significant,
        }
    return found


_RESULTS = "give a COCO results file (captioner caption --annotations ... --format coco)"


def read_captions_of(path: str | Path) -> dict[int, str]:
    """Read the captions of a COCO results file or of a report, by image id.

    With or without a byte order mark, as captions files.

    Raises:
        DataError: The file is missing, is neither, or has more than one caption of an image.
    """
    data = read_input(path, "a COCO results file")
    captions: dict[int, str] = {}
    try:
        content = json.loads(data.decode("utf-8-sig"))
        entries = content["per_image"] if isinstance(content, dict) else content
        found = [(entry["image_id"], entry["caption"]) for entry in entries]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a COCO results file ({error}); {_RESULTS}") from error
    for image_id, caption in found:
        if type(image_id) is not int or not isinstance(caption, str):
            raise DataError(
                f"{path}: image_id {image_id!r} with caption {caption!r:.60} is invalid, they are "
                f"an integer and a text; {_RESULTS}"
            )
        if image_id in captions:
            raise DataError(
                f"{path} has more than one caption of image {image_id}; give one per image"
            )
        captions[image_id] = caption
    return captions


# --- text ----------------------------------------------------------------------------------------


def as_text(report: Report) -> str:
    """The report as text, with scores in points (times 100)."""
    parts = [_about(report)]
    if "metrics" in report:
        parts += [_metrics(report), _statistics(report["statistics"])]
    if "compare" in report:
        parts.append(_compare(report["compare"]))
    if "attention" in report:
        parts.append(_attention(report["attention"]))
    if "faithfulness" in report:
        parts.append(faithfulness_lines(report["faithfulness"]))
    if report.get("warnings"):
        parts.append([_row("note", warning) for warning in report["warnings"]])
    if "signature" in report:
        parts.append([_row("signature", report["signature"])])
    return "\n\n".join("\n".join(lines) for lines in parts)


_LISTED = (
    "metrics", "intervals", "resamples", "statistics", "signature", "warnings", "per_image",
    "compare", "attention", "faithfulness",
)  # fmt: skip


def _row(name: str, value: object) -> str:
    return f"{name:<22} {value}"


def _about(report: Report) -> list[str]:
    return [
        _row(name.replace("_", " "), ", ".join(value) if isinstance(value, list) else value)
        for name, value in report.items()
        if name not in _LISTED
    ]


def _metrics(report: Report) -> list[str]:
    resamples = report["resamples"]
    lines = [
        f"points and 95% intervals ({resamples} bootstrap resamples of the images)"
        if resamples
        else "points"
    ]
    for name, value in report["metrics"].items():
        ends = report["intervals"][name]
        bounds = f"   {100 * ends[0]:6.2f} to {100 * ends[1]:6.2f}" if ends else ""
        note = "   CIDEr with frozen document frequencies" if name == "CIDEr_D" else ""
        lines.append(_row(name, f"{100 * value:6.2f}{bounds}{note}"))
    return lines


def _statistics(found: Mapping[str, Any]) -> list[str]:
    references, new = found["references"], found["new"]

    def words(of: Mapping[str, Any]) -> str:
        return f"{of['length_mean']:.1f} ({of['length_min']} to {of['length_max']})"

    lines = [
        _row("", f"{'captions':<16} references"),
        _row("words per caption", f"{words(found):<16} {words(references)}"),
        _row("distinct words", f"{found['vocabulary']:<16} {references['vocabulary']}"),
        _row("unique captions", f"{100 * found['distinct']:.1f}%"),
        _row(
            "not in training",
            "unknown (give --train-annotations)" if new is None else f"{100 * new:.1f}%",
        ),
    ]
    for name in ("repeated_words", "repeated_phrases", "bad_endings"):
        share = f"{100 * found[name]:.1f}%"
        lines.append(_row(name.replace("_", " "), f"{share:<16} {100 * references[name]:.1f}%"))
    return lines


def _compare(found: Mapping[str, Any]) -> list[str]:
    lines = [f"compared with {found['with']} on {found['images']} common images"]
    for name, one in found["metrics"].items():
        this, other, difference = (100 * one[key] for key in ("this", "other", "difference"))
        text = f"{this:6.2f} - {other:6.2f} = {difference:+6.2f}"
        if one["interval"] is not None:
            low, high = one["interval"]
            verdict = "significant" if one["significant"] else "not significant"
            least = 2 / (RESAMPLES + 1)
            p_value = "p < 0.002" if one["p_value"] <= least else f"p {one['p_value']:.3f}"
            text += f"   {100 * low:+6.2f} to {100 * high:+6.2f}   {p_value}, {verdict}"
        lines.append(_row(name, text))
    if "warning" in found:
        lines.append(_row("note", found["warning"]))
    return lines


_ATTENTION_ROWS = (
    ("correctness", "share of the attention inside the masks"),
    ("uniform", "uniform baseline: share of the area inside the masks"),
    ("centre", "centre-Gaussian baseline"),
    ("shuffled", "baseline: maps of the other words of the caption"),
    ("over_uniform", "correctness - uniform"),
    ("over_centre", "correctness - centre"),
    ("over_shuffled", "correctness - shuffled"),
    ("over_before", "correctness - correctness of the word before"),
    ("over_after", "correctness - correctness of the word after"),
    ("ratio", "correctness / uniform; 1 = no better than uniform"),
    ("pointing", "centre of the most attended region is inside a mask"),
    ("pointing_uniform", "baseline: random region"),
    ("pointing_centre", "baseline: centre of the photo"),
)


def _attention(found: Mapping[str, Any]) -> list[str]:
    lines = [
        "attention on named objects, with 95% intervals over photos: "
        f"{found['measured']} names measured in {found['photos_with_names']} of "
        f"{found['photos']} photos",
        _row(
            "not measured",
            f"{found['absent']} names not in the photo, {found['unseen']} outside the crop, "
            f"{found['ignored']} crowds only",
        ),
    ]
    if not found["measured"]:
        return lines
    for name, text in _ATTENTION_ROWS:
        ends = found["intervals"].get(name)
        bounds = f"({ends[0]:.3f} to {ends[1]:.3f})" if ends else ""
        lines.append(_row(name.replace("_", " "), f"{_number(found[name])} {bounds:<18} {text}"))
    shift = found["shift"]
    shifted = ", ".join(f"{offset}: {_number(shift[offset])}" for offset in ("-1", "0", "+1"))
    return [
        *lines,
        _row("shifted by a word", f"{shifted} ({shift['names']} names with two neighbours)"),
        _row("gate", f"{_number(found['gate'])} (mean over names)"),
        _row(
            "entropy",
            f"{_number(found['entropy'])} nats (uniform: {_number(found['entropy_even'])})",
        ),
        _row("movement", f"{_number(found['movement'])} (0 to 1) between the maps of two words"),
        *([_row("note", found["warning"])] if "warning" in found else []),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
