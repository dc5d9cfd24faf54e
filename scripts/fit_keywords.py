"""Fit the keywords of a model (captioner caption --keywords) to photos with captions.

    python scripts/fit_keywords.py runs/mine --train captions_train.json --val captions_val.json \
        --images photos/ [--min-captions 5] [--words FILE] [--force]

A word counts for a photo if one of its reference captions has it. A logistic reading of the photo's
vector is fitted on the training photos, for all words together:

    minimize  sum_nk log(1 + exp(-s_nk z_nk)) + penalty / 2 sum_k |w_k|^2,    z_nk = w_k . x_n + b_k

The encoder has learned from these photos, so the log-odds z are calibrated on those of --val, by
one scale and one shift for all words (Platt 1999). scripts/ship_model.py does this for a new model.

Notation: N photos, K words, D size of a photo's vector, s_nk = 1 where a word counts, else -1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import captioner
from captioner.data.coco import CaptionedImage, read_dataset
from captioner.errors import CaptionerError, ConfigError, DataError
from captioner.evaluation import calibrate
from captioner.evaluation.calibration import (
    MIN_MENTIONS,
    Judged,
    calibration_error,
    linear_reading,
    logistic_regression,
)
from captioner.evaluation.objects import Phrases, find_names, phrases
from captioner.files import atomic_write, read_input
from captioner.inference.captioner import Captioner
from captioner.inference.engine import Prepared
from captioner.inference.folder import KEYWORDS, find_model
from captioner.inference.keywords import MIN_PROBABILITY, KeywordReader
from captioner.search.words import NEUTRAL_WORDS
from captioner.text.tokenizer import caption_tokens

WORDS = Path(__file__).with_name("keywords.txt")
"""The default list."""

PENALTY = 100.0
"""Of the weights of standardized vectors; see ``linear_reading``."""

_Floats = NDArray[np.float64]


class Photos(NamedTuple):
    """What is known of N photos."""

    vectors: NDArray[np.float32]
    """(N, D), see ``Captioner.photo_vectors``."""
    mentioned: Sequence[Set[str]]
    """The keywords of the list that the references of each have."""


def main() -> None:
    """Fit, report and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="model or run folder")
    parser.add_argument("--train", action="append", required=True, help="training captions (COCO)")
    parser.add_argument("--val", action="append", required=True, help="captions of other photos")
    parser.add_argument("--images", action="append", required=True, help="folder with the photos")
    parser.add_argument("--min-captions", type=int, default=1, help="of a training photo")
    parser.add_argument("--words", type=Path, default=WORDS, help="list of words, see keywords.txt")
    parser.add_argument("--force", action="store_true", help="replace the model's keywords")
    options = parser.parse_args()
    target = find_model(options.model) / KEYWORDS
    if target.exists() and not options.force:
        raise ConfigError(f"{target} exists; give --force to replace it")
    model = captioner.load(options.model)
    how = {"min_captions": options.min_captions, "words": options.words}
    reader = fit_keywords(model, options.train, options.val, options.images, **how)
    atomic_write(target, reader.to_bytes())
    print(f"saved as {target}")


def fit_keywords(
    model: Captioner,
    train: Sequence[str],
    val: Sequence[str],
    images: Sequence[str],
    *,
    min_captions: int,
    words: Path = WORDS,
) -> KeywordReader:
    """Fit keywords on the photos of ``train``; calibrate them on those of ``val``, and report."""
    table = read_words(words)

    def seen(files: Sequence[str], least: int) -> Photos:
        photos = read_dataset(files, images, renumber=True)
        photos = [photo for photo in photos if len(photo.captions) >= least]
        vectors, mentioned = [], []
        for batch, prepared in photo_batches(model, photos):
            vectors.append(model.photo_vectors(prepared))
            mentioned += [mentions(photo.captions, table) for photo in batch]
        if not vectors:
            raise DataError(f"{', '.join(files)}: no photo with {least} captions can be read")
        return Photos(np.concatenate(vectors), mentioned)

    reader, text = fit(table, seen(train, min_captions), seen(val, 1))
    print(text)
    return reader


