"""Fit the output bias of a model, so that its search uses the words that its consensus prefers.

    python scripts/fit_word_bias.py MODEL --features FOLDER --target results.json --style coco \
        [--keep captions.json --keep-style flickr8k --weight 5] [--photos 8000] [--rounds 5] -o OUT

A beam finds the most probable caption, which says common words too often. Consensus captions that
favour rare words (``captioner caption --candidates 64 --temperature 0.85 --rare-words 0.6``) say
others, and agree no less with references, but take many samples. Each round captions the photos
of --target and changes the bias b of each word w

    b_w += rate * ln((t_w + F_w + k) / (s_w + F_w + k)),    |b_w - its first value| <= 2,

where the target says w t_w times per photo, the model s_w times, and k is 5 / photos. F_w is
--weight times how often the model says w at first, on the photos of --keep in their style, which
shares the bias: words of that style change less. No reference caption is read.

Source: Saerens et al. 2002, outputs of a classifier adjusted to other class frequencies.
Deviation: frequencies are those of words in the captions of a search, so that it is repeated.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import captioner
from captioner.data.coco import read_captions
from captioner.data.features import FeatureCache, feature_fingerprint, read_header
from captioner.errors import CaptionerError, DataError
from captioner.evaluation.report import read_captions_of
from captioner.inference.folder import StoredModel, load_model, save_model
from captioner.text.tokenizer import tokenize
from captioner.text.vocabulary import SPECIAL_NAMES

LIMIT = 2.0
"""Largest change of a bias, in nats."""
BATCH = 64


def main() -> None:
    """Fit the bias and save the model."""
    options = _parse()
    stored = load_model(options.model)
    model, vocabulary = stored.model, stored.vocabulary
    stage = read_header(options.features).get("key", {}).get("stage")
    key = feature_fingerprint(model.encoder, model.preprocessing, stage)
    cache = FeatureCache(options.features, key)
    captions = read_captions_of(options.target)
    target = _sample(captions, options.photos, cache)
    wanted = _count([tokenize(captions[image_id]) for image_id in target], stored)
    kept: NDArray[np.float64] = np.zeros(len(vocabulary))
    if options.keep:
        photos = _sample(read_captions([options.keep]), options.keep_photos, cache)
        kept = options.weight * _say(stored, cache, photos, options.keep_style)
    bias = model.decoder.word_output.bias
    first = bias.detach().clone()
    for number in range(1, options.rounds + 1):
        said = _say(stored, cache, target, options.style)
        least = 5 / len(target) + kept
        goal = wanted * said.sum() / wanted.sum() + least  # as many words in all
        change = options.rate * np.log(goal / (said + least))
        change[: len(SPECIAL_NAMES)] = 0
        with torch.no_grad():
            moved = bias - first + torch.from_numpy(change).float()
            bias.copy_(first + moved.clamp(-LIMIT, LIMIT))
        words = int((said > 0).sum())
        print(f"round {number}: {words} different words before, {(wanted > 0).sum()} in the target")
        save_model(options.output, stored)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="model or run folder")
    parser.add_argument("--features", required=True, help="of captioner prepare features")
    parser.add_argument("--target", type=Path, required=True, help="COCO results to imitate")
    parser.add_argument("--style", default="", help="style of these")
    parser.add_argument("--keep", type=Path, help="captions file with photos of another style")
    parser.add_argument("--keep-style", default="", help="that style")
    parser.add_argument("--keep-photos", type=int, default=2000, help="photos of it to caption")
    parser.add_argument("--weight", type=float, default=5.0, help="how much to keep that style")
    parser.add_argument("--photos", type=int, default=8000, help="photos of --target to caption")
    parser.add_argument("--rounds", type=int, default=5, help="how often to caption them")
    parser.add_argument("--rate", type=float, default=0.7, help="share of a change in a round")
    parser.add_argument("-o", "--output", type=Path, required=True, help="model folder to write")
    return parser.parse_args()


def _sample(photos: Iterable[int], count: int, cache: FeatureCache) -> list[int]:
    """Some photos at random, all with features."""
    known = [*photos]
    if missing := [image_id for image_id in known if not cache.has(image_id)]:
        raise DataError(
            f"{len(missing)} of {len(known)} photos (first id: {missing[0]}) have no features in "
            f"{cache.folder}; give the features of these photos"
        )
    return random.Random(0).sample(known, min(count, len(known)))


def _count(captions: list[list[str]], stored: StoredModel) -> NDArray[np.float64]:
    """How often captions say each word of the vocabulary, per caption, (V,)."""
    tokens = [token for words in captions for token in stored.vocabulary.encode(words)]
    return np.bincount(tokens, minlength=len(stored.vocabulary)) / len(captions)


def _say(
    stored: StoredModel, cache: FeatureCache, photos: list[int], style: str
) -> NDArray[np.float64]:
    """How often the model says each word when it captions photos, per photo, (V,)."""
    model, said = captioner.Captioner(stored), []
    options = stored.search.changed(style=style, num_captions=1)
    for start in range(0, len(photos), BATCH):
        ids = photos[start : start + BATCH]
        features = cache.read([(image_id, False) for image_id in ids])
        found = model.caption_features(features, [(0.0, 0.0, 1.0, 1.0)] * len(ids), options)
        said += [list(of_photo[0].words) for of_photo in found if of_photo]
    return _count(said, stored)


if __name__ == "__main__":
    try:
        main()
    except CaptionerError as problem:
        sys.exit(f"{Path(__file__).name}: {problem}")
