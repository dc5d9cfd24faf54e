"""The report of an evaluation: scores with intervals, statistics, a signature, every image.

A report is plain data, ready for JSON; ``as_text`` makes it readable. ``read_captions_of`` takes
the captions of a report or of a COCO results file back, so that two systems can be compared.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from captioner import __version__
from captioner.errors import DataError
from captioner.evaluation.bootstrap import MIN_IMAGES, RESAMPLES, compare, interval, weights
from captioner.evaluation.grounding import Grounding
from captioner.evaluation.metrics import Scores, cider_warning, score, signature
from captioner.evaluation.statistics import describe, describe_texts
from captioner.frequencies import DocumentFrequencies

Report = dict[str, Any]
"""``metrics`` (pycocoevalcap's names and scale), ``intervals`` (95%, low and high), ``statistics``,
``signature``, ``images``, ``per_image``, and what the caller adds."""


def as_json(report: Report) -> str:
    """The report as a JSON file; where there is no number (NaN) stands null."""

    def plain(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: plain(value) for key, value in part.items()}
        if isinstance(part, list | tuple):
            return [plain(value) for value in part]
        return None if isinstance(part, float) and math.isnan(part) else part

    text = json.dumps(plain(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # Half of a surrogate pair, which UTF-8 cannot say, as JSON's escape.
    return text.encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True)
class Judge:
    """What captions are scored by: the same for every system that is compared."""

    references: Mapping[int, Sequence[str]]
    """All true captions by image id."""
    frequencies: DocumentFrequencies | None = None
    """Frozen document frequencies; add CIDEr_D."""
    java: Sequence[str] = ()
    """METEOR, SPICE or both."""
    download: bool = False
    """Let pycocoevalcap fetch what SPICE lacks."""

    def score(self, captions: Mapping[int, str]) -> Scores:
        """Score one caption an image; see ``metrics.score``."""
        return score(
            captions,
            self.references,
            frequencies=self.frequencies,
            java=self.java,
            download=self.download,
        )

    def signature(self, images: Iterable[int]) -> str:
        """What makes numbers comparable: tokenizer, metrics, references, images, version.

        The digest is of the images and their references: the same digest, the same judge.
        """
        ids = sorted(images)
        counts = [len(self.references[i]) for i in ids]
        content = json.dumps([[i, sorted(self.references[i])] for i in ids])
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        each = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        return (
            f"captioner {__version__}, pycocoevalcap {version('pycocoevalcap')} | "
            f"{signature(self.frequencies, self.java)} | {len(ids)} images | {each} "
            f"reference{'' if each == '1' else 's'} an image | references {digest}"
        )


def build(
    captions: Mapping[int, str], judge: Judge, known: Iterable[str] | None = None
) -> tuple[Report, Scores]:
    """Score captions and say how sure the scores are.

    Args:
        captions: Caption by image id.
        judge: What scores them.
        known: The training captions, to tell which captions are new; None: not at hand.

    Raises:
        DataError: Nothing to score, or an image has no references.
    """
    scores = judge.score(captions)
    enough = len(captions) >= MIN_IMAGES
    resampled = scores.resample(weights(len(captions))) if enough else {}
    truth = [text for image_id in captions for text in judge.references[image_id]]
    report: Report = {
        "metrics": scores.corpus,
        "intervals": {
            name: list(interval(resampled[name])) if enough else None for name in scores.corpus
        },
        "resamples": RESAMPLES if enough else 0,
        "statistics": {**describe(captions, known), "references": describe_texts(truth)},
        "signature": judge.signature(captions),
        "images": len(captions),
    }
    warnings = [cider_warning(len(captions), judge.frequencies is not None)]
    warnings += [] if enough else [_too_few(len(captions), "no interval is told")]
    report["warnings"] = [warning for warning in warnings if warning]
    return report, scores


def attention(measured: Grounding) -> dict[str, Any]:
    """What was measured of the attention, and every name."""
    found = measured.summary()
    if found["photos_with_names"] < MIN_IMAGES:
        found["warning"] = _too_few(found["photos_with_names"], "no interval is told")
    return found | {"per_name": [dataclasses.asdict(one) for one in measured.occurrences]}


def _too_few(images: int, then: str) -> str:
    return f"{images} images are too few for the bootstrap, {then}; give {MIN_IMAGES} or more"


def per_image(captions: Mapping[int, str], scores: Scores) -> list[dict[str, Any]]:
    """Caption and scores of every image, by id."""
    return [{"image_id": i, "caption": captions[i], **scores.images[i]} for i in sorted(captions)]


def difference(
    captions: Mapping[int, str],
    others: Mapping[int, str],
    judge: Judge,
    scores: Scores | None = None,
) -> dict[str, Any]:
    """Whether captions score otherwise than those of another system, on the images of both.

    Args:
        captions: Caption by image id.
        others: The other system's.
        judge: What scores both.
        scores: The captions' scores, where they are known already.

    Returns:
        ``images``, and under ``metrics`` for each metric ``this`` and ``other``, the two scores,
        ``difference`` (this minus other), ``interval`` (95%), ``p_value`` and ``significant``; the
        last three None over too few images.

    Raises:
        DataError: The two have no image in common.
    """
    shared = sorted(captions.keys() & others.keys())
    if not shared:
        raise DataError("the two systems have no image in common; compare captions of one set")
    if scores is None or len(shared) < len(captions):
        scores = judge.score({i: captions[i] for i in shared})
    theirs = judge.score({i: others[i] for i in shared})
    metrics: dict[str, dict[str, Any]] = {
        name: {
            "this": value,
            "other": theirs.corpus[name],
            "difference": value - theirs.corpus[name],
        }
        for name, value in scores.corpus.items()
        if name in theirs.corpus
    }
    found: dict[str, Any] = {"images": len(shared), "metrics": metrics}
    if len(shared) < MIN_IMAGES:
        found["warning"] = _too_few(len(shared), "nothing is said of significance")
        verdicts = dict.fromkeys(metrics)
    else:
        drawn = weights(len(shared))
        mine, other = scores.resample(drawn), theirs.resample(drawn)
        verdicts = {
            name: compare(one["this"], one["other"], mine[name], other[name])
            for name, one in metrics.items()
        }
    for name, verdict in verdicts.items():
        metrics[name] |= {
            "interval": None if verdict is None else [verdict.low, verdict.high],
            "p_value": None if verdict is None else verdict.p_value,
            "significant": None if verdict is None else verdict.significant,
        }
    return found


def read_captions_of(path: str | Path) -> dict[int, str]:
    """The captions of a COCO results file, or of a report.

    Raises:
        DataError: The file is missing, is neither, or holds more than one caption of an image.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; give a COCO results file") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder; give a COCO results file") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}); give a COCO results file") from error
    entries = content.get("per_image") if isinstance(content, dict) else content
    if not isinstance(entries, list):
        raise DataError(
            f"{path} is not a COCO results file; give a list of image_id and caption, or a report "
            "of captioner evaluate that scored captions"
        )
    captions: dict[int, str] = {}
    for number, entry in enumerate(entries):
        image_id, caption = (
            (entry.get("image_id"), entry.get("caption")) if isinstance(entry, dict) else (0, None)
        )
        if type(image_id) is not int or not isinstance(caption, str):
            raise DataError(
                f"{path}: entry {number} is no result ({str(entry)[:60]}); give each image_id as a "
                "whole number and each caption as text"
            )
        if image_id in captions:
            raise DataError(
                f"{path} holds more than one caption of image {image_id}; give one an image"
            )
        captions[image_id] = caption
    return captions


