"""Captioning from Python: photos in, captions with their evidence out, in constant memory."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from captioner import load
from captioner.api import Captioner, Photo
from captioner.caption import Caption, Region
from captioner.config import DecoderConfig, SearchOptions
from captioner.data.preprocessing import Preprocessing
from captioner.errors import ConfigError, ImageError, ModelError
from captioner.model_folder import StoredModel
from captioner.models.captioner import CaptionModel
from captioner.models.encoder import Encoder
from captioner.vocabulary import END, START, Vocabulary

WORDS = ("a", "dog", "cat", "runs", "sleeps", "on", "grass", "red")


def build(resize: str = "crop") -> Captioner:
    torch.manual_seed(80)
    decoder = DecoderConfig(embed_dim=8, hidden_dim=8, attention_dim=8, dropout=0.5)
    preprocessing = Preprocessing(48, resize)  # type: ignore[arg-type]
    model = CaptionModel(Encoder("timm/test_resnet"), decoder, preprocessing, len(WORDS) + 4)
    with torch.no_grad():  # a decided model: photos differ in their captions and their attention
        for module in (model.decoder.attention.scorer.energy, model.decoder.init_hidden):
            module.weight *= 8
        model.decoder.context_output.weight *= 4
        model.decoder.context_gates.weight *= 12
        model.decoder.word_output.weight *= 3
    stored = StoredModel(
        model, decoder, Vocabulary(WORDS), SearchOptions(beam_size=3, max_length=6)
    )
    return Captioner(stored, device="cpu", precision="fp32")


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    return build()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Ten photos of different shapes."""
    folder = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    paths = []
    for number in range(10):
        height, width = generator.integers(40, 90, size=2)
        blocks = generator.integers(256, size=(3, 4, 3), dtype=np.uint8)
        path = folder / f"{number}.png"
        Image.fromarray(blocks).resize((int(width), int(height)), Image.Resampling.NEAREST).save(
            path
        )
        paths.append(path)
    return paths


def assert_same(one: Caption, two: Caption) -> None:
    assert one.words == two.words
    assert one.region == two.region
    assert one.log_prob == pytest.approx(two.log_prob, abs=1e-4)
    np.testing.assert_allclose(one.alphas, two.alphas, atol=1e-5)
    np.testing.assert_allclose(one.log_probs, two.log_probs, atol=1e-4)
    np.testing.assert_allclose(one.gates, two.gates, atol=1e-5)


# --- One photo ---


def test_captions_carry_their_evidence(captioner: Captioner, photos: list[Path]):
    found = [captioner.caption(photo) for photo in photos]
    assert len({caption.words for caption in found}) > 3  # else the tests below prove little
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


@torch.inference_mode()
def test_probabilities_are_the_models_own(captioner: Captioner, photos: list[Path]):
    """Words and end token, teacher forced, give what the search says."""
    ended = 0
    for photo in photos:
        caption = captioner.caption(photo)
        numbers = captioner.stored.vocabulary.encode(caption.words)
        pixels = torch.from_numpy(np.array(captioner.prepare(photo).pixels[0]))[None]
        decoder = captioner.model.decoder
        tokens = torch.tensor([[[START, *numbers]]])
        unrolled = decoder(decoder.memory(captioner.model.encode(pixels)), tokens)
        logits = decoder.readout(unrolled.embedded, *unrolled.outputs)
        table = logits[0, 0].log_softmax(-1)
        words = [float(table[t, number]) for t, number in enumerate(numbers)]
        np.testing.assert_allclose(caption.log_probs, words, atol=1e-4)
        np.testing.assert_allclose(
            caption.alphas.reshape(len(words), -1), unrolled.alphas[0, 0, : len(words)], atol=1e-5
        )
        whole = sum(words)
        if len(words) < 6:
            ended += 1
            whole += float(table[len(words), END])
        assert caption.log_prob == pytest.approx(whole, abs=1e-3)
    assert ended > 0


