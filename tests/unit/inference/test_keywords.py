"""Keywords: the map averages to the log-odds; what is chosen, stored and refused."""

from __future__ import annotations

import numpy as np
import pytest

from captioner.errors import ConfigError, ModelError
from captioner.inference.captioner import Captioner
from captioner.inference.folder import KEYWORDS, load_model, save_model
from captioner.inference.keywords import KeywordReader, read_keywords

WORDS = ("person", "man", "child", "boy", "dog", "grass")


def reader(size: int = 4, biases=(3.0, 2.0, 1.0, 0.5, 2.5, -4.0, 4.0, 1.5)) -> KeywordReader:
    """The last two rows are the neutral ones: person and child."""
    weights = np.random.default_rng(0).normal(size=(len(WORDS) + 2, size)) / 100
    return KeywordReader(
        WORDS, ("person", "child"), weights.astype(np.float32), np.array(biases, np.float32)
    )


def test_a_map_averages_to_the_log_odds_of_its_word() -> None:
    regions = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)

    for keyword in reader().read(regions.mean(axis=(0, 1)), regions, 5):
        assert keyword.map is not None
        odds = np.log(keyword.probability / (1 - keyword.probability))
        assert keyword.map.shape == (2, 3)
        assert keyword.map.mean() == pytest.approx(odds, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["person", "dog", "man", "child", "boy"]),  # grass is improbable
        ({"count": 2}, ["person", "dog"]),
        ({"neutral": True}, ["person", "dog", "child"]),
        ({"familiarity": 0.4}, ["person", "dog", "man"]),
        ({"familiarity": 0.0}, []),
    ],
)
def test_which_words_are_keywords(changes, expected) -> None:
    found = reader().read(np.zeros(4, np.float32), None, **{"count": 9, **changes})

    assert [one.word for one in found] == expected
    assert all(one.map is None for one in found)


def test_the_neutral_word_has_its_own_probability() -> None:
    plain, *_ = reader().read(np.zeros(4, np.float32), None, 1)
    neutral, *_ = reader().read(np.zeros(4, np.float32), None, 1, neutral=True)

    assert plain.word == neutral.word == "person"
    assert neutral.probability > plain.probability


def test_a_model_folder_keeps_them(stored_model, tmp_path, monkeypatch) -> None:
    stored_model.keywords = reader(96)
    save_model(tmp_path / "model", stored_model)

    kept = load_model(tmp_path / "model").keywords

    assert kept is not None
    assert (kept.words, kept.neutral_words) == (WORDS, ("person", "child"))
    assert np.allclose(kept.weights, reader(96).weights, atol=1e-4)  # float16
    with monkeypatch.context() as newer:
        newer.setattr("captioner.inference.keywords.FORMAT_VERSION", 2)
        with pytest.raises(ModelError, match="format 1, not 2"):
            read_keywords(tmp_path / "model")
    data = (tmp_path / "model" / KEYWORDS).read_bytes()
    (tmp_path / "model" / KEYWORDS).write_bytes(data[:-9])
    with pytest.raises(ModelError, match=r"keywords\.safetensors is damaged"):
        read_keywords(tmp_path / "model")


def test_the_best_caption_has_them(stored_model) -> None:
    model = Captioner(stored_model, device="cpu", precision="fp32")
    pixels = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
    with pytest.raises(ConfigError, match="fit_keywords"):
        model.caption(pixels, keywords=3)
    stored_model.keywords = reader(96)

    best, second = model.captions(pixels, keywords=3, num_captions=2)

    assert second.keywords is None
    assert model.caption(pixels).keywords is None
    assert best.text == model.caption(pixels).text
    drawn = best.of_keywords()
    assert drawn.words == tuple(one.word for one in best.keywords)
    assert drawn.text == ", ".join(drawn.words)
    assert drawn.alphas.sum(axis=(1, 2)) == pytest.approx(np.ones(3))
    data = best.as_dict(attention=True)["keywords"][0]
    odds = np.log(best.keywords[0].probability / (1 - best.keywords[0].probability))
    assert np.mean(data["map"]) == pytest.approx(odds, abs=1e-3)
    assert "map" not in best.as_dict()["keywords"][0]
    neutral = model.caption(pixels, keywords=3, neutral=True).keywords
    assert not {"man", "boy"} & {one.word for one in neutral}
