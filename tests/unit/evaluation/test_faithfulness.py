"""Deletion and insertion curves, compared with known areas, brute force and hand-made photos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from captioner.data.example import Example
from captioner.errors import ConfigError, DataError, ImageError
from captioner.evaluation import faithfulness
from captioner.evaluation.faithfulness import (
    BLUR,
    CURVES,
    MEAN,
    METHODS,
    ORDERS,
    Versions,
    Word,
    measure,
    measure_photo,
    measured_positions,
    region_orders,
    summarize,
)
from captioner.evaluation.report import as_text
from captioner.geometry import Geometry
from captioner.inference.captioner import Captioner
from captioner.inference.stored_model import StoredModel
from captioner.model.explanations import WordScorer
from captioner.options import FaithfulnessOptions
from captioner.text.vocabulary import UNKNOWN

GRID, REGIONS = (2, 3), 6


def test_orders_for_an_additive_model() -> None:
    """The model sums the weights of the remaining regions. Blurred regions count half.

    Deletion in the order of the weights costs most at first, and every curve is known.
    """
    weights = np.array([[3.0, 0, 1, 0, 2, 0], [0, 5, 0, 0, 0, 1]])
    best = np.argsort(-weights, axis=1, kind="stable")

    versions = Versions.of(np.stack([best, best[:, ::-1]]), 6)

    left = np.where(versions.masks, np.where(versions.fills == BLUR, 0.5, 0.0)[:, None], 1.0)
    found = (left @ weights.T)[versions.points, np.arange(2)[:, None]]
    assert found.shape == (3, 2, 2, 7)
    deletion_mean, deletion_blur, insertion = found
    assert deletion_mean[0, 0].tolist() == [6, 3, 1, 0, 0, 0, 0]
    assert deletion_mean[1, 0].tolist() == [6, 6, 6, 6, 5, 3, 0]
    assert deletion_blur[0, 1].tolist() == [6, 3.5, 3, 3, 3, 3, 3]
    assert insertion[0, 0].tolist() == [3, 4.5, 5.5, 6, 6, 6, 6]
    assert insertion[1, 0].tolist() == deletion_blur[0, 0, ::-1].tolist()
    assert len(left) < found.size  # versions that several points share are scored once


def orders_of(relevance, seed=0):
    relevances = {method: np.array(relevance, dtype=float) for method in METHODS}
    found = region_orders(relevances, Geometry.even(GRID), GRID, seed)
    return dict(zip(ORDERS, found, strict=True))


def test_orders_start_with_the_most_relevant_region() -> None:
    found = orders_of([[5, 4, 3, 2, 1, 0], [0, 1, 2, 9, 4, 5]])

    assert found["grad_cam"].tolist() == [[0, 1, 2, 3, 4, 5], [3, 5, 4, 2, 1, 0]]
    assert found["least_attended"].tolist() == [[5, 4, 3, 2, 1, 0], [0, 1, 2, 4, 5, 3]]
    assert set(found["centre"][0, :2]) == {1, 4}  # the middle column
    assert (found["random"][0] == found["random"][1]).all()


def test_ties_are_ordered_at_random_not_from_the_top() -> None:
    starts = {int(orders_of([[0.0] * REGIONS], seed)["grad_cam"][0, 0]) for seed in range(40)}

    assert starts == set(range(REGIONS))


def test_centre_order_uses_the_encoders_region_positions() -> None:
    """The region nearest to the centre comes first, also if padding shifts all regions."""
    even = Geometry.even((1, 4))
    shifted = even._replace(x=even.x._replace(first=even.x.first + even.x.pitch * 0.4))
    relevances = {method: np.zeros((1, 4)) for method in METHODS}

    found = region_orders(relevances, shifted, (1, 4), 0)[ORDERS.index("centre")]

    assert found[0, 0] == 1


@pytest.mark.parametrize(("limit", "expected"), [(9, [0, 1, 2, 4]), (2, [0, 2]), (1, [0])])
def test_content_words_are_measured(limit, expected) -> None:
    words = ("Two", "dogs", "run", "on", "grass", ".", "<unk>")

    assert measured_positions(words, [4, 5, 6, 7, 8, 9, UNKNOWN], limit).tolist() == expected


@pytest.fixture
def captioner(stored_model: StoredModel) -> Captioner:
    return Captioner(stored_model, device="cpu", precision="fp32")


@pytest.fixture
def image() -> Image.Image:
    noise = np.random.default_rng(3).integers(256, size=(64, 64, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def test_pixels_belong_to_the_nearest_region(captioner, image) -> None:
    photo = faithfulness._Photo(captioner.ensemble, image)
    geometry = captioner.model.geometry

    labels = photo.regions

    assert labels.shape == (64, 64)
    for y, x in [(0, 0), (10, 50), (33, 20), (63, 63)]:
        row = abs(geometry.y.centres(2) - (y + 0.5)).argmin()
        column = abs(geometry.x.centres(2) - (x + 0.5)).argmin()
        assert labels[y, x] == 2 * row + column
    # test_resnet's regions are off-centre, so equal quarters would be wrong
    assert not np.array_equal(labels, np.kron([[0, 1], [2, 3]], np.ones((32, 32), dtype=int)))


def test_versions_by_hand(captioner, image) -> None:
    """Both fills at both levels are compared with versions of the photo made by hand."""
    photo = faithfulness._Photo(captioner.ensemble, image)
    tokens = captioner.stored.vocabulary.encode(["a", "dog", "runs"])
    scorer = WordScorer(captioner.engine.exact_decoder, 1, tokens)
    fills = np.array([MEAN, BLUR, BLUR, MEAN])
    masks = np.array([[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=bool)

    with torch.inference_mode():
        grids, pixels = (
            photo.score(level, scorer, Versions(fills, masks, np.arange(4)))
            for level in ("grid", "pixels")
        )
        for n in range(4):
            version = photo.grid.clone()
            version[masks[n]] = photo.fill_grids[fills[n]][masks[n]]
            assert grids[n] == pytest.approx(scorer.every_word(version[None])[0].numpy())
            drawn = np.array(image)
            for region in np.flatnonzero(masks[n]):
                at = photo.regions == region
                drawn[at] = photo.fills[fills[n]][at]
            (encoded,) = captioner.ensemble.encode([captioner.prepare(Image.fromarray(drawn))])
            expected = scorer.every_word(encoded)[0].numpy()
            assert pixels[n] == pytest.approx(expected, abs=1e-5)
    assert (photo.fills[MEAN] == np.rint(np.array(image).mean(axis=(0, 1)))).all()
    assert photo.fills[BLUR].std() < np.array(image).std() / 4


def test_all_orders_share_the_first_and_last_point(captioner, image) -> None:
    options = FaithfulnessOptions(max_words=2, steps=2)

    words = measure_photo(captioner, image, options, captioner.options(), reference="A dog runs.")

    assert [one.word for one in words] == ["dog", "runs"]
    for one in words:
        for level in ("grid", "pixels"):
            curves = dict(zip(CURVES, one.curves[level], strict=True))
            assert curves["deletion_mean"].shape == (len(ORDERS), 3)
            for deletion in ("deletion_mean", "deletion_blur"):
                np.testing.assert_allclose(curves[deletion][:, 0], 0, atol=1e-5)
                assert np.ptp(curves[deletion][:, -1]) < 1e-5
            np.testing.assert_allclose(curves["insertion_blur"][:, -1], 0, atol=1e-5)
            np.testing.assert_allclose(
                curves["insertion_blur"][:, 0], curves["deletion_blur"][:, -1], atol=1e-5
            )


def test_words_are_those_of_the_generated_caption(captioner, image) -> None:
    options = FaithfulnessOptions(max_words=50, steps=1, level="grid")
    [[caption]] = captioner.caption_batch([captioner.prepare(image)], captioner.options())

    words = measure_photo(captioner, image, options, captioner.options())

    tokens = captioner.stored.vocabulary.encode(caption.words)
    at = measured_positions(caption.words, tokens, 50)
    assert [one.word for one in words] == [caption.words[position] for position in at]
    np.testing.assert_allclose([one.log_prob for one in words], caption.log_probs[at], atol=1e-4)


def synthetic_result(count: int) -> dict[str, Any]:
    """Return results of two words per photo. The curves of Grad-CAM drop by 2 nats, others by 1."""
    curve = np.zeros((len(CURVES), len(ORDERS), 3))
    curve[:2, :, 1:] = -1
    curve[:2, ORDERS.index("grad_cam"), 1:] = -2
    curve[2, :, 0] = -1
    curve[2, ORDERS.index("occlusion"), 1] = -1
    words = tuple(
        Word(f"{n}.jpg", word, -0.5, {"grid": curve * (1 + n / 100)})
        for n in range(count)
        for word in ("dog", "grass")
    )
    return summarize(words, count, steps=2, regions=81)


def test_summary_compares_with_the_baselines() -> None:
    found = synthetic_result(40)

    assert (found["photos"], found["photos_with_words"], found["words"]) == (40, 40, 80)
    deletion = found["grid"]["deletion_mean"]
    scale = 1 + np.arange(40).mean() / 100
    assert deletion["random"]["area"] == pytest.approx(-0.75 * scale)
    assert deletion["grad_cam"]["area"] == pytest.approx(-1.5 * scale)
    low, high = deletion["grad_cam"]["interval"]
    assert low < -1.5 * scale < high
    over = deletion["grad_cam"]["over_centre"]
    assert over["difference"] == pytest.approx(0.75 * scale)
    assert over["significant"] is True
    assert not deletion["attention"]["over_random"]["significant"]
    worse = found["grid"]["insertion_blur"]["occlusion"]["over_random"]
    assert worse["difference"] < 0
    assert worse["significant"] is True
    lines = as_text({"faithfulness": found})
    (row,) = (line for line in lines.splitlines() if line.startswith("Grad-CAM"))
    assert row.count("**") == 2
    (row,) = (line for line in lines.splitlines() if line.startswith("occlusion"))
    assert "*" not in row  # significantly worse gets no star


def test_photos_are_sampled_evenly_and_broken_ones_reported(
    captioner, image, tmp_path: Path, monkeypatch
) -> None:
    for number in range(6):
        image.save(tmp_path / f"{number}.png")
    (tmp_path / "2.png").write_bytes(b"no photo")
    photos = [Example(0, path, ("a dog runs",)) for path in sorted(tmp_path.iterdir())]
    options = FaithfulnessOptions(max_photos=3, max_words=1, steps=1, level="grid")
    errors: list[ImageError] = []

    found = measure(captioner, photos, options, captioner.options(), on_error=errors.append)

    assert {one["photo"] for one in found["per_word"]} == {"0.png", "4.png"}
    assert (found["photos"], len(errors)) == (2, 1)
    with pytest.raises(DataError, match="contains no photos to measure"):
        measure(captioner, [], options, captioner.options(), on_error=errors.append)
    monkeypatch.setattr(captioner.ensemble, "engines", captioner.ensemble.engines * 2)
    with pytest.raises(ConfigError, match="faithfulness cannot be measured for an ensemble"):
        measure(captioner, photos, options, captioner.options(), on_error=errors.append)
