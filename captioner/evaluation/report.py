"""The evaluation report: scores with intervals, statistics, a signature and results per image.

A report consists of JSON data, and ``as_text`` formats the data as text. To compare a second system
with the first, ``read_captions_of`` reads captions from a report or a COCO results file.
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
from captioner.files import json_values, read_input
from captioner.messages import counted
from captioner.options import METHOD_TITLES
from captioner.text.tokenizer import caption_tokens
from captioner.text.vocabulary import BAD_ENDINGS

Report = dict[str, Any]
"""A report as JSON data.

``build`` adds these keys, and callers add others such as ``per_image``:

* ``metrics``: the scores, with pycocoevalcap's names and scale.
* ``intervals``: for each metric, the low and the high end of its 95% interval.
* ``resamples`` and ``images``: the numbers of resamples and of scored images.
* ``statistics``: statistics of the captions, from `describe`.
* ``signature``: a description of how the scores were computed.
* ``warnings``: lines of text for the user.
"""

MIN_IMAGES_FOR_CIDER = 100
"""Minimum number of images for useful document frequencies in CIDEr (see
``DocumentFrequencies``)."""


def as_json(report: Report, indent: int = 1) -> str:
    """Format a report as JSON text. NaN, which JSON lacks, becomes null."""
    text = json.dumps(json_values(report), indent=indent, ensure_ascii=False) + "\n"
    # Lone surrogates, which UTF-8 cannot encode, become JSON escapes.
    return text.encode("utf-8", "backslashreplace").decode()


def build(
    captions: Mapping[int, str], evaluator: CaptionEvaluator, known: Iterable[str] | None = None
) -> tuple[Report, Scores]:
    """Score captions, and build the part of the report that describes them.

    Args:
        captions: Captions by image id, not tokenized.
        evaluator: The evaluator with the references and settings.
        known: Training captions, to report the share of captions that are not among them.

    Returns:
        The report.
        The scores from which it was built.

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
            f"CIDEr {noisy}, because document frequencies come from the scored images; {hint}"
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
    """Compare the captions of two systems on the images that both systems have captioned.

    Args:
        captions: Captions by the first system, by image id.
        others: Captions by the second system, by image id.
        evaluator: The evaluator with the references and settings.
        scores: Scores of ``captions``, if they are already known.

    Returns:
        ``images``, the number of images, and ``metrics``. Each metric has two scores, ``this`` for
        the first system and ``other`` for the second, and their ``difference`` (``this`` minus
        ``other``). The ``interval`` (95%), ``p_value`` and ``significant`` of the difference are
        None if there are too few images.

    Raises:
        DataError: The systems have no image in common.
    """
    shared = sorted(captions.keys() & others.keys())
    if not shared:
        raise DataError(
            "the two systems have captioned different images; use results for the same images"
        )
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
    """Read captions by image id from a COCO results file or a report.

    The file may start with a byte order mark, which some editors add.

    Args:
        path: The file, or a name for error messages if ``content`` is passed.
        content: The content of such a file, or captions by image id, to use instead of a file.

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
                raise ValueError(f"image {number} has more than one caption")
            captions[number] = caption_text(caption)
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not a COCO results file with one caption per image ({error}); use the "
            "output of: captioner caption --annotations FILE --format coco"
        ) from error
    return captions


# --- statistics --------------------------------------------------------------------------------


def describe(
    captions: Mapping[int, str], known: Iterable[str] | None = None
) -> dict[str, float | None]:
    """Compute statistics of generated captions.

    Args:
        captions: Captions by image id, not tokenized.
        known: Training captions, or None if they are unknown.

    Returns:
        The statistics from `describe_texts`, and three more. ``images`` is the number of images.
        ``distinct`` is the share of captions that occur for one image only. ``new`` is the share of
        captions that are not among the training captions, or None if ``known`` is None. Shares are
        0 to 1.
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
        the number of different words. Three further statistics are shares of texts, 0 to 1, that
        show a sign of a broken caption:

        * ``repeated_words``: a word directly follows itself ("a a dog").
        * ``repeated_phrases``: a pair of adjacent words occurs twice ("a dog and a dog").
        * ``bad_endings``: the last word cannot end a caption ("a dog on the").

        Some references show these signs too, so compare the captions' shares with the references'.
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
    "supported_words": "share of content words that occur in a reference",
    "supported_captions": "share of captions with supported content words only",
    "agreement": "in words: content words, weighted by the share of references that contain them",
    "length": "mean number of words",
    "CHAIR_i": "share of named objects that are not in the photo",
    "CHAIR_s": "share of captions that name an object that is not in the photo",
}
"""Explanations of metrics, shown next to their scores."""
_IN_WORDS = ("agreement", "length")
"""Metrics that are counted in words. All other metrics are shares."""
_ATTENTION = {
    "correctness": "share of attention inside the {areas}",
    "uniform": "baseline: uniform map, equal to the share of area inside the {areas}",
    "centre": "baseline: Gaussian in the centre",
    "shuffled": "baseline: maps of the caption's other words",
    "over_uniform": "correctness - uniform",
    "over_centre": "correctness - centre",
    "over_shuffled": "correctness - shuffled",
    "over_before": "correctness - correctness of the word before",
    "over_after": "correctness - correctness of the word after",
    "ratio": "correctness / uniform; 1 = no better than uniform",
    "pointing": "share of {unit} with the most attended region inside the {areas}",
    "pointing_uniform": "baseline: random region",
    "pointing_centre": "baseline: centre of the photo",
    "gate": "mean context gate over {unit}",
    "entropy": "mean entropy of the maps of all words (nats)",
    "entropy_even": "entropy of uniform maps (nats)",
    "movement": "mean distance between the maps of two words of a caption, 0 to 1",
}
"""Explanations of attention measures, in the order of the table (see ``Grounding.summary``)."""
_ORDERS = METHOD_TITLES | {
    "attention": "attention (x gate)",
    "gradient_input": "gradient x input",
    "least_attended": "least attended",
}
"""Titles of the orders of regions in the table of faithfulness."""


