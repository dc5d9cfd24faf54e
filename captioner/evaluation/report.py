"""The evaluation report: scores with intervals, statistics, a signature and results per image.

A report consists of JSON data. ``as_text`` formats it as text. ``read_captions_of`` reads the
captions in a report or a COCO results file, so that a second system can be compared with the first.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from captioner.data.coco import caption_text, whole_number
from captioner.errors import DataError
from captioner.evaluation.bootstrap import compare, interval, resample_weights, too_few
from captioner.evaluation.metrics import CaptionEvaluator, Scores
from captioner.files import read_input
from captioner.options import METHOD_TITLES
from captioner.text.tokenizer import caption_tokens
from captioner.text.vocabulary import BAD_ENDINGS

Report = dict[str, Any]
"""A report: ``metrics`` (pycocoevalcap's names and scale), ``intervals`` (95%, low and high),
``statistics``, ``signature``, ``images``, ``per_image``, and keys that the caller adds."""

MIN_IMAGES_FOR_CIDER = 100
"""Fewest images that provide useful document frequencies for CIDEr."""


def as_json(report: Report, indent: int = 1) -> str:
    """Return a report as JSON text. NaN becomes null."""
    plain = json.loads(json.dumps(report), parse_constant=lambda _: None)
    text = json.dumps(plain, indent=indent, ensure_ascii=False) + "\n"
    # Lone surrogates, which UTF-8 cannot encode, become JSON escapes.
    return text.encode("utf-8", "backslashreplace").decode()


def build(
    captions: Mapping[int, str], evaluator: CaptionEvaluator, known: Iterable[str] | None = None
) -> tuple[Report, Scores]:
    """Score captions, and build the part of the report that is about them.

    Args:
        captions: Captions by image id, not tokenized.
        evaluator: The references and settings.
        known: Training captions, to report the share of captions that do not occur there.

    Returns:
        The report and the scores.

    Raises:
        DataError: There are no captions, or an image has no references.
    """
    scores = evaluator.score(captions)
    count = len(captions)
    warnings = []
    if count < MIN_IMAGES_FOR_CIDER:
        noisy = "of one image is always 0" if count == 1 else f"of {count} images is noisy"
        hint = "use CIDEr_D"
        frozen = evaluator.frequencies
        if frozen is None or frozen.documents < MIN_IMAGES_FOR_CIDER:
            more = f"score {MIN_IMAGES_FOR_CIDER} or more images"
            hint = f"{more}, or {hint} with frequencies of as many (captioner prepare frequencies)"
        warnings.append(
            f"CIDEr {noisy}, as its document frequencies come from the scored images; {hint}"
        )
    warnings += too_few(count, "images", "confidence intervals").values()
    weights = resample_weights(count)
    references = [text for image_id in captions for text in evaluator.references[image_id]]
    report: Report = {
        "metrics": scores.corpus,
        "intervals": {name: interval(one) for name, one in scores.resample(weights).items()},
        "resamples": len(weights),
        "statistics": {**describe(captions, known), "references": describe_texts(references)},
        "signature": evaluator.signature(captions),
        "images": count,
        "warnings": warnings,
    }
    return report, scores


def difference(
    captions: Mapping[int, str],
    others: Mapping[int, str],
    evaluator: CaptionEvaluator,
    scores: Scores | None = None,
) -> dict[str, Any]:
    """Compare the captions of two systems on the images that both have captioned.

    Args:
        captions: Captions of this system, by image id.
        others: Captions of the other system, by image id.
        evaluator: The references and settings.
        scores: Scores of ``captions``, if they have been computed already.

    Returns:
        ``images``, their number, and ``metrics``. Each metric has ``this`` and ``other`` (the
        scores), ``difference`` (this minus other), ``interval`` (95%), ``p_value`` and
        ``significant``. The last three are None if there are too few images.

    Raises:
        DataError: The systems have no image in common.
    """
    shared = sorted(captions.keys() & others.keys())
    if not shared:
        raise DataError("the two systems have no image in common; compare captions of one set")
    if scores is None or len(shared) < len(captions):
        scores = evaluator.score({i: captions[i] for i in shared})
    other_scores = evaluator.score({i: others[i] for i in shared})
    ours, theirs, weights = scores.corpus, other_scores.corpus, resample_weights(len(shared))
    this, other = scores.resample(weights), other_scores.resample(weights)
    metrics = {
        name: {
            "this": ours[name],
            "other": theirs[name],
            "difference": ours[name] - theirs[name],
            **compare(this[name] - other[name])._asdict(),
        }
        for name in ours
        if name in theirs  # a metric is missing if its program failed
    }
    warning = too_few(len(shared), "images", "a significance test")
    return {"images": len(shared), "metrics": metrics, **warning}


def read_captions_of(path: str | Path, content: Any = None) -> dict[int, str]:
    """Read the captions in a COCO results file or a report, by image id.

    The file may start with a byte order mark.

    Args:
        path: The file, or only its name for messages if ``content`` is passed.
        content: The content of such a file, or captions by image id, to use instead of the file.

    Raises:
        DataError: The file is missing, is neither a results file nor a report, or has several
            captions for one image.
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
        for image_id, caption in found:
            number = whole_number(image_id)
            if number in captions:
                raise ValueError(f"more than one caption of image {number}")
            captions[number] = caption_text(caption)
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a COCO results file ({error}); use a COCO results file with one "
            "caption per image (captioner caption --annotations ... --format coco)"
        ) from error
    return captions


