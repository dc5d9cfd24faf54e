"""Train the reading of a model, and count word sequences in its training captions.

    python scripts/fit_reading.py runs/mine --train captions_train.json --val captions_val.json \
        --images photos/ [--words FILE] --features FOLDER -o mine_read/

The reading (``model.reading``) is a small network that predicts which words people use about a
photo. The encoder and the decoder do not change. The reading is trained in two stages to predict,
for each word:

    1   on all training photos: the share of a photo's captions that contain the word
    2   on photos with five or more captions: whether any caption contains the word

So the result is the probability that at least one of five people uses the word. ``captioner
calibrate`` turns it into the probability that the word is true of the photo. The second stage was
also tried with annotated objects instead of captions. But the model's captions then named more
things that nobody mentions.

The photos of --val are not used for training. Keywords are measured on photos of --val that have
five or more captions. --features is a folder for the encoder's features: 256 kB per photo with the
shipped encoder. After an interruption, run the command again. It continues with the photos that
have no features yet.

Source of the method: see ``model.reading``. Notation: N photos, S stems, K keywords.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from captioner.data.coco import read_dataset
from captioner.data.example import Example
from captioner.data.features import (
    FeatureCache,
    FeatureEncoder,
    FeatureWriter,
    feature_fingerprint,
)
from captioner.data.reading import photo_bar, read_ahead
from captioner.errors import CaptionerError, ConfigError, DataError
from captioner.evaluation.fit_confidence import Judged, calibration_error
from captioner.evaluation.objects import Phrases, find_names, phrases
from captioner.files import read_input
from captioner.inference.folder import load_model, save_model
from captioner.inference.stored_model import StoredModel
from captioner.model.caption_model import CaptionModel
from captioner.model.reading import reading_loss
from captioner.search.grammar import Grammar
from captioner.text.content import content_stems, stem
from captioner.text.tokenizer import caption_tokens
from captioner.text.vocabulary import Vocabulary
from captioner.training.reading import add_reading

WORDS = Path(__file__).with_name("keywords.txt")
"""The default list of keywords."""

FIVE = 5
"""Number of captions of a photo from which a word counts as false if no caption contains it."""
BATCH = 32
"""Number of photos that are encoded together."""


class Stage(NamedTuple):
    """The settings of one training stage."""

    epochs: float
    """Number of passes over the photos of the stage."""
    batch: int
    """Number of photos per step."""
    rate: float
    """Peak learning rate."""
    regions: float
    """Share of the regions that a step uses. The regions are chosen at random for each batch."""


STAGES = Stage(2, 128, 1e-3, 0.5), Stage(5, 64, 5e-4, 1.0)
"""The two training stages, in their order."""
WEIGHT_DECAY = 1e-4
CLIP_NORM = 5.0


class Counted(NamedTuple):
    """The word stems in the captions of N photos."""

    counts: NDArray[np.uint8]
    """Number of a photo's captions that contain a stem, (N, S)."""
    captions: NDArray[np.uint8]
    """Number of captions of each photo, (N,)."""