def as_text(report: Report) -> str:
    """Format a report as text. Scores that are shares are multiplied by 100 and shown as points."""
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

    Columns without any text are left out.

    Args:
        rows: The cells of each row: text, numbers, or None for a missing value. Columns with
            numbers are aligned to the right.
        digits: Number of decimals of floats.
        first: Minimum width of the first column, in characters.
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
    """Format a cell of a table as text. NaN and None become a dash.

    ``digits`` is the number of decimals of a float.
    """
    if isinstance(cell, float):
        return "-" if math.isnan(cell) else f"{cell:.{digits}f}"
    return f"{cell:,}" if isinstance(cell, int) else "-" if cell is None else str(cell)


def ends(interval: Sequence[float] | None, style: str, scale: float = 1) -> str:
    """Format an interval as ``low to high``, or as an empty string if it is None.

    Args:
        interval: The low and the high end.
        style: Format of each end, such as ``.2f``.
        scale: Factor for both ends.
    """
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
    """Return the factor with which a metric is shown: 100 for scores in points, 1 for lengths."""
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
            ("not in training", "unknown", "(add --train-annotations)")
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
        f"attention on named objects, with 95% intervals over photos: "
        f"{counted(found['measured'], 'name')} measured in {found['photos_with_names']} of "
        f"{counted(found['photos'], 'photo')}",
        f"not measured: {counted(found['absent'], 'name')} of objects that are not in the photo, "
        f"{found['unseen']} outside the crop, {found['ignored']} on crowds only",
        *_attention_rows(found, "names", "masks"),
    ]


def _phrase_attention(report: Report) -> list[str]:
    found = report["phrase_attention"]
    return [
        f"attention on phrases, with 95% intervals over photos: "
        f"{counted(found['measured'], 'phrase')} measured in "
        f"{counted(found['captions'], 'caption')} of {counted(found['photos'], 'photo')}",
        f"not measured: {counted(found['absent'], 'phrase')} without boxes, {found['empty']} "
        f"without content words, {found['unseen']} outside the crop",
        f"left out: {counted(found['captions_with_unknown_words'], 'caption')} with words outside "
        "the model's vocabulary",
        *_attention_rows(found, "phrases", "boxes"),
    ]


def _attention_rows(found: Mapping[str, Any], unit: str, areas: str) -> list[str]:
    """Format the table of an attention report, or return [] if nothing was measured.

    Args:
        found: The result of `Grounding.summary`.
        unit: Plural noun for the measured things: ``names`` or ``phrases``.
        areas: Plural noun for the areas in which attention is measured: ``masks`` or ``boxes``.
    """
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
        f"faithfulness: {counted(found['words'], 'content word')} of "
        f"{counted(found['photos_with_words'], 'photo')}, {counted(found['steps'], 'step')} of "
        f"{counted(found['regions'], 'region')}"
    )
    if not found["words"]:
        return [title]
    lines = [
        title,
        "mean change of a word's log-probability (nats), with 95% interval over photos; the "
        f"unchanged photo has a mean log-probability of {found['log_prob']:.2f}",
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
        "Lower is better for deletion, higher is better for insertion. * means better than random, "
        "** means better than random and centre",
        "(95% interval of the paired difference). The gate does not change the order of regions.",
        *_note(found),
    ]


def _area(one: Mapping[str, Any]) -> str:
    """Format the area of one order with its interval, and with stars if it beats the baselines."""
    better = [
        name in one and one[name]["significant"] and one[name]["difference"] > 0
        for name in ("over_random", "over_centre")
    ]
    stars = "**" if all(better) else "*" if better[0] else ""
    bounds = f" ({ends(one['interval'], '.2f')})" if one["interval"] else ""
    return f"{one['area']:6.2f}{bounds} {stars}".rstrip()