# --- statistics --------------------------------------------------------------------------------


def describe(
    captions: Mapping[int, str], known: Iterable[str] | None = None
) -> dict[str, float | None]:
    """Compute statistics of captions by image id, not tokenized.

    Returns:
        The values of `describe_texts`, and ``images``, the number of images. ``distinct`` is the
        share of captions that no other image has. ``new`` is the share of captions that are not
        among the training captions ``known``, or None without training captions. Shares are 0 to 1.
    """
    tokenized = [tuple(caption_tokens(text)) for text in captions.values()]
    counts = Counter(tokenized)
    training = None if known is None else {tuple(caption_tokens(text)) for text in known}
    return {
        "images": len(tokenized),
        **describe_texts(captions.values()),
        "distinct": fmean(counts[tokens] == 1 for tokens in tokenized),
        "new": None if training is None else fmean(one not in training for one in tokenized),
    }


def describe_texts(texts: Iterable[str]) -> dict[str, float]:
    """Compute statistics of one or more texts, such as all captions or all references.

    Returns:
        ``length_mean``, ``length_min`` and ``length_max`` are lengths in words. ``vocabulary`` is
        the number of different words. The other values are shares of the texts, 0 to 1, that show
        signs of broken captions:

        * ``repeated_words``: a word directly follows itself (``a a dog``);
        * ``repeated_phrases``: two words occur twice in the same order (``a dog and a dog``);
        * ``bad_endings``: the last word cannot end a caption (``a dog on the``).

        Some references show these signs too, so compare with the shares of the references.
    """
    tokenized = [caption_tokens(text) for text in texts]
    pairs = [list(pairwise(tokens)) for tokens in tokenized]
    lengths = [len(tokens) for tokens in tokenized]
    return {
        "length_mean": fmean(lengths),
        "length_min": min(lengths),
        "length_max": max(lengths),
        "vocabulary": len({word for tokens in tokenized for word in tokens}),
        "repeated_words": fmean(any(one == two for one, two in found) for found in pairs),
        "repeated_phrases": fmean(len(set(found)) < len(found) for found in pairs),
        "bad_endings": fmean(not BAD_ENDINGS.isdisjoint(tokens[-1:]) for tokens in tokenized),
    }


# --- text ----------------------------------------------------------------------------------------

_NOTES = {
    "CIDEr_D": "CIDEr with frozen document frequencies",
    "supported_words": "share of the content words that a reference has",
    "supported_captions": "share of the captions with only such content words",
    "agreement": "in words: each content word counts by the share of references that have it",
    "length": "in words",
    "CHAIR_i": "share of the named objects that are not in the photo",
    "CHAIR_s": "share of the captions that name such an object",
}
_IN_WORDS = ("agreement", "length")
"""Metrics that are numbers of words, not shares."""
_ATTENTION = {
    "correctness": "share of the attention inside the {areas}",
    "uniform": "uniform baseline: share of the area inside the {areas}",
    "centre": "centre-Gaussian baseline",
    "shuffled": "baseline: maps of the other words of the caption",
    "over_uniform": "correctness - uniform",
    "over_centre": "correctness - centre",
    "over_shuffled": "correctness - shuffled",
    "over_before": "correctness - correctness of the word before",
    "over_after": "correctness - correctness of the word after",
    "ratio": "correctness / uniform; 1 = no better than uniform",
    "pointing": "centre of the most attended region is inside the {areas}",
    "pointing_uniform": "baseline: random region",
    "pointing_centre": "baseline: centre of the photo",
    "gate": "mean over {unit}",
    "entropy": "of the maps of all words (nats)",
    "entropy_even": "entropy of uniform maps",
    "movement": "0 to 1, between the maps of two words of a caption",
}
_ORDERS = METHOD_TITLES | {
    "attention": "attention (x gate)",
    "gradient_input": "gradient x input",
    "least_attended": "least attended",
}


