"""The Python API: captions, explanations, streams and search options."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from toy_captioner import WORDS, assert_same, build, ensemble_of, stored

from captioner.caption_types import END_NAME, Caption
from captioner.data.images import open_image
from captioner.errors import ConfigError, ImageError, NotAnImageError
from captioner.inference.captioner import Captioner, Photo
from captioner.inference.engine import Prepared
from captioner.options import ExplanationMethod
from captioner.text.vocabulary import END

METHODS = ("attention_gate", "gradient_input", "grad_cam", "occlusion")


def test_captions_have_attention_and_probabilities(captioner: Captioner, photos: list[Path]):
    found = [captioner.caption(photo) for photo in photos]
    assert len({caption.words for caption in found}) > 3  # or the tests below would prove little
    for caption in found:
        steps = len(caption.words)
        assert 0 < steps <= 6
        assert set(caption.words) <= set(WORDS)
        assert caption.text == " ".join(caption.words)
        assert caption.alphas.shape == (steps, 2, 2)
        assert caption.log_probs.shape == caption.gates.shape == (steps,)
        assert {a.dtype for a in (caption.alphas, caption.log_probs, caption.gates)} == {
            np.dtype(np.float32)
        }
        np.testing.assert_allclose(caption.alphas.sum(axis=(1, 2)), 1, atol=1e-5)
        assert (caption.alphas >= 0).all()
        assert ((caption.gates > 0) & (caption.gates < 1)).all()
        assert (caption.log_probs <= 0).all()


@pytest.mark.parametrize("count", [1, 2])
def test_alternatives_have_the_probabilities_of_the_replaced_words(photos: list[Path], count: int):
    """Compared with explaining the sentence that has the other word at that position."""
    model = ensemble_of(*[stored(seed=80 + n) for n in range(count)])

    explained = model.explain(photos[0], "a dog runs", alternatives=20)

    every = len(WORDS) + 1  # and the end
    assert [len(others) for others in explained.alternatives] == [every] * 3
    for position, others in enumerate(explained.alternatives):
        assert [o.log_prob for o in others] == sorted((o.log_prob for o in others), reverse=True)
        assert {other.word for other in others} == {*WORDS, END_NAME}
        for other in others:
            words = ["a", "dog", "runs"][:position] + ([other.word] * (other.word != END_NAME))
            if other.word == END_NAME and words:
                cut = model.explain(photos[0], " ".join(words))
                end = cut.log_prob - float(cut.log_probs.sum())
                assert other.log_prob == pytest.approx(end, abs=1e-4)
            elif words:
                expected = model.explain(photos[0], " ".join(words)).log_probs[position]
                assert other.log_prob == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_changes_only_the_maps(
    captioner: Captioner, photos: list[Path], method: ExplanationMethod
):
    plain = captioner.captions(photos[0], num_captions=2, beam_size=3)

    found = captioner.captions(photos[0], num_captions=2, beam_size=3, method=method)

    for ours, before in zip(found, plain, strict=True):
        assert ours.method == method
        assert before.method == "attention"
        assert_same(replace(ours, alphas=before.alphas, method="attention"), before)
        assert ours.alphas.shape == before.alphas.shape
        sums = ours.alphas.sum(axis=(1, 2))
        if method == "attention_gate":
            np.testing.assert_allclose(ours.alphas, before.alphas * before.gates[:, None, None])
        else:
            assert ((abs(sums - 1) < 1e-5) | (sums == 0)).all()
            assert (ours.alphas == 0).any()  # what counts against a word is left out
            assert abs(ours.alphas - before.alphas).max() > 1e-4
        given = captioner.explain(photos[0], before.text, method=method)
        assert (given.method, given.words, given.crop_box) == (method, ours.words, ours.crop_box)
        np.testing.assert_allclose(given.alphas, ours.alphas, atol=1e-4)
        np.testing.assert_allclose(given.log_probs, ours.log_probs, atol=1e-4)
        np.testing.assert_allclose(given.gates, ours.gates, atol=1e-5)


def test_methods_work_in_half_precision_and_inside_inference_mode(photos: list[Path]):
    model = stored()
    for precision in ("fp32", "bf16", "fp16"):
        with torch.inference_mode():
            inside = Captioner(model, device="cpu", precision=precision)  # type: ignore[arg-type]
            for method in METHODS:
                assert np.isfinite(inside.caption(photos[0], method=method).alphas).all()


def test_invalid_methods_raise(captioner: Captioner, photos: list[Path]):
    with pytest.raises(ConfigError, match="is unknown; use one of these: attention"):
        captioner.caption(photos[0], method="lime")
    ensemble = ensemble_of(stored(), stored(seed=81))
    assert ensemble.caption(photos[0], method="attention_gate").method == "attention_gate"
    for call in (ensemble.caption, partial(ensemble.explain, text="a dog")):
        with pytest.raises(ConfigError, match="the method 'grad_cam' does not support ensembles"):
            call(photo=photos[0], method="grad_cam")


def test_a_model_that_generates_no_words(photos: list[Path]):
    captioner = build()
    with torch.no_grad():
        captioner.model.decoder.word_output.bias[END] = 99
    caption = captioner.caption(photos[0])
    assert (caption.words, caption.text) == ((), "")
    assert captioner.caption(photos[0], alternatives=2).alternatives == ()
    assert caption.alphas.shape == (0, 2, 2)
    assert caption.log_prob == pytest.approx(0, abs=1e-5)


def test_photos_can_be_paths_bytes_files_images_or_arrays(captioner: Captioner, photos: list[Path]):
    expected = captioner.caption(photos[0])
    content = photos[0].read_bytes()
    with photos[0].open("rb") as file, Image.open(photos[0]) as picture:
        pixels = np.asarray(picture.convert("RGB"))
        sources: list[Photo] = [
            str(photos[0]), file, io.BytesIO(content), content, picture, pixels, pixels / 255
        ]  # fmt: skip
        for source in sources:
            assert_same(captioner.caption(source), expected)
    explained = captioner.explain(photos[0], "a dog")
    for source in (content, pixels):
        assert_same(captioner.explain(source, "a dog"), explained)


def test_a_list_returns_a_list(captioner: Captioner, photos: list[Path]):
    pixels = np.asarray(Image.open(photos[1]).convert("RGB"))
    given = [photos[0], pixels, str(photos[2]), photos[3].read_bytes()]

    found = captioner.caption(given, batch_size=3)
    several = captioner.captions(given, num_captions=2, alternatives=1)

    for photo, caption, two in zip(photos[:4], found, several, strict=True):
        alone = captioner.captions(photo, num_captions=2)
        assert_same(caption, alone[0])
        for one, other in zip(two, alone, strict=True):
            assert_same(one, other)
        assert caption._repr_html_().startswith("<iframe")
        assert len(two[0].alternatives) == len(two[0].words)
    assert found[0].photo == photos[0].absolute()
    assert captioner.caption([]) == captioner.captions([]) == []


def test_an_unreadable_photo_in_a_list_is_named(captioner: Captioner, photos: list[Path]):
    with pytest.raises(
        NotAnImageError, match=r"^photos\[1\]: .*the given bytes: the file is not"
    ) as caught:
        captioner.caption([photos[0], b"no photo", photos[1]])
    assert "stream" in str(caught.value)
    with pytest.raises(ImageError, match=r"list\(photos\)"):
        captioner.caption(path for path in photos)  # type: ignore[call-overload]


def test_caption_refuses_num_captions(captioner: Captioner, photos: list[Path]):
    message = r"^num_captions is 3, but caption\(\) returns one caption per photo; use captions"
    for given in (photos[0], photos):
        with pytest.raises(ConfigError, match=message):
            captioner.caption(given, num_captions=3)
    assert_same(captioner.caption(photos[0], num_captions=1), captioner.caption(photos[0]))


def test_the_photo_is_not_modified(captioner: Captioner):
    photo = Image.new("L", (60, 50), 7)
    captioner.caption(photo)
    assert (photo.mode, photo.size, photo.getpixel((3, 3))) == ("L", (60, 50), 7)


def test_a_stream_reports_bad_photos_and_continues(
    captioner: Captioner, photos: list[Path], tmp_path: Path
):
    bad = tmp_path / "bad.jpg"
    bad.write_text("no photo")
    mixed = [bad, photos[0], photos[1], tmp_path / "missing.jpg", bad, bad, bad, photos[2]]
    results = list(captioner.stream(mixed, batch_size=2))
    assert [result.photo for result in results] == mixed
    for photo, result in zip(mixed, results, strict=True):
        if photo in photos:
            assert result.error is None
            assert_same(result.captions[0], captioner.caption(photo))
        else:
            assert result.captions == []
            assert isinstance(result.error, ImageError)
            assert photo.name in str(result.error)


def test_a_stream_consumes_photos_lazily(captioner: Captioner):
    taken = 0

    def endless() -> Iterator[Image.Image]:
        nonlocal taken
        for number in itertools.count():
            taken += 1
            yield Image.new("RGB", (50, 50), (number % 256, 0, 0))

    stream = captioner.stream(endless(), batch_size=4)
    assert taken == 0
    for number in range(20):
        next(stream)
        assert taken <= (number // 4 + 2) * 4
    stream.close()
    assert taken <= 24


@pytest.mark.parametrize(
    "given",
    [
        {"beams": 3},
        {"forced_words": "zeppelin"},
        {"batch_size": 2.5},
        {"alternatives": True},
        {"method": "lime"},
        {"words": ["a zeppelin"]},
        {"words": ["a dog"], "beam_size": 2},
    ],
    ids=str,
)
def test_a_stream_checks_its_options_immediately(captioner: Captioner, given: dict[str, Any]):
    *_, (name, value) = given.items()
    with pytest.raises(ConfigError, match=f"{name}|{value}") as caught:
        captioner.stream(["never read"], **given)
    assert "\n" not in str(caught.value)


def test_large_jpegs_are_decoded_at_a_reduced_size(
    captioner: Captioner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "large.jpg"
    ramp = np.linspace(0, 255, 2600).astype(np.uint8)
    grey = np.broadcast_to(ramp, (2000, 2600))
    Image.fromarray(np.stack([grey, grey[:, ::-1], grey], axis=2)).save(path)
    sizes = []

    def prepare(self: Captioner, image: Image.Image) -> Prepared:
        sizes.append(image.size)
        return self.ensemble.prepare(image)

    monkeypatch.setattr(Captioner, "prepare", prepare)
    found = captioner.caption(path)

    assert sizes == [(1300, 1000)]  # at least 640 pixels wide and high
    whole = captioner.caption(open_image(path))
    assert found.words == whole.words
    np.testing.assert_allclose(found.log_probs, whole.log_probs, atol=0.01)
    assert found.crop_box == whole.crop_box


@pytest.mark.parametrize(
    "strategy",
    [
        {"num_captions": 3, "length_penalty": 0.7},
        {"forced_words": "red cat", "num_captions": 2},
        {"temperature": 0.8, "num_captions": 4, "seed": 3},
    ],
    ids=str,
)
def test_streamed_captions_equal_single_ones(
    captioner: Captioner, photos: list[Path], strategy: dict[str, Any]
):
    options = captioner.options(**strategy)
    results = list(captioner.stream(photos, batch_size=4, **strategy))
    for photo, result in zip(photos, results, strict=True):
        alone = captioner.captions(photo, **strategy)
        assert 0 < len(alone) <= options.num_captions
        for one, two in zip(alone, result.captions, strict=True):
            assert_same(one, two)
        assert all(len(caption.words) <= 6 for caption in alone)


def test_options_that_no_caption_satisfies_raise(captioner: Captioner, photos: list[Path]):
    with pytest.raises(ConfigError, match="no caption satisfies the search options"):
        captioner.caption(photos[0], block_ngrams=1, min_length=9, max_length=12, beam_size=2)


def test_samples_are_reproducible_and_depend_on_photo_and_seed(
    captioner: Captioner, photos: list[Path], tmp_path: Path
):
    def sample(photo: Photo, seed: int = 0) -> list[tuple[str, ...]]:
        found = captioner.captions(photo, temperature=1.5, num_captions=6, seed=seed)
        return [caption.words for caption in found]

    assert sample(photos[0]) == sample(photos[0])
    assert len({str(sample(photo, seed)) for photo in photos[:3] for seed in range(3)}) == 9
    copy = tmp_path / "a copy.png"
    copy.write_bytes(photos[0].read_bytes())
    assert sample(copy) == sample(photos[0])  # depends on the pixels, not on the path
    with Image.open(photos[0]) as picture:
        assert sample(picture) == sample(photos[0])


# --- batches ---


def test_explain_batch_equals_explaining_single_photos(captioner: Captioner, photos: list[Path]):
    texts = ["a", "a dog runs on grass", "red cat"]
    prepared = [captioner.prepare(open_image(photo)) for photo in photos[:3]]

    explained = captioner.explain_batch(prepared, [captioner.known_words(text) for text in texts])

    for photo, text, caption in zip(photos, texts, explained, strict=False):
        assert_same(caption, captioner.explain(photo, text))
    given = [photos[0], b"", photos[1]]
    first, broken, last = captioner.stream(given, words=texts[1:], batch_size=1, keep_photos=False)
    assert broken.error is not None
    assert type(first.captions[0]) is Caption  # without a photo
    for result in (first, last):
        for text, caption in zip(texts[1:], result.captions, strict=True):
            assert_same(caption, captioner.explain(result.photo, text))


@pytest.mark.parametrize("strategy", [{}, {"beam_size": 1}, {"num_captions": 3}], ids=str)
def test_captions_of_features_equal_those_of_photos(
    captioner: Captioner,
    photos: list[Path],
    strategy: dict[str, int],
):
    prepared = [captioner.prepare(open_image(photo)) for photo in photos]
    pixels = torch.from_numpy(np.stack([photo.pixels[0] for photo in prepared]))
    with torch.no_grad():
        features = captioner.model.encode(pixels)
    regions = [photo.crop_box for photo in prepared]
    options = captioner.options(**strategy)
    found = captioner.caption_features(features, regions, options)
    for ours, expected in zip(found, captioner.caption_batch(prepared, options), strict=True):
        for one, two in zip(ours, expected, strict=True):
            assert_same(one, two)
    halves = captioner.caption_features(features.half(), regions, options)  # as in a feature cache
    assert halves[0][0].log_prob == pytest.approx(found[0][0].log_prob, abs=0.05)