def photo_batches(
    model: Captioner, photos: Sequence[CaptionedImage]
) -> Iterator[tuple[list[CaptionedImage], list[Prepared]]]:
    """The photos that can be read, prepared, in batches; the errors of the others are printed."""
    return calibrate.photo_batches(model, photos, lambda error: print(error, file=sys.stderr))


def read_words(path: Path) -> Phrases:
    """Read a list of words: a keyword per line, then others that count as it.

    Raises:
        ConfigError: The file cannot be read, or a word is in two lines.
    """
    table: dict[tuple[str, ...], str | None] = {}
    for line in read_input(path, "a list of words").decode().splitlines():
        entries = [entry.strip() for entry in line.lower().split(",") if entry.strip()]
        if not entries or entries[0].startswith("#"):
            continue
        keyword = entries[0].partition("(")[0]
        for phrase in phrases(entries):
            if table.setdefault(phrase, keyword) != keyword:
                raise ConfigError(
                    f"{path}: {' '.join(phrase)!r} counts as {table[phrase]} and as {keyword}; "
                    "remove it from one line"
                )
    return table


def mentions(captions: Sequence[str], table: Phrases) -> set[str]:
    """The keywords that captions of a photo have."""
    names = (name for text in captions for name in find_names(caption_tokens(text), table))
    return {name.category for name in names}


def fit(table: Phrases, training: Photos, others: Photos) -> tuple[KeywordReader, str]:
    """Fit the keywords of a list on training photos; calibrate and measure them on others."""
    words = dict.fromkeys(word for word in table.values() if word)
    groups = [(word, {word}) for word in words]
    for neutral in sorted({NEUTRAL_WORDS[word] for word in words.keys() & NEUTRAL_WORDS.keys()}):
        replaced = {word for word in words if NEUTRAL_WORDS.get(word) == neutral}
        groups.append((neutral, {neutral} | replaced))
    labels = of_groups(training.mentioned, [group for _, group in groups])
    enough = labels.sum(axis=0) >= MIN_MENTIONS
    if not enough[: len(words)].any():
        raise DataError(
            f"no word of the list counts for {MIN_MENTIONS} training photos; give more photos, or "
            "--words of their language"
        )
    kept = [group for group, some in zip(groups, enough, strict=True) if some]
    plain = int(enough[: len(words)].sum())
    weights, biases = linear_reading(training.vectors, labels[:, enough], PENALTY)
    odds = others.vectors @ weights.T + biases
    true = of_groups(others.mentioned, [group for _, group in kept])
    scale, shift = platt(odds, true)
    names = [name for name, _ in kept]
    reader = KeywordReader(
        tuple(names[:plain]),
        tuple(names[plain:]),
        (scale * weights).astype(np.float32),
        (scale * biases + shift).astype(np.float32),
    )
    probabilities = 1 / (1 + np.exp(-scale * odds - shift))
    return reader, report(probabilities[:, :plain], true[:, :plain])


def of_groups(mentioned: Sequence[Set[str]], groups: Sequence[Set[str]]) -> NDArray[np.bool_]:
    """Whether each photo mentions a word of each group: (N, K)."""
    return np.array([[not group.isdisjoint(there) for group in groups] for there in mentioned])


def platt(odds: _Floats, labels: NDArray[np.bool_]) -> tuple[float, float]:
    """Scale and shift with which log-odds, (N, K), are calibrated."""
    inputs = np.stack([odds.ravel(), np.ones(odds.size)], axis=1)
    scale, shift = logistic_regression(inputs, labels.ravel().astype(float), np.full(2, 1e-6))
    return float(scale), float(shift)


def report(probabilities: _Floats, labels: NDArray[np.bool_]) -> str:
    """How good the probable keywords of photos are, (N, K)."""
    kept = probabilities >= MIN_PROBABILITY
    judged = Judged(probabilities[kept], labels[kept].astype(float), 0.5)
    return (
        f"{labels.shape[1]} keywords, {kept.sum(axis=1).mean():.1f} per photo: "
        f"precision {labels[kept].mean():.0%}, recall {kept[labels].mean():.0%}, "
        f"calibration error {calibration_error(judged):.3f}"
    )


if __name__ == "__main__":
    try:
        main()
    except CaptionerError as problem:
        sys.exit(f"{Path(__file__).name}: {problem}")