def as_text(report: Report) -> str:
    """Format a report as text. Scores that are shares are shown in points (times 100)."""
    makers = {
        "metrics": _metrics, "statistics": _statistics, "chair_by_confidence": _chair,
        "compare": _compare, "attention": _attention, "phrase_attention": _phrase_attention,
        "faithfulness": _faithfulness,
    }  # fmt: skip
    listed = {*makers, "intervals", "resamples", "per_image", "warnings", "signature"}
    general = [
        (name.replace("_", " "), ", ".join(value) if isinstance(value, list) else str(value))
        for name, value in report.items()
        if name not in listed
    ]
    last = [("signature", report["signature"])] if "signature" in report else []
    parts = [
        table(general),
        *(make(report) for name, make in makers.items() if name in report),
        table([("note", warning) for warning in report.get("warnings", ())]),
        table(last),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def table(rows: Iterable[Sequence[object]], digits: int = 2, first: int = 22) -> list[str]:
    """Format rows of cells as lines of text with aligned columns.

    Args:
        rows: Text and numbers. Columns with numbers are aligned to the right.
        digits: Number of decimals of floats.
        first: Least width of the first column, in characters.
    """
    columns: list[list[str]] = []
    for cells in zip_longest(*rows, fillvalue=""):
        texts = [_shown(cell, digits) for cell in cells]
        if not any(texts):
            continue
        width = max(len(text) for text in texts) if columns else max(first, *map(len, texts))
        align = str.ljust if all(isinstance(cell, str) for cell in cells) else str.rjust
        columns.append([align(text, width) for text in texts])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]


def _shown(cell: object, digits: int) -> str:
    if isinstance(cell, float):
        return "-" if math.isnan(cell) else f"{cell:.{digits}f}"
    return f"{cell:,}" if isinstance(cell, int) else "-" if cell is None else str(cell)


def ends(interval: Sequence[float] | None, style: str, scale: float = 1) -> str:
    """Format an interval as ``low to high``, or as "" if it is None."""
    return " to ".join(f"{scale * end:{style}}" for end in interval or ())


def _metrics(report: Report) -> list[str]:
    resamples = f" and 95% intervals ({report['resamples']} bootstrap resamples of the images)"
    rows = []
    for name, value in report["metrics"].items():
        scale = _scale(name)
        interval = ends(report["intervals"][name], "6.2f", scale)
        rows.append((name, scale * value, interval, _NOTES.get(name, "")))
    return [f"points{resamples if report['resamples'] else ''}", *table(rows)]


def _scale(metric: str) -> int:
    """Return the factor by which text multiplies a metric: 100 for points, 1 for words."""
    return 1 if metric in _IN_WORDS else 100


def _statistics(report: Report) -> list[str]:
    found = report["statistics"]
    both, new = (found, found["references"]), found["new"]
    lengths = [f"{of['length_mean']:.1f} ({of['length_min']} to {of['length_max']})" for of in both]
    shares = ("repeated_words", "repeated_phrases", "bad_endings")
    return table(
        [
            ("", "captions", "references"),
            ("words per caption", *lengths),
            ("distinct words", *(str(of["vocabulary"]) for of in both)),
            *((name.replace("_", " "), *(f"{of[name]:.1%}" for of in both)) for name in shares),
            ("unique captions", f"{found['distinct']:.1%}"),
            ("not in training", "unknown", "(give --train-annotations)")
            if new is None
            else ("not in training", f"{new:.1%}"),
        ]
    )


