"""The report of an evaluation: scores with intervals, statistics, a signature, every image.

A report is plain data, ready for JSON; ``as_text`` makes it readable. ``read_captions_of`` takes
the captions of a report or of a COCO results file back, so that two systems can be compared.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from captioner import __version__
from captioner.errors import DataError
from captioner.evaluation.bootstrap import compare, interval, weights
from captioner.evaluation.metrics import Scores, cider_warning, score, signature
from captioner.evaluation.statistics import describe
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

    return json.dumps(plain(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


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
        content = json.dumps([[i, list(self.references[i])] for i in ids])
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        each = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
        return (
            f"captioner {__version__} | {signature(self.frequencies, self.java)} | {len(ids)} "
            f"images | {each} references an image | references {digest}"
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
    resampled = scores.resample(weights(len(captions)))
    report: Report = {
        "metrics": scores.corpus,
        "intervals": {name: list(interval(values)) for name, values in resampled.items()},
        "statistics": describe(captions, known),
        "signature": judge.signature(captions),
        "images": len(captions),
    }
    if warning := cider_warning(len(captions)):
        report["warning"] = warning
    return report, scores


def per_image(captions: Mapping[int, str], scores: Scores) -> list[dict[str, Any]]:
    """Caption and scores of every image, by id."""
    return [{"image_id": i, "caption": captions[i], **scores.images[i]} for i in sorted(captions)]


def difference(
    captions: Mapping[int, str], others: Mapping[int, str], judge: Judge
) -> dict[str, Any]:
    """Whether captions score otherwise than those of another system, on the images of both.

    Returns:
        ``images``, and under ``metrics`` for each metric the two scores, ``difference`` (these
        captions minus the others), ``interval`` (95%), ``p_value`` and ``significant``.

    Raises:
        DataError: The two have no image in common.
    """
    shared = sorted(captions.keys() & others.keys())
    if not shared:
        raise DataError("the two systems have no image in common; compare captions of one set")
    both = [judge.score({i: one[i] for i in shared}) for one in (captions, others)]
    drawn = weights(len(shared))
    resampled = [scores.resample(drawn) for scores in both]
    metrics = {}
    for name in both[0].corpus:
        mine, theirs = (scores.corpus[name] for scores in both)
        found = compare(mine, theirs, resampled[0][name], resampled[1][name])
        metrics[name] = {
            "this": mine,
            "other": theirs,
            "difference": found.difference,
            "interval": [found.low, found.high],
            "p_value": found.p_value,
            "significant": found.significant,
        }
    return {"images": len(shared), "metrics": metrics}


def read_captions_of(path: str | Path) -> dict[int, str]:
    """The captions of a COCO results file, or of a report.

    Raises:
        DataError: The file is missing, is neither, or holds more than one caption of an image.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        entries = content["per_image"] if isinstance(content, dict) else content
        captions = {int(entry["image_id"]): str(entry["caption"]) for entry in entries}
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; give a COCO results file") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder; give a COCO results file") from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path} is not a COCO results file ({error}); give a list of image_id and caption, or "
            "a report of captioner evaluate"
        ) from error
    if len(captions) != len(entries):
        raise DataError(f"{path} holds more than one caption of an image; give one an image")
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
    for name in ("warning", "signature"):
        if name in report:
            parts.append([_row(name, report[name])])
    return "\n\n".join("\n".join(lines) for lines in parts)


_LISTED = (
    "metrics", "intervals", "statistics", "signature", "warning", "per_image", "compare",
    "attention",
)  # fmt: skip


def _row(name: str, value: object) -> str:
    return f"{name:<22} {value}"


def _about(report: Report) -> list[str]:
    about = {name: value for name, value in report.items() if name not in _LISTED}
    return [
        _row(name, ", ".join(map(str, value)) if isinstance(value, list) else value)
        for name, value in about.items()
    ]


def _points(low_high: Sequence[float]) -> str:
    low, high = low_high
    return "" if math.isnan(low) else f"   {100 * low:6.2f} to {100 * high:6.2f}"


def _metrics(report: Report) -> list[str]:
    lines = ["points, with their 95% intervals over images"]
    for name, value in report["metrics"].items():
        lines.append(_row(name, f"{100 * value:6.2f}{_points(report['intervals'][name])}"))
    return lines


def _statistics(found: Mapping[str, Any]) -> list[str]:
    new = found["new"]
    shares = {name: found[name] for name in ("repeated_words", "repeated_phrases", "bad_endings")}
    return [
        "captions",
        _row(
            "words",
            f"{found['length_mean']:.1f} a caption, {found['length_min']} to "
            f"{found['length_max']}; {found['vocabulary']} different ones",
        ),
        _row("of one image only", f"{100 * found['distinct']:.1f}%"),
        _row(
            "not in training",
            "unknown (give --train-annotations)" if new is None else f"{100 * new:.1f}%",
        ),
        *(_row(name.replace("_", " "), f"{100 * value:.1f}%") for name, value in shares.items()),
    ]


def _compare(found: Mapping[str, Any]) -> list[str]:
    lines = [f"against {found['with']}, on the {found['images']} images of both"]
    for name, one in found["metrics"].items():
        verdict = "significant" if one["significant"] else "not significant"
        lines.append(
            _row(
                name,
                f"{100 * one['this']:6.2f} - {100 * one['other']:6.2f} = "
                f"{100 * one['difference']:+6.2f}{_points(one['interval'])}   "
                f"p {one['p_value']:.3f}, {verdict}",
            )
        )
    return lines


def _attention(found: Mapping[str, Any]) -> list[str]:
    lines = [
        f"attention on the objects that words name: {found['measured']} names measured in "
        f"{found['photos']} photos",
        _row(
            "not measured",
            f"{found['absent']} of what is not in the photo, {found['unseen']} of what lies out "
            f"of view, {found['ignored']} of crowds alone",
        ),
    ]
    if not found["measured"]:
        return lines
    for name, text in (
        ("correctness", "share of the attention inside the masks"),
        ("uniform", "the same of an even map: the masks' share of the area"),
        ("centre", "the same of a bell in the middle"),
        ("shuffled", "the same of the caption's other words"),
        ("over_shuffled", "correctness - shuffled; 0: the map is no more the word's own"),
        ("ratio", "correctness / uniform; 1: no better than even"),
        ("pointing", "the middle of the most attended region lies in a mask"),
        ("pointing_uniform", "the same of a region at random"),
        ("pointing_centre", "the same of the middle of the photo"),
    ):
        lines.append(_row(name, f"{_number(found[name])}{_ends(found, name)}   {text}"))
    shift = found["shift"]
    moved = ", ".join(f"{place}: {_number(shift[place])}" for place in ("-1", "0", "+1"))
    lines += [
        _row("shifted by a word", f"{moved} ({shift['names']} names with a word on both sides)"),
        _row("gate", f"{_number(found['gate'])} at the names"),
        _row(
            "entropy", f"{_number(found['entropy'])} nats, even: {_number(found['entropy_even'])}"
        ),
        _row("movement", f"{_number(found['movement'])} from word to word, 0 to 1"),
    ]
    return lines


def _number(value: float | None) -> str:
    return "  -  " if value is None else f"{value:.3f}"


def _ends(found: Mapping[str, Any], name: str) -> str:
    ends = found["intervals"].get(name)
    return f" ({ends[0]:.3f} to {ends[1]:.3f})" if ends else ""