def main() -> None:
    """Encode the photos, train the reading, report its quality and save the model."""
    options = _parse()
    stored = load_model(options.model)
    if stored.reading is not None and not options.force:
        raise ConfigError(f"{options.model} already has a reading; add --force to replace it")
    table = read_words(options.words)
    photos = read_dataset([*options.train, *options.val], options.images)
    held = {one.image_id for one in read_dataset(options.val, options.images)}
    cache = encode(stored.model, photos, options.features)
    photos = [one for one in photos if cache.has(one.image_id)]
    train = [one for one in photos if one.image_id not in held]
    torch.manual_seed(0)
    add_reading(stored, train)
    assert stored.reading is not None
    stored.reading = replace(stored.reading, keywords=keywords_of(table, stored.reading.stems))
    fit(stored, train, cache)
    stored.grammar = grammar_of(train, stored.vocabulary)
    judged = [one for one in photos if one.image_id in held and len(one.captions) >= FIVE]
    if judged:
        print(report(stored, judged, cache, table))
    stored.config = {}  # leave out the graphs, because they do not contain the new reading
    save_model(options.output, stored)
    print(f"saved as {options.output}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="model folder or run folder")
    parser.add_argument(
        "--train", action="append", required=True, help="captions (COCO) for training"
    )
    parser.add_argument(
        "--val",
        action="append",
        required=True,
        help="captions (COCO) of photos that are not used for training",
    )
    parser.add_argument("--images", action="append", required=True, help="folder with the photos")
    parser.add_argument("--features", required=True, help="folder for the encoder's features")
    parser.add_argument("--words", type=Path, default=WORDS, help="file with the list of keywords")
    parser.add_argument(
        "--force", action="store_true", help="replace a reading that the model already has"
    )
    parser.add_argument("-o", "--output", required=True, help="write the model to this folder")
    return parser.parse_args()


def encode(model: CaptionModel, photos: Sequence[Example], folder: str) -> FeatureCache:
    """Encode the photos that have no features in the folder yet, and report failed photos."""
    preprocessing = model.preprocessing
    key = feature_fingerprint(model.encoder, preprocessing, dtype="float16", precision="fp32")
    run = torch.inference_mode()(model.encode)
    encoder = FeatureEncoder(run, preprocessing, model.grid, model.feature_dim, key)
    writer = FeatureWriter(folder, encoder, photos)
    with photo_bar(total=len(photos), initial=writer.done, desc="photos") as progress:
        for done, errors in writer.fill(BATCH):
            progress.update(done)
            for error in errors:
                print(error, file=sys.stderr)
    return FeatureCache(folder, key)


# --- words in captions ----------------------------------------------------------------------------


def read_words(path: Path) -> Phrases:
    """Read a list of keywords.

    Each line contains a keyword and then the words and phrases that count as this keyword,
    separated by commas. Empty lines and lines that begin with # are skipped.

    Returns:
        The keyword of each word or phrase.

    Raises:
        ConfigError: The file cannot be read, or two lines contain the same word.
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


def keywords_of(table: Phrases, stems: Sequence[str]) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return, for each keyword, the phrases that count as this keyword, as tuples of stems.

    A phrase is left out if the reading lacks one of its stems. A keyword is left out if all its
    phrases are left out.

    Args:
        table: The keyword of each phrase, from `read_words`.
        stems: The S stems of the reading.
    """
    known, found = set(stems), dict[str, dict[tuple[str, ...], None]]()
    for phrase, keyword in table.items():
        parts = tuple(stem(word) or "" for word in phrase)
        if keyword is not None and known.issuperset(parts):
            found.setdefault(keyword, {})[parts] = None
    return {keyword: tuple(phrases) for keyword, phrases in found.items()}


def count(photos: Sequence[Example], stems: Sequence[str]) -> Counted:
    """Count in how many captions of each photo each of the S stems occurs."""
    columns = {one: column for column, one in enumerate(stems)}
    counts = np.zeros((len(photos), len(stems)), np.uint8)
    for row, photo in enumerate(photos):
        for text in photo.captions:
            for one in content_stems(text):
                if one in columns:
                    counts[row, columns[one]] += 1
    return Counted(counts, np.array([len(photo.captions) for photo in photos], np.uint8))


def grammar_of(photos: Sequence[Example], vocabulary: Vocabulary) -> Grammar | None:
    """Count word sequences in the captions, from which the search learns grammar.

    The result is None if the tokens of the vocabulary are parts of words.
    """
    if vocabulary.subwords is not None:
        return None
    texts = (caption_tokens(text) for photo in photos for text in photo.captions)
    return Grammar.count((vocabulary.encode(words) for words in texts if words), vocabulary)


# --- the fit -------------------------------------------------------------------------------------


def fit(
    stored: StoredModel,
    photos: Sequence[Example],
    cache: FeatureCache,
) -> None:
    """Train the reading of a model in two stages, as described at the top of this file."""
    assert stored.reading is not None
    said = count(photos, stored.reading.stems)
    captions = torch.from_numpy(said.captions).float()
    counts = torch.from_numpy(said.counts)

    def shares(log_odds: Tensor, rows: Tensor) -> Tensor:
        """Return the summed loss of the first stage for some photos."""
        # A photo with n captions has the weight sqrt(n), not n: its captions repeat each other.
        weights = captions[rows] ** -0.5
        weighted = counts[rows] * weights.unsqueeze(1)
        return reading_loss(log_odds, weighted, captions[rows] * weights)

    def truth(log_odds: Tensor, rows: Tensor) -> Tensor:
        """Return the summed loss of the second stage for some photos."""
        return reading_loss(log_odds, (counts[rows] > 0).float(), torch.ones(len(rows)))

    ids = [photo.image_id for photo in photos]
    five = torch.from_numpy(np.flatnonzero(said.captions >= FIVE))
    if not len(five):
        raise DataError(
            f"no training photo has {FIVE} or more captions; add photos with {FIVE} captions each"
        )
    _train(stored.model, cache, ids, torch.arange(len(ids)), stage=STAGES[0], loss=shares)
    _train(stored.model, cache, ids, five, stage=STAGES[1], loss=truth)


def _train(
    model: CaptionModel,
    cache: FeatureCache,
    ids: Sequence[int],
    rows: Tensor,
    *,
    stage: Stage,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Train the reading for one stage.

    Args:
        model: The model with the reading. Only the reading changes.
        cache: Features of the photos.
        ids: Image id of each photo.
        rows: Indices of the photos to train on, in ``ids``.
        stage: Settings of the stage.
        loss: Function that returns the summed loss for the log-odds of a batch, (B, S), and the
            indices of its photos, (B,).
    """
    reading = model.reading
    assert reading is not None
    reading.train()
    steps = max(1, int(stage.epochs * len(rows) / stage.batch))
    optimizer = torch.optim.AdamW(reading.parameters(), stage.rate, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, stage.rate, total_steps=steps + 1, pct_start=0.1
    )
    batches = _batches(rows, stage.batch, steps)
    features = read_ahead(lambda batch: (batch, _features(cache, ids, batch)), batches, ahead=2)
    with closing(features), photo_bar(total=steps, desc="steps", unit="step") as progress:
        for batch, grids in features:
            regions = grids.shape[1]
            seen = torch.randperm(regions)[: max(1, round(stage.regions * regions))]
            read = reading(grids[:, seen].float())
            mean = loss(read.words, batch) / len(batch)
            optimizer.zero_grad()
            mean.backward()
            nn.utils.clip_grad_norm_(reading.parameters(), CLIP_NORM)
            optimizer.step()
            schedule.step()
            progress.set_postfix({"loss": f"{mean.item():.2f}"})
            progress.update()
    reading.eval()


def _batches(rows: Tensor, size: int, steps: int) -> Iterator[Tensor]:
    """Yield ``steps`` batches of ``size`` rows in random order. Each row occurs once per epoch."""
    order = rows[:0]
    for _ in range(steps):
        while len(order) < min(size, len(rows)):
            order = torch.cat([order, rows[torch.randperm(len(rows))]])
        yield order[:size]
        order = order[size:]


def _features(cache: FeatureCache, ids: Sequence[int], rows: Tensor) -> Tensor:
    """Read the features of the photos with the indices ``rows``, (B, L, D)."""
    return cache.read([(ids[row], False) for row in rows.tolist()])


# --- the report ----------------------------------------------------------------------------------


def mentions(captions: Sequence[str], table: Phrases) -> set[str]:
    """Return the keywords that the captions of a photo contain.

    ``table`` contains the keyword of each phrase, from `read_words`.
    """
    names = (name for text in captions for name in find_names(caption_tokens(text), table))
    return {name.category for name in names}


def report(
    stored: StoredModel, photos: Sequence[Example], cache: FeatureCache, table: Phrases
) -> str:
    """Measure the keywords on photos, and return precision, recall and calibration error as text.

    A keyword is right if a caption of the photo contains it.
    """
    model, words = stored.model, stored.reading
    assert model.reading is not None
    assert words is not None
    probabilities, right, said, known = [], [], 0, words.keywords.keys()
    for start in range(0, len(photos), BATCH):
        batch = photos[start : start + BATCH]
        features = cache.read([(photo.image_id, False) for photo in batch]).float()
        with torch.inference_mode():
            read = model.reading(features)
        for photo, odds, maps in zip(batch, *(part.numpy() for part in read), strict=True):
            true = mentions(photo.captions, table) & known
            said += len(true)
            for one in words.read_keywords(odds, maps, len(known)):
                probabilities.append(one.probability)
                right.append(one.word in true)
    judged = Judged(np.array(probabilities), np.array(right, float), 0.5)
    return (
        f"{len(known)} keywords, {len(right) / len(photos):.1f} per photo: "
        f"precision {np.mean(right):.0%}, recall {sum(right) / max(1, said):.0%}, "
        f"calibration error {calibration_error(judged):.3f}"
    )


if __name__ == "__main__":
    try:
        main()
    except CaptionerError as problem:
        sys.exit(f"{Path(__file__).name}: {problem}")