def test_a_sentence_of_the_users_is_explained_as_the_models_own_is(
    captioner: Captioner, photos: list[Path]
):
    compared = 0
    for photo in photos:
        own = captioner.caption(photo)
        given = captioner.explain(photo, own.text)
        assert given.words == own.words
        np.testing.assert_allclose(given.log_probs, own.log_probs, atol=1e-4)
        np.testing.assert_allclose(given.alphas, own.alphas, atol=1e-5)
        np.testing.assert_allclose(given.gates, own.gates, atol=1e-5)
        assert given.region == own.region
        if len(own.words) < 6:  # one that was cut has no end to compare
            compared += 1
            assert given.log_prob == pytest.approx(own.log_prob, abs=1e-3)
    assert compared > 0


@pytest.mark.parametrize("text", ["A dog on a zeppelin.", "", "..."])
def test_a_sentence_that_cannot_be_explained_says_why(
    captioner: Captioner, photos: list[Path], text: str
):
    with pytest.raises(ConfigError, match=r"does not know.* zeppelin|no words") as caught:
        captioner.explain(photos[0], text)

    assert "vocabulary" in str(caught.value)


def test_a_model_with_nothing_to_say(photos: list[Path]):
    captioner = build()
    with torch.no_grad():
        captioner.model.decoder.word_output.bias[END] = 99
    caption = captioner.caption(photos[0])
    assert (caption.words, caption.text) == ((), "")
    assert caption.alphas.shape == (0, 2, 2)
    assert caption.log_prob == pytest.approx(0, abs=1e-5)


def test_several_captions_come_best_first(captioner: Captioner, photos: list[Path]):
    found = captioner.captions(photos[0], num_captions=3)
    assert len({caption.words for caption in found}) == 3
    scores = [caption.log_prob for caption in found]
    assert scores == sorted(scores, reverse=True)
    assert_same(found[0], captioner.caption(photos[0]))


def test_paths_texts_files_bytes_and_pictures_are_photos(captioner: Captioner, photos: list[Path]):
    expected = captioner.caption(photos[0])
    with photos[0].open("rb") as file, Image.open(photos[0]) as picture:
        sources: list[Photo] = [str(photos[0]), file, io.BytesIO(photos[0].read_bytes()), picture]
        for source in sources:
            assert_same(captioner.caption(source), expected)


@pytest.mark.parametrize("kind", ["turned", "transparent", "16 bit", "palette"])
def test_a_picture_is_read_as_its_file_is(captioner: Captioner, tmp_path: Path, kind: str):
    """`Image.open` neither turns a phone's photo nor lays transparency on white: captions must."""
    ramp = np.linspace(0, 255, 64 * 48).reshape(48, 64)
    path = tmp_path / "photo.png"
    if kind == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        Image.fromarray(ramp.astype(np.uint8)).convert("RGB").save(path, exif=exif)
    elif kind == "transparent":
        picture = Image.new("RGBA", (64, 48), (0, 0, 0, 0))
        picture.paste((255, 0, 0, 255), (8, 8, 40, 40))
        picture.save(path)
    elif kind == "16 bit":
        Image.fromarray((ramp * 257).astype(np.uint16)).save(path)
    else:
        Image.fromarray(ramp.astype(np.uint8)).convert("P").save(path, transparency=0)
    with Image.open(path) as picture:
        found = captioner.prepare(picture)
    expected = captioner.prepare(path)
    np.testing.assert_array_equal(found.pixels, expected.pixels)
    assert found.region == expected.region


def test_the_region_says_what_was_seen(captioner: Captioner, tmp_path: Path):
    Image.new("RGB", (100, 50)).save(tmp_path / "wide.png")
    Image.new("RGB", (50, 200)).save(tmp_path / "high.png")
    assert captioner.caption(tmp_path / "wide.png").region == Region(0.25, 0.0, 0.75, 1.0)
    assert captioner.caption(tmp_path / "high.png").region == Region(0.0, 0.375, 1.0, 0.625)
    assert build("squash").caption(tmp_path / "wide.png").region == Region()


def test_a_photo_that_cannot_be_read_is_named(captioner: Captioner, tmp_path: Path):
    (tmp_path / "bad.jpg").write_text("no photo")
    for name in ("bad.jpg", "missing.jpg"):
        with pytest.raises(ImageError, match=name):
            captioner.caption(tmp_path / name)