def _chair(report: Report) -> list[str]:
    rows = [
        (
            f"{one['from']:.1f} to {one['to']:.1f}", one["captions"], one["mentions"],
            100 * one["CHAIR_i"], 100 * one["CHAIR_s"],
        )
        for one in report["chair_by_confidence"]
    ]  # fmt: skip
    return table([("confidence", "captions", "named objects", "CHAIR_i", "CHAIR_s"), *rows])


def _compare(report: Report) -> list[str]:
    found, rows = report["compare"], []
    for name, one in found["metrics"].items():
        scale = _scale(name)
        this, other, difference = (scale * one[key] for key in ("this", "other", "difference"))
        row = [name, this, "-", other, "=", f"{difference:+6.2f}"]
        if one["interval"] is not None and not math.isnan(difference):
            verdict = "significant" if one["significant"] else "not significant"
            p_value = "p < 0.002" if one["p_value"] < 0.002 else f"p {one['p_value']:.3f}"
            row += [ends(one["interval"], "+6.2f", scale), f"{p_value}, {verdict}"]
        rows.append(row)
    title = f"compared with {found['with']} on {found['images']} common images"
    return [title, *table(rows), *_note(found)]


def _note(found: Mapping[str, Any]) -> list[str]:
    return table([("note", found["warning"])] if "warning" in found else [])


def _attention(report: Report) -> list[str]:
    found = report["attention"]
    return [
        f"attention on named objects, with 95% intervals over photos: {found['measured']} names "
        f"measured in {found['photos_with_names']} of {found['photos']} photos",
        f"not measured: {found['absent']} names not in the photo, {found['unseen']} outside the "
        f"crop, {found['ignored']} crowds only",
        *_attention_rows(found, "names", "masks"),
    ]


def _phrase_attention(report: Report) -> list[str]:
    found = report["phrase_attention"]
    return [
        f"attention on phrases, with 95% intervals over photos: {found['measured']} phrases "
        f"measured in {found['captions']} captions of {found['photos']} photos",
        f"not measured: {found['absent']} phrases without boxes, {found['empty']} without content "
        f"words, {found['unseen']} outside the crop",
        f"left out: {found['captions_with_unknown_words']} captions with words that the model does "
        "not know",
        *_attention_rows(found, "phrases", "boxes"),
    ]


def _attention_rows(found: Mapping[str, Any], unit: str, areas: str) -> list[str]:
    """Format the table of an attention report, or return [] if nothing was measured."""
    if not found["measured"]:
        return []
    rows = [
        (
            key.replace("_", " "), found[key], ends(found["intervals"].get(key), ".3f"),
            text.format(unit=unit, areas=areas),
        )
        for key, text in _ATTENTION.items()
    ]  # fmt: skip
    shift, text = found["shift"], f"{found['shift'][unit]} {unit} with two neighbours"
    rows += [(f"shifted by {by} words", shift[by], "", text) for by in ("-1", "0", "+1")]
    return [*table(rows, 3), *_note(found)]


def _faithfulness(report: Report) -> list[str]:
    found = report["faithfulness"]
    title = (
        f"faithfulness: {found['words']} content words of {found['photos_with_words']} photos, "
        f"{found['steps']} steps of {found['regions']} regions"
    )
    if not found["words"]:
        return [title]
    lines = [
        title,
        "mean change of a word's log-probability (nats) and 95% interval over photos; of "
        f"{found['log_prob']:.2f} on average",
        "",
    ]
    for level in ("grid", "pixels"):
        if curves := found.get(level):
            rows = [
                (_ORDERS.get(order, order), *(_area(curve[order]) for curve in curves.values()))
                for order in next(iter(curves.values()))
            ]
            heads = [name.replace("_", ", ") for name in curves]
            lines += [*table([(level, *heads), *rows]), ""]
    return [
        *lines,
        "Lower is better for deletion, higher for insertion. * better than random; ** better than "
        "centre as well",
        "(95% interval of the paired difference). The gate does not change the order of regions.",
        *_note(found),
    ]


def _area(one: Mapping[str, Any]) -> str:
    better = [
        name in one and one[name]["significant"] and one[name]["difference"] > 0
        for name in ("over_random", "over_centre")
    ]
    stars = "**" if all(better) else "*" if better[0] else ""
    bounds = f" ({ends(one['interval'], '.2f')})" if one["interval"] else ""
    return f"{one['area']:6.2f}{bounds} {stars}".rstrip()
