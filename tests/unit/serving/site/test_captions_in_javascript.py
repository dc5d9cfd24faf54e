"""Captions, truth, keywords and confidence of the static site, compared with Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy_captioner import toy_calibrator

from captioner.caption_types import Caption, LeftOut
from captioner.geometry import Geometry
from captioner.inference.confidence import Observation
from captioner.inference.reading import ReadingWords
from captioner.inference.stored_model import StoredModel
from captioner.model.preprocessing import Preprocessing
from captioner.options import DecoderConfig, SearchOptions
from captioner.search.grammar import Grammar
from captioner.search.search import Hypothesis
from captioner.serving.site.writer import site_config
from captioner.text.vocabulary import Vocabulary

pytestmark = pytest.mark.slow

WORDS = ("a", "dog", "hot", "cats", "runs", "and", "'s", "in", "two", "man", "person", "zebra")
STEMS = ("dog", "hot", "cat", "run", "two", "man", "person")
KEYWORDS = {
    "dog": (("dog",),),
    "hot dog": (("hot", "dog"), ("cat",)),
    "man": (("man",),),
    "person": (("person",), ("run", "two")),
}
GRID = (2, 3)

_CAPTION = """async ({config, memory, said, rest, options, style, method}) => {
    const {Vocabulary, captionData} = await import("/captions.js");
    const {confidenceOf, familiarityOf} = await import("/confidence.js");
    const {PhotoReading} = await import("/reading.js");
    const array = (values) => Float32Array.from(values);
    const {reading: words, reading_regions: regions, summary} = memory;
    const read = new PhotoReading(config, {
        reading: {data: array(words)}, reading_regions: {data: array(regions)},
    });
    const withTruths = (part) => ({...part, truths: read.truths(part)});
    const familiarity = familiarityOf(config.familiarity, array(summary));
    const own = confidenceOf(config.confidence, said, read.logOdds(said), style, options);
    const more = {
        confidence: own === null ? null : own * familiarity,
        leftOut: withTruths(rest),
        keywords: read.keywords(3, options.neutral, familiarity),
    };
    const photo = {box: [0, 0.25, 1, 0.75]};
    const found = withTruths({...said, alternatives: []});
    const {alternatives, ...caption} = captionData(
        found, photo, config, new Vocabulary(config), method, more);
    return {caption, truths: [...read.searchTruths()].slice(0, -1)};
}"""


def toy_model(search: SearchOptions) -> StoredModel:
    axis = {"first": 16.0, "pitch": 32.0, "start": 0.0, "stop": 64.0}
    vocabulary = Vocabulary(WORDS)
    config = {
        "exported": {"tokens": {"end": 2, "first_word": 4, "styles": {}}},
        "encoder": {"grid": list(GRID), "geometry": {"x": axis, "y": axis}},
        "preprocessing": vars(Preprocessing(64)),
    }
    kinds = np.array([0.4, -0.2, 0.1], np.float32)
    return StoredModel(
        None, DecoderConfig(), vocabulary, search, config=config,
        calibrator=toy_calibrator(search, kinds=kinds),
        reading=ReadingWords.of(STEMS, vocabulary, KEYWORDS),
        grammar=Grammar(np.zeros(len(WORDS) + 4, np.float32), *np.zeros((3, 0), np.int64)),
    )  # fmt: skip


def part(rng: np.random.Generator, words: str) -> dict[str, Any]:
    tokens = [WORDS.index(word) + 4 for word in words.split()]
    return {
        "tokens": tokens,
        "logProbs": np.log(rng.uniform(0.05, 1, len(tokens))).astype(np.float32),
        "alphas": rng.dirichlet(np.ones(6), len(tokens)).astype(np.float32),
        "gates": rng.random(len(tokens)).astype(np.float32),
    }


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


def assert_close(one: Any, other: Any) -> None:
    """Check that values are equal except for the last digit of rounded numbers."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), [other[key] for key in one]
    if isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_close(*pair)
    else:
        assert one == other or one == pytest.approx(other, abs=1.1e-3, rel=1e-4)