def test_the_photo_that_is_given_stays_as_it_is(captioner: Captioner):
    photo = Image.new("L", (60, 50), 7)
    captioner.caption(photo)
    assert (photo.mode, photo.size, photo.getpixel((3, 3))) == ("L", (60, 50), 7)


# --- Many photos ---


def test_a_batch_is_its_photos_one_by_one(captioner: Captioner, photos: list[Path]):
    options = captioner.options(num_captions=2)
    batch = captioner.caption_batch([captioner.prepare(photo) for photo in photos], options)
    assert [len(captions) for captions in batch] == [2] * len(photos)
    for photo, captions in zip(photos, batch, strict=True):
        for together, alone in zip(
            captions, captioner.captions(photo, num_captions=2), strict=True
        ):
            assert_same(together, alone)


@pytest.mark.parametrize("batch_size", [1, 3, 10, 99])
def test_a_stream_keeps_the_order(captioner: Captioner, photos: list[Path], batch_size: int):
    results = list(captioner.stream(iter(photos), batch_size=batch_size))
    assert [result.photo for result in results] == photos
    for photo, result in zip(photos, results, strict=True):
        assert result.error is None
        assert_same(result.captions[0], captioner.caption(photo))


def test_bad_photos_in_a_stream_are_told_and_the_rest_goes_on(
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


def test_a_stream_of_nothing(captioner: Captioner):
    assert list(captioner.stream([])) == []


def test_a_stream_takes_photos_as_they_are_needed(captioner: Captioner):
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


def test_an_error_of_the_photos_source_comes_through(captioner: Captioner, photos: list[Path]):
    def source() -> Iterator[Path]:
        yield from photos[:2]
        raise KeyError("the caller's own")

    with pytest.raises(KeyError, match="the caller's own"):
        list(captioner.stream(source(), batch_size=1))


def test_a_stream_searches_as_told(captioner: Captioner, photos: list[Path]):
    options = SearchOptions(beam_size=2, num_captions=2, max_length=1)
    results = list(captioner.stream(photos, options))
    assert all(len(result.captions) == 2 for result in results)
    assert all(len(c.words) <= 1 for result in results for c in result.captions)


# --- Options and loading ---


def test_options_start_from_the_models_own(captioner: Captioner):
    assert captioner.options() == SearchOptions(beam_size=3, max_length=6)
    assert captioner.options(beam_size=1) == SearchOptions(beam_size=1, max_length=6)


def test_unknown_options_are_named(captioner: Captioner, photos: list[Path]):
    names = ", ".join(sorted(field.name for field in fields(SearchOptions)))
    with pytest.raises(ConfigError, match=f"'beams' is no search option; give {names}"):
        captioner.options(beams=3)
    with pytest.raises(ConfigError, match="'beam' is no search option"):
        captioner.caption(photos[0], beam=3)


def test_options_out_of_range_are_named(captioner: Captioner):
    with pytest.raises(ConfigError, match="num-captions is 4"):
        captioner.options(num_captions=4)


def test_a_saved_model_loads_and_says_the_same(
    captioner: Captioner, photos: list[Path], tmp_path: Path
):
    captioner.save(tmp_path / "model")
    loaded = load(tmp_path / "model", device="cpu", precision="fp32")
    assert loaded.info == captioner.info == {}
    assert loaded.caption(photos[0]).words == captioner.caption(photos[0]).words


def test_loading_says_what_is_wrong(captioner: Captioner, tmp_path: Path):
    with pytest.raises(ModelError, match="does not exist"):
        load(tmp_path / "none")
    captioner.save(tmp_path / "model")
    with pytest.raises(ConfigError, match="device 'abacus'"):
        load(tmp_path / "model", device="abacus")
    with pytest.raises(ConfigError, match="precision"):
        load(tmp_path / "model", device="cpu", precision="fp7")  # type: ignore[arg-type]


def test_dropout_is_off_and_nothing_is_learned(captioner: Captioner, photos: list[Path]):
    assert_same(captioner.caption(photos[0]), captioner.caption(photos[0]))
    assert not captioner.model.training
    assert all(p.grad is None for p in captioner.model.parameters())
