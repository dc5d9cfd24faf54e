"""Ensembles: means of probabilities and of attention, and which models can be averaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from toy_captioner import WORDS, build, ensemble_of, stored

from captioner import load
from captioner.data.images import open_image
from captioner.errors import ConfigError, ModelError


def test_probabilities_attention_and_gates_are_the_means(photos: list[Path]):
    models = stored(), stored(seed=81)
    alone = [ensemble_of(model) for model in models]
    ensemble = ensemble_of(*models)
    for photo in photos[:4]:
        caption = ensemble.caption(photo)
        own = [one.explain(photo, caption.text) for one in alone]
        mean = np.mean([np.exp(c.log_probs) for c in own], axis=0)
        np.testing.assert_allclose(np.exp(caption.log_probs), mean, atol=1e-5)
        np.testing.assert_allclose(caption.alphas, (own[0].alphas + own[1].alphas) / 2, atol=1e-5)
        np.testing.assert_allclose(caption.gates, (own[0].gates + own[1].gates) / 2, atol=1e-5)
        assert np.abs(own[0].alphas - own[1].alphas).max() > 1e-3


@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [((64, 96), ("crop", "crop")), ((96, 64), ("crop", "crop")), ((64, 64), ("squash", "crop"))],
)
def test_attention_is_the_first_models_if_grids_differ(
    photos: list[Path], sizes: tuple[int, int], kinds: tuple[str, str]
):
    models = [
        stored(kind, size=size, seed=seed)
        for seed, (kind, size) in enumerate(zip(kinds, sizes, strict=True), 80)
    ]
    ensemble, first = ensemble_of(*models), ensemble_of(models[0])
    for result in ensemble.stream(photos, batch_size=4):
        (caption,) = result.captions
        own = first.explain(result.photo, caption.text)
        side = sizes[0] // 32
        assert caption.alphas.shape == (len(caption.words), side, side)
        np.testing.assert_allclose(caption.alphas, own.alphas, atol=1e-5)
        np.testing.assert_allclose(caption.gates, own.gates, atol=1e-5)
        assert caption.crop_box == own.crop_box


def test_models_with_other_words_or_styles_raise():
    first, same, other, styled = stored(), stored(seed=81), stored(words=WORDS[:-1]), stored()
    styled.vocabulary = first.vocabulary.extended((), ("coco", "flickr8k"))
    sizes = rf"model 1 \({len(WORDS) + 4} words.* model 3 \({len(WORDS) + 3} words.* differ"
    with pytest.raises(ConfigError, match=sizes) as caught:
        ensemble_of(first, same, other)
    assert "\n" not in str(caught.value)
    with pytest.raises(
        ConfigError, match=r"styles none\) and model 2 .* styles coco, flickr8k\) differ"
    ):
        ensemble_of(first, styled)


def test_several_folders_load_as_an_ensemble(photos: list[Path], tmp_path: Path):
    models = stored(), stored(seed=81)
    for number, model in enumerate(models):
        ensemble_of(model).save(tmp_path / str(number))
    loaded = load(tmp_path / "0", tmp_path / "1", device="cpu", precision="fp32")
    assert len(loaded.ensemble.engines) == 2
    assert loaded.caption(photos[0]).words == ensemble_of(*models).caption(photos[0]).words
    loaded.save(tmp_path / "first")
    assert load(tmp_path / "first", device="cpu").options() == loaded.options()
    with pytest.raises(ModelError, match="does not exist"):
        load(tmp_path / "0", tmp_path / "none", device="cpu")


def test_models_with_equal_preprocessing_share_pixels(photos: list[Path]):
    ensemble = ensemble_of(stored(), stored(seed=81), stored(size=96), stored(order="BGR"))
    first, second, larger, bgr = ensemble.prepare(open_image(photos[0])).pixels
    assert first is second
    assert larger.shape == (96, 96, 3)
    np.testing.assert_array_equal(bgr, first[:, :, ::-1])
    assert (
        ensemble.prepare(open_image(photos[0])).crop_box
        == build().prepare(open_image(photos[0])).crop_box
    )
