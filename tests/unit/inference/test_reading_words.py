"""The words of a reading, and keywords: what is chosen, stored and reported as damaged."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from captioner.errors import ConfigError, ModelError
from captioner.inference.captioner import Captioner
from captioner.inference.folder import load_model, save_model
from captioner.inference.names import CONFIG
from captioner.inference.reading import ReadingWords
from captioner.inference.stored_model import StoredModel
from captioner.model.reading import PhotoReading
from captioner.text.vocabulary import SPECIAL_NAMES, Vocabulary

STEMS = ("man", "woman", "person", "dog", "hot", "couch", "sofa", "grass")
ODDS = np.array([1.0, 0.0, -1.0, 2.0, 1.5, -1.0, -1.5, -4.0], np.float32)
KEYWORDS = {
    "man": (("man",),),
    "woman": (("woman",),),
    "dog": (("dog",),),
    "couch": (("couch",), ("sofa",)),
    "grass": (("grass",),),
}
HOT_DOG = {"hot dog": (("hot", "dog"),)}


def words_of(**keywords: Any) -> ReadingWords:
    return ReadingWords(STEMS, (), keywords or KEYWORDS)


def keywords_of(read: ReadingWords, count: int = 9, **options: Any) -> dict[str, float]:
    regions = np.tile(ODDS, (2, 3, 1))
    found = read.read_keywords(ODDS, regions, count, **options)
    return {one.word: round(one.probability, 3) for one in found}


def sigmoid(value: float) -> float:
    return round(float(1 / (1 + np.exp(-value))), 3)


def test_keywords_are_the_probable_words() -> None:
    couch = np.exp(-1.0) + np.exp(-1.5)  # the odds of two words for a thing add up

    assert keywords_of(words_of()) == {
        "dog": sigmoid(2), "man": sigmoid(1), "woman": 0.5, "couch": round(couch / (1 + couch), 3)
    }  # fmt: skip
    assert [*keywords_of(words_of(), 2)] == ["dog", "man"]
    assert [*keywords_of(words_of(), familiarity=0.4)] == ["dog"]


def test_a_phrase_replaces_its_parts() -> None:
    assert keywords_of(words_of(**KEYWORDS, **HOT_DOG))["hot dog"] == sigmoid(1.5)
    assert "dog" not in keywords_of(words_of(**KEYWORDS, **HOT_DOG))


def test_neutral_keywords_add_the_odds_of_men_and_women() -> None:
    person = np.exp(1.0) + np.exp(0.0)

    found = keywords_of(words_of(), neutral=True)

    assert found.keys() == {"dog", "person", "couch"}
    assert found["person"] == round(person / (1 + person), 3)
    with_persons = words_of(**KEYWORDS, person=(("person",),))
    assert keywords_of(with_persons, neutral=True)["person"] > found["person"]


def test_the_odds_of_a_keyword_are_the_mean_of_its_map() -> None:
    regions = np.random.default_rng(0).normal(size=(2, 3, len(STEMS))).astype(np.float32) + 2
    odds = np.log(np.exp(regions).mean(axis=(0, 1)))

    for one in words_of().read_keywords(odds, regions, 9):
        assert one.map.shape == (2, 3)
        expected = one.probability / (1 - one.probability)
        assert np.exp(one.map).mean() == pytest.approx(expected, rel=1e-4)


def test_every_token_has_the_log_odds_of_its_stem() -> None:
    vocabulary = Vocabulary(["a", "dog", "dogs", "cat", "women"])
    read = ReadingWords.of(["dog", "women"], vocabulary)

    found = read.of_tokens(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32))

    assert found.shape == (2, len(vocabulary))
    assert np.isnan(found[:, : len(SPECIAL_NAMES)]).all()
    nan = np.nan
    np.testing.assert_equal(found[:, 4:], [[nan, 1, 1, nan, 2], [nan, 3, 3, nan, 4]])


@pytest.fixture
def with_reading(stored_model: StoredModel) -> StoredModel:
    """The tiny model (D = 96) with a reading of three stems."""
    model = stored_model.model
    model.reading = PhotoReading(model.feature_dim, 3, hidden=7).eval()
    torch.nn.init.normal_(model.reading.mean.bias, 1.0)
    keywords = {"dog": (("dog",),), "man": (("man",),)}
    stored_model.reading = ReadingWords.of(["man", "dog", "hat"], stored_model.vocabulary, keywords)
    return stored_model


def photo() -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)


def test_a_model_folder_keeps_the_reading(with_reading, tmp_path) -> None:
    save_model(tmp_path / "model", with_reading)

    kept = load_model(tmp_path / "model")

    assert kept.reading == with_reading.reading
    assert kept.reading.rows == (-1, 1, -1, -1, -1, -1, 0, -1, 2)  # of conftest.WORDS
    for one, other in zip(
        kept.model.reading.parameters(), with_reading.model.reading.parameters(), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-3)  # float16


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rows": [0]}, "do not match the vocabulary"),
        ({"rows": [3] * 9}, "do not match the vocabulary"),
        ({"rows": ["x"] * 9}, "do not match the vocabulary"),
        ({"keywords": {"cat": ["cat"]}}, "do not match the vocabulary"),
        ({"keywords": {"cat": []}}, "do not match the vocabulary"),
        ({"hidden": -1}, "do not match the vocabulary"),
        ({"hidden": 6}, "does not match its config.json"),
        ({"hidden": 10**9}, "does not match its config.json"),
        ({"stems": ["man", "dog", "hat", "cat"]}, "does not match its config.json"),
        ({"stems": None}, "is not a valid captioner model config"),
        ({"stems": ["man", "dog", "hat"], "keywords": 5}, "is not a valid captioner model config"),
        (None, "does not match its config.json"),
    ],
)
def test_a_damaged_entry_is_one_line(with_reading, tmp_path, change, problem) -> None:
    save_model(tmp_path / "model", with_reading)
    config = json.loads((tmp_path / "model" / CONFIG).read_text())
    if change is None:
        del config["reading"]
    else:
        config["reading"] |= change
    (tmp_path / "model" / CONFIG).write_text(json.dumps(config))

    with pytest.raises(ModelError, match=problem) as error:
        load_model(tmp_path / "model")

    assert "\n" not in str(error.value)


def test_the_best_caption_has_keywords(with_reading) -> None:
    model = Captioner(with_reading, device="cpu", precision="fp32")

    best, second = model.captions(photo(), keywords=3, num_captions=2)

    assert second.keywords is None
    assert model.caption(photo()).keywords is None
    assert best.text == model.caption(photo()).text
    assert {one.word for one in best.keywords} == {"man", "dog"}
    drawn = best.of_keywords()
    assert drawn.words == tuple(one.word for one in best.keywords)
    assert drawn.text == ", ".join(drawn.words)
    assert drawn.alphas.sum(axis=(1, 2)) == pytest.approx(np.ones(2))
    data = best.to_dict(attention=True)["keywords"][0]
    odds = best.keywords[0].probability / (1 - best.keywords[0].probability)
    assert np.exp(data["map"]).mean() == pytest.approx(odds, rel=1e-3)
    assert "map" not in best.to_dict()["keywords"][0]
    neutral = model.caption(photo(), keywords=3, neutral=True).keywords
    assert {one.word for one in neutral} == {"person", "dog"}


def test_cached_features_are_read_as_photos_are(with_reading) -> None:
    model = Captioner(with_reading, device="cpu", precision="fp32")
    prepared = model.prepare(Image.fromarray(photo()))
    features = with_reading.model.encode(torch.from_numpy(prepared.pixels[0].copy())[None]).detach()

    [[one]] = model.caption_batch([prepared], model.options(keywords=3))
    [[other]] = model.caption_features(
        features, [prepared.crop_box], model.options(keywords=3), [prepared.seed]
    )

    assert [word.word for word in one.keywords] == [word.word for word in other.keywords]
    for mine, theirs in zip(one.keywords, other.keywords, strict=True):
        np.testing.assert_allclose(mine.map, theirs.map, atol=1e-4)


def test_keywords_of_a_model_without_them_are_an_error(stored_model) -> None:
    model = Captioner(stored_model, device="cpu", precision="fp32")

    with pytest.raises(ConfigError, match="does not support keywords; leave out keywords"):
        model.caption(photo(), keywords=3)