@pytest.mark.parametrize(
    ("said", "rest", "neutral", "method"),
    [
        ("a hot dog and cats in a zebra", "runs in two", False, "attention"),
        ("a dog 's man runs and a person", "and two cats", True, "attention_gate"),
        ("a", "a a in", False, "attention"),
        ("", "zebra", True, "attention"),
    ],
)
def test_captions_have_everything_that_they_have_in_python(
    javascript, said, rest, neutral, method
) -> None:
    options = SearchOptions(beam_size=3, certainty=0.4, neutral=neutral)
    stored = toy_model(options)
    calibrator, reading, vocabulary = stored.calibrator, stored.reading, stored.vocabulary
    assert calibrator is not None
    assert calibrator.truth is not None
    assert reading is not None
    rows = reading.token_rows(vocabulary)
    keywords_found, confidences = 0, set()
    for seed in range(4):
        rng = np.random.default_rng(seed)
        z, regions = (2 * rng.normal(size=shape).astype(np.float32) for shape in (7, (6, 7)))
        summary = rng.normal(size=2).astype(np.float32)
        one, more = part(rng, said), part(rng, rest)
        one["logProb"] = float(one["logProbs"].sum()) - 0.5

        found = javascript.evaluate(
            _CAPTION,
            plain(
                {
                    "config": site_config(stored) | {"vocabulary": list(WORDS)},
                    "memory": {
                        "reading": z, "reading_regions": regions.ravel(), "summary": summary,
                    },
                    "said": one,
                    "rest": more,
                    "options": {"beam_size": 3, "certainty": 0.4, "neutral": neutral},
                    "style": "",
                    "method": method,
                }
            ),
        )  # fmt: skip

        def fields(part: dict[str, Any], z=z) -> dict[str, Any]:
            maps = part["alphas"]
            if method == "attention_gate":
                maps = maps * part["gates"][:, None]
            truth = calibrator.truth.truths(rows[part["tokens"]], part["logProbs"], z)
            words, alphas = vocabulary.shown(part["tokens"]), maps.reshape(-1, *GRID)
            values = (words, part["logProbs"], alphas, part["gates"], truth)
            return dict(
                zip(("words", "log_probs", "alphas", "gates", "truth"), values, strict=True)
            )

        searched = Hypothesis(
            one["tokens"], one["logProbs"], one["alphas"], one["gates"], one["logProb"], True
        )
        seen = Observation("", (), searched, summary, rows[one["tokens"]], z)
        box, geometry = (0, 0.25, 1, 0.75), stored.config["encoder"]["geometry"]
        expected = Caption(
            **fields(one),
            log_prob=one["logProb"],
            crop_box=box,  # type: ignore[arg-type]
            geometry=Geometry.from_dict(geometry).placed(64, *box),
            method=method,
            confidence=calibrator.confidence(seen, ""),
            keywords=reading.read_keywords(
                z, regions.reshape(*GRID, 7), 3,
                neutral=neutral, familiarity=calibrator.familiarity(summary),
            ),
            left_out=LeftOut(**fields(more)),
        )  # fmt: skip
        assert_close(found["caption"], expected.to_dict(attention=True))
        assert found["truths"] == pytest.approx(calibrator.truth.search_truths(z)[:-1].tolist())
        keywords_found += len(expected.keywords or ())
        confidences.add(expected.confidence)
    assert keywords_found > 2
    assert len(confidences) > 2


@pytest.mark.parametrize(
    ("changes", "some"),
    [({}, True), ({"beam_size": 7}, True), ({"beam_size": 1}, False), ({"certainty": 0}, False)],
)
def test_captions_of_other_searches_have_no_confidence(javascript, changes, some) -> None:
    stored = toy_model(SearchOptions(beam_size=3, certainty=0.4))
    confidence = """async ({fitted, options}) => {
        const {confidenceOf} = await import("/confidence.js");
        return confidenceOf(fitted, {tokens: [], logProb: -1}, [], "", options);
    }"""
    options = {"beam_size": 3, "certainty": 0.4} | changes
    fitted = site_config(stored)["confidence"]

    found = javascript.evaluate(confidence, {"fitted": fitted, "options": options})

    assert (found is not None) == some
