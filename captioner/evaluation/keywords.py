"""Fit the keywords of a model: which words people use for the things in a photo.

A word counts for a photo if one of its reference captions has it. A logistic reading of the photo's
vector is fitted on training photos, for all words together:

    minimize  sum_nk log(1 + exp(-s_nk z_nk)) + penalty / 2 sum_k |w_k|^2,    z_nk = w_k . x_n + b_k

The encoder has learned from these photos, so the log-odds z are calibrated on others, by one scale
and one shift for all words (Platt 1999).

Notation: N photos, K words, D size of a photo's vector, s_nk = 1 where a word counts, else -1.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from captioner.data.coco import read_dataset
from captioner.errors import ConfigError, DataError
from captioner.evaluation.calibrate import MIN_PHOTOS, OnError, photo_batches
from captioner.evaluation.calibration import Judged, calibration_error, logistic_regression
from captioner.evaluation.objects import Phrases, find_names, phrases
from captioner.evaluation.options import KeywordsOptions
from captioner.files import read_input
from captioner.inference.captioner import Captioner
from captioner.inference.keywords import MIN_PROBABILITY, KeywordReader
from captioner.search.words import NEUTRAL_WORDS
from captioner.text.tokenizer import caption_tokens

WORDS = Path(__file__).with_name("keywords.txt")
"""The default list."""

MIN_MENTIONS = 20
"""Training photos that a word counts for, at least; from fewer it cannot be learned."""

PENALTY = 100.0
"""Of the weights of standardized vectors."""

_Floats = NDArray[np.float64]


class Photos(NamedTuple):
    """What is known of N photos."""

    vectors: NDArray[np.float32]
    """(N, D), see ``Captioner.photo_vectors``."""
    mentioned: Sequence[Set[str]]
    """The keywords of the list that the references of each have."""


def fit_keywords(
    model: Captioner, given: KeywordsOptions, on_error: OnError
) -> tuple[KeywordReader, str]:
    """Fit keywords on the photos of ``train_annotations``; calibrate them on ``annotations``.

    Returns:
        The keywords, and how good they are on the photos that they were calibrated on.

    Raises:
        ConfigError: The list of words cannot be used.
        DataError: The photos do not suffice, or a file cannot be used.
    """
    table = read_words(Path(given.words or WORDS))

    def seen(files: Sequence[str], least: int, name: str) -> Photos:
        photos = read_dataset(files, given.images, renumber=True)
        photos = [photo for photo in photos if len(photo.captions) >= least]
        if len(photos) < MIN_PHOTOS:
            raise DataError(f"{len(photos)} {name} are too few; give {MIN_PHOTOS} or more")
        vectors, mentioned = [], []
        size = given.batch_size
        for batch, prepared in photo_batches(model, photos, name, size, on_error, progress=True):
            vectors.append(model.photo_vectors(prepared))
            mentioned += [mentions(photo.captions, table) for photo in batch]
        return Photos(np.concatenate(vectors), mentioned)

    training = seen(given.train_annotations, given.min_captions, "training photos")
    return fit(table, training, seen(given.annotations, 1, "photos to calibrate with"))


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
    weights, biases = linear_reading(training.vectors, labels[:, enough])
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


def linear_reading(
    vectors: NDArray[np.float32], labels: NDArray[np.bool_], penalty: float = PENALTY
) -> tuple[_Floats, _Floats]:
    """Weights (K, D) and biases (K,) that minimize the sum above, by L-BFGS."""
    import torch

    mean, scale = vectors.mean(axis=0), vectors.std(axis=0) + 1e-6
    inputs = torch.from_numpy((vectors - mean) / scale)
    targets = torch.from_numpy(labels.astype(np.float32))
    share = (targets.sum(0) + 0.5) / (len(targets) + 1)
    weights = torch.zeros(labels.shape[1], vectors.shape[1], requires_grad=True)
    biases = torch.logit(share).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weights, biases], max_iter=300, tolerance_change=1e-7, line_search_fn="strong_wolfe"
    )

    def loss() -> Any:
        optimizer.zero_grad()
        logits = torch.addmm(biases, inputs, weights.T)
        terms = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, targets, reduction="sum"
        )
        total = (terms + penalty / 2 * (weights**2).sum()) / len(inputs)
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    of_vector = weights.detach().double().numpy() / scale
    return of_vector, biases.detach().double().numpy() - of_vector @ mean


def platt(odds: _Floats, labels: NDArray[np.bool_]) -> tuple[float, float]:
    """Scale and shift with which log-odds, (N, K), are calibrated."""
    inputs = np.stack([odds.ravel(), np.ones(odds.size)], axis=1)
    scale, shift = logistic_regression(inputs, labels.ravel().astype(float), np.full(2, 1e-6))
    return float(scale), float(shift)


def report(probabilities: _Floats, labels: NDArray[np.bool_]) -> str:
    """How good the probable keywords of photos are, (N, K)."""
    kept = probabilities >= MIN_PROBABILITY
    judged = Judged(probabilities[kept], labels[kept].astype(float), 0.5)
    error = calibration_error(judged, np.ones((1, len(judged.scores)))).item()
    return (
        f"{labels.shape[1]} keywords, {kept.sum(axis=1).mean():.1f} per photo: "
        f"precision {labels[kept].mean():.0%}, recall {kept[labels].mean():.0%}, "
        f"calibration error {error:.3f}"
    )