# --- text ----------------------------------------------------------------------------------------


def as_text(report: Report) -> str:
    """The report as a person reads it; scores in the usual points, 100 times the numbers."""
    parts = [_about(report)]
    if "metrics" in report:
        parts += [_metrics(report), _statistics(report["statistics"])]
    if "compare" in report:
        parts.append(_compare(report["compare"]))
    if "attention" in report:
        parts.append(_attention(report["attention"]))
    if report.get("warnings"):
        parts.append([_row("note", warning) for warning in report["warnings"]])
    if "signature" in report:
        parts.append([_row("signature", report["signature"])])
    return "\n\n".join("\n".join(lines) for lines in parts)


_LISTED = (
    "metrics", "intervals", "resamples", "statistics", "signature", "warnings", "per_image",
    "compare", "attention",
)  # fmt: skip


def _row(name: str, value: object) -> str:
    return f"{name:<22} {value}"


def _about(report: Report) -> list[str]:
    about = {name: value for name, value in report.items() if name not in _LISTED}
    return [
        _row(name.replace("_", " "), ", ".join(value) if isinstance(value, list) else value)
        for name, value in about.items()
    ]


def _metrics(report: Report) -> list[str]:
    times = report["resamples"]
    lines = [f"points, and 95% intervals ({times} resamples of the images)" if times else "points"]
    for name, value in report["metrics"].items():
        ends = report["intervals"][name]
        between = f"   {100 * ends[0]:6.2f} to {100 * ends[1]:6.2f}" if ends else ""
        note = "   CIDEr under frozen document frequencies" if name == "CIDEr_D" else ""
        lines.append(_row(name, f"{100 * value:6.2f}{between}{note}"))
    return lines


