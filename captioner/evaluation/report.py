"""The evaluation report: scores with intervals, statistics, a signature and per-image results.

A report is JSON data; ``as_text`` formats it as text. ``read_captions_of`` reads the captions of a
report or of a COCO results file, so that two systems can be compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from captioner.errors import DataError
from captioner.evaluation.bootstrap import (
    MIN_IMAGES,
    RESAMPLES,
    Significance,
    compare,
    interval,
    resample_blocks,
    too_few,
)
from captioner.evaluation.deletion import CURVES, ORDERS
from captioner.evaluation.metrics import CaptionEvaluator, Scores
from captioner.evaluation.statistics import describe, describe_texts
from captioner.files import read_input
from captioner.options import METHOD_TITLES

Report = dict[str, Any]
"""``metrics`` (pycocoevalcap's names and scale), ``intervals`` (95%, low and high), ``statistics``,
``signature``, ``images``, ``per_image``, and keys that the caller adds."""

MIN_IMAGES_FOR_CIDER = 100
"""Fewest images for useful document frequencies in CIDEr."""


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


def build(
    captions: Mapping[int, str], evaluator: CaptionEvaluator, known: Iterable[str] | None = None
) -> tuple[Report, Scores]:
    """Score captions, by image id, with bootstrap intervals and statistics.

    ``known`` are training captions, to find new captions.

    Raises:
        DataError: There are no captions, or an image has no references.
    """
    scores = evaluator.score(captions)
    count = len(captions)
    resampled: Mapping[str, Any] = {}
    warnings = []
    if count < MIN_IMAGES_FOR_CIDER:
        noisy = "of one image is always 0" if count == 1 else f"of {count} images is noisy"
        hint = "use CIDEr_D"
        if evaluator.frequencies is None:
            more = f"score {MIN_IMAGES_FOR_CIDER} or more images"
            hint = f"{more}, or {hint} (captioner prepare frequencies)"
        warnings.append(
            f"CIDEr {noisy}, as its document frequencies come from the scored images; {hint}"
        )
    if count < MIN_IMAGES:
        warnings.append(too_few(count, "images", "confidence intervals"))
    else:
        (resampled,) = _resample(scores)
    references = [text for image_id in captions for text in evaluator.references[image_id]]
    report: Report = {
        "metrics": scores.corpus,
        "intervals": {
            name: interval(resampled[name]) if resampled else None for name in scores.corpus
        },
        "resamples": RESAMPLES if resampled else 0,
        "statistics": {**describe(captions, known), "references": describe_texts(references)},
        "signature": evaluator.signature(captions),
        "images": count,
        "warnings": warnings,
    }
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
    found: dict[str, Any] = {"images": len(shared), "metrics": {}}
    if len(shared) < MIN_IMAGES:
        found["warning"] = too_few(len(shared), "images", "a significance test")
        tests = dict.fromkeys(scores.corpus, dict.fromkeys(Significance._fields))
    else:
        this, other = _resample(scores, other_scores)
        tests = {
            name: compare(this[name] - other[name])._asdict() for name in this if name in other
        }
    for name, two in other_scores.corpus.items():
        if name in scores.corpus:  # else a program failed
            one = scores.corpus[name]
            scored = {"this": one, "other": two, "difference": one - two}
            found["metrics"][name] = scored | tests[name]
    return found


_RESULTS = "give a COCO results file (captioner caption --annotations ... --format coco)"


def read_captions_of(path: str | Path, content: Any = None) -> dict[int, str]:
    """Read the captions of a COCO results file or of a report, by image id.

    With or without a byte order mark, as captions files. ``content`` is that of the file, or the
    captions by image id; ``path`` is then only a name.

    Raises:
        DataError: The file is missing, is neither, or has more than one caption of an image.
    """
    captions: dict[int, str] = {}
    try:
        if content is None:
            content = json.loads(read_input(path, "a COCO results file").decode("utf-8-sig"))
        if isinstance(content, Mapping) and "per_image" not in content:
            found = list(content.items())
        else:
            entries = content["per_image"] if isinstance(content, Mapping) else content
            found = [(entry["image_id"], entry["caption"]) for entry in entries]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a COCO results file ({error}); {_RESULTS}") from error
    for image_id, caption in found:
        number = isinstance(image_id, Integral) and not isinstance(image_id, bool)
        if not (number and isinstance(caption, str)):
            raise DataError(
                f"{path}: image_id {image_id!r} with caption {caption!r:.60} is invalid, they are "
                f"an integer and a text; {_RESULTS}"
            )
        if image_id in captions:
            raise DataError(
                f"{path} has more than one caption of image {image_id}; give one per image"
            )
        captions[int(image_id)] = caption
    return captions


# --- text ----------------------------------------------------------------------------------------


_LISTED = (
    "metrics", "intervals", "resamples", "statistics", "signature", "warnings", "per_image",
    "compare", "attention", "faithfulness", "chair_by_confidence",
)  # fmt: skip


def as_text(report: Report) -> str:
    """The report as text, with scores in points (times 100)."""
    parts = [
        [
            _row(name, ", ".join(value) if isinstance(value, list) else value)
            for name, value in report.items()
            if name not in _LISTED
        ]
    ]
    if "metrics" in report:
        parts += [_metrics(report), _statistics(report["statistics"])]
    for name, lines in (
        ("chair_by_confidence", _chair),
        ("compare", _compare),
        ("attention", _attention),
        ("faithfulness", _faithfulness),
    ):
        if name in report:
            parts.append(lines(report[name]))
    parts.append([_row("note", warning) for warning in report.get("warnings", ())])
    if "signature" in report:
        parts.append([_row("signature", report["signature"])])
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _row(name: str, value: object) -> str:
    return f"{name.replace('_', ' '):<22} {value}"


def _ends(interval: list[float] | None, style: str) -> str:
    """``low to high``; empty for None."""
    return " to ".join(f"{end:{style}}" for end in interval or ())


def _metrics(report: Report) -> list[str]:
    resamples = report["resamples"]
    title = f"points and 95% intervals ({resamples} bootstrap resamples of the images)"
    lines = [title if resamples else "points"]
    for name, value in report["metrics"].items():
        ends = report["intervals"][name]
        bounds = f"   {100 * ends[0]:6.2f} to {100 * ends[1]:6.2f}" if ends else ""
        lines.append(f"{name:<22} {100 * value:6.2f}{bounds}{_NOTES.get(name, '')}")
    return lines


_NOTES = {
    "CIDEr_D": "   CIDEr with frozen document frequencies",
    "CHAIR_i": "   share of the named objects that are not in the photo",
    "CHAIR_s": "   share of the captions that name such an object",
}


def _chair(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        _row("confidence", "captions  named objects  CHAIR_i  CHAIR_s"),
        *(
            _row(
                f"{one['from']:.1f} to {one['to']:.1f}",
                f"{one['captions']:>8}  {one['mentions']:>13}  "
                f"{100 * one['CHAIR_i']:>7.2f}  {100 * one['CHAIR_s']:>7.2f}",
            )
            for one in found
        ),
    ]


def _statistics(found: Mapping[str, Any]) -> list[str]:
    references, new = found["references"], found["new"]
    unknown = "unknown (give --train-annotations)"

    def row(name: str, one: object, other: object) -> str:
        return _row(name, f"{one!s:<16} {other}")

    def words(of: Mapping[str, Any]) -> str:
        return f"{of['length_mean']:.1f} ({of['length_min']} to {of['length_max']})"

    return [
        row("", "captions", "references"),
        row("words per caption", words(found), words(references)),
        row("distinct words", found["vocabulary"], references["vocabulary"]),
        _row("unique captions", f"{100 * found['distinct']:.1f}%"),
        _row("not in training", unknown if new is None else f"{100 * new:.1f}%"),
        *(
            row(name, f"{100 * found[name]:.1f}%", f"{100 * references[name]:.1f}%")
            for name in ("repeated_words", "repeated_phrases", "bad_endings")
        ),
    ]


def _compare(found: Mapping[str, Any]) -> list[str]:
    lines = [f"compared with {found['with']} on {found['images']} common images"]
    for name, one in found["metrics"].items():
        this, other, difference = (100 * one[key] for key in ("this", "other", "difference"))
        text = f"{this:6.2f} - {other:6.2f} = {difference:+6.2f}"
        if one["interval"] is not None and not math.isnan(difference):
            low, high = one["interval"]
            verdict = "significant" if one["significant"] else "not significant"
            least = 2 / (RESAMPLES + 1)
            p_value = "p < 0.002" if one["p_value"] <= least else f"p {one['p_value']:.3f}"
            text += f"   {100 * low:+6.2f} to {100 * high:+6.2f}   {p_value}, {verdict}"
        lines.append(f"{name:<22} {text}")
    return lines + _note(found)


def _note(found: Mapping[str, Any]) -> list[str]:
    return [_row("note", found["warning"])] if "warning" in found else []


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
        bounds = f"({_ends(ends, '.3f')})" if ends else ""
        lines.append(_row(name, f"{_number(found[name])} {bounds:<18} {text}"))
    shift = found["shift"]
    shifted = ", ".join(f"{offset}: {_number(shift[offset])}" for offset in ("-1", "0", "+1"))
    even = _number(found["entropy_even"])
    return [
        *lines,
        _row("shifted by a word", f"{shifted} ({shift['names']} names with two neighbours)"),
        _row("gate", f"{_number(found['gate'])} (mean over names)"),
        _row("entropy", f"{_number(found['entropy'])} nats (uniform: {even})"),
        _row("movement", f"{_number(found['movement'])} (0 to 1) between the maps of two words"),
        *_note(found),
    ]


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


_TITLES = METHOD_TITLES | {
    "attention": "attention (x gate)",
    "gradient_input": "gradient x input",
    "least_attended": "least attended",
}


def _faithfulness(found: Mapping[str, Any]) -> list[str]:
    lines = [
        f"faithfulness: {found['words']} content words of {found['photos_with_words']} photos, "
        f"{found['steps']} steps of {found['regions']} regions",
    ]
    if not found["words"]:
        return lines
    lines.append(
        "mean change of a word's log-probability (nats) and 95% interval over photos; of "
        f"{found['log_prob']:.2f} on average"
    )
    for level in ("grid", "pixels"):
        if level not in found:
            continue
        heads = [f"{name.replace('_', ', '):<26}" for name in CURVES]
        lines += ["", f"{level:<20}{''.join(heads)}".rstrip()]
        for order in ORDERS:
            cells = [f"{_cell(found[level][curve][order]):<26}" for curve in CURVES]
            lines.append(f"{_TITLES.get(order, order):<20}{''.join(cells)}".rstrip())
    lines += [
        "",
        "Lower is better for deletion, higher for insertion. * better than random; ** better than "
        "centre as well",
        "(95% interval of the paired difference). The gate does not change the order of regions.",
    ]
    return lines + ([f"note: {found['warning']}"] if "warning" in found else [])


def _cell(one: Mapping[str, Any]) -> str:
    bounds = f" ({_ends(one['interval'], '.2f')})" if one["interval"] else ""
    better = [
        name in one and one[name]["significant"] and one[name]["difference"] > 0
        for name in ("over_random", "over_centre")
    ]
    stars = "**" if all(better) else "*" if better[0] else ""
    return f"{one['area']:6.2f}{bounds} {stars}".rstrip()