def _statistics(found: Mapping[str, Any]) -> list[str]:
    truth, new = found["references"], found["new"]

    def words(of: Mapping[str, Any]) -> str:
        return f"{of['length_mean']:.1f} ({of['length_min']} to {of['length_max']})"

    lines = [
        _row("", f"{'captions':<16} references"),
        _row("words in a caption", f"{words(found):<16} {words(truth)}"),
        _row("different words", f"{found['vocabulary']:<16} {truth['vocabulary']}"),
        _row("of one image only", f"{100 * found['distinct']:.1f}%"),
        _row(
            "not in training",
            "unknown: give --train-annotations" if new is None else f"{100 * new:.1f}%",
        ),
    ]
    for name in ("repeated_words", "repeated_phrases", "bad_endings"):
        share = f"{100 * found[name]:.1f}%"
        lines.append(_row(name.replace("_", " "), f"{share:<16} {100 * truth[name]:.1f}%"))
    return lines


def _compare(found: Mapping[str, Any]) -> list[str]:
    lines = [f"against {found['with']}, on the {found['images']} images of both"]
    for name, one in found["metrics"].items():
        mine, theirs, apart = (100 * one[key] for key in ("this", "other", "difference"))
        text = f"{mine:6.2f} - {theirs:6.2f} = {apart:+6.2f}"
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


_MEASURED = (
    ("correctness", "share of the attention inside the masks"),
    ("uniform", "of an even map: the masks' share of the area"),
    ("centre", "of a bell in the middle"),
    ("shuffled", "of the caption's other words"),
    ("over_uniform", "correctness - uniform"),
    ("over_centre", "correctness - centre"),
    ("over_shuffled", "correctness - shuffled"),
    ("over_before", "correctness - that of the word before"),
    ("over_after", "correctness - that of the word after"),
    ("ratio", "correctness / uniform; 1: no better than even"),
    ("pointing", "the middle of the most attended region lies in a mask"),
    ("pointing_uniform", "of a region at random"),
    ("pointing_centre", "of the middle of the photo"),
)


def _attention(found: Mapping[str, Any]) -> list[str]:
    lines = [
        "attention on the objects that words name, and 95% intervals over photos: "
        f"{found['measured']} names measured in {found['photos_with_names']} of "
        f"{found['photos']} photos",
        _row(
            "not measured",
            f"{found['absent']} names of what is not in the photo, {found['unseen']} of what lies "
            f"out of view, {found['ignored']} of crowds alone",
        ),
    ]
    if not found["measured"]:
        return lines
    for name, text in _MEASURED:
        ends = found["intervals"].get(name)
        between = f"({ends[0]:.3f} to {ends[1]:.3f})" if ends else ""
        lines.append(_row(name.replace("_", " "), f"{_number(found[name])} {between:<18} {text}"))
    shift = found["shift"]
    moved = ", ".join(f"{place}: {_number(shift[place])}" for place in ("-1", "0", "+1"))
    return [
        *lines,
        _row("shifted by a word", f"{moved} ({shift['names']} names with a word on both sides)"),
        _row("gate", f"{_number(found['gate'])} at the names"),
        _row(
            "entropy", f"{_number(found['entropy'])} nats, even: {_number(found['entropy_even'])}"
        ),
        _row("movement", f"{_number(found['movement'])} between two words' maps, 0 to 1"),
        *([_row("note", found["warning"])] if "warning" in found else []),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
