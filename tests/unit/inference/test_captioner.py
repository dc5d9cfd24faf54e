"""The Python API: captions, explanations, streams, search options and ensembles."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from toy_captioner import (
    STRATEGIES,
    WORDS,
    assert_same,
    build,
    ensemble_of,
    make_photos,
    stored,
)  # fmt: skip

from captioner import load
from captioner.caption import END_NAME, CropBox
from captioner.data.images import open_image
from captioner.errors import ConfigError, ImageError, ModelError, NotAnImageError
from captioner.inference.captioner import Captioner, Photo
from captioner.inference.engine import Prepared
from captioner.inference.folder import Graphs, StoredModel
from captioner.options import ExplanationMethod, SearchOptions
from captioner.text.vocabulary import END, Vocabulary


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    return build()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_photos(tmp_path_factory.mktemp("photos"))


# --- One photo ---


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


def test_explaining_a_models_caption_gives_the_same_evidence(
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
        assert given.crop_box == own.crop_box
        if len(own.words) < 6:  # a truncated caption has no end token
            compared += 1
            assert given.log_prob == pytest.approx(own.log_prob, abs=1e-3)
    assert compared > 0


@pytest.mark.parametrize("text", ["A dog on a zeppelin.", "", "..."])
def test_sentences_that_cannot_be_explained_raise(
    captioner: Captioner, photos: list[Path], text: str
):
    with pytest.raises(ConfigError, match=r"does not know.* zeppelin|no words") as caught:
        captioner.explain(photos[0], text)

    assert "vocabulary" in str(caught.value)


# --- Alternatives ---


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


def test_greedy_captions_consist_of_the_first_alternatives(
    captioner: Captioner, photos: list[Path]
):
    options = {"beam_size": 1, "alternatives": 3}
    for photo in photos:
        caption = captioner.caption(photo, **options)
        assert [words[0].word for words in caption.alternatives] == list(caption.words)
        firsts = [words[0].log_prob for words in caption.alternatives]
        np.testing.assert_allclose(firsts, caption.log_probs, atol=1e-4)
        assert {len(words) for words in caption.alternatives} == {3}


def test_alternatives_are_returned_on_request(captioner: Captioner, photos: list[Path]):
    assert captioner.caption(photos[0]).alternatives == ()
    assert all(
        len(caption.alternatives) == len(caption.words)
        for result in captioner.stream(photos, alternatives=1)
        for caption in result.captions
    )
    with pytest.raises(ConfigError, match="alternatives is -1; give a whole"):
        captioner.caption(photos[0], alternatives=-1)


METHODS = ("attention_gate", "gradient_input", "grad_cam", "occlusion")


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
            assert abs(ours.alphas - before.alphas).max() > 1e-4
        given = captioner.explain(photos[0], before.text, method=method)
        np.testing.assert_allclose(given.alphas, ours.alphas, atol=1e-4)
        assert (given.method, given.words) == (method, ours.words)


def test_methods_work_in_half_precision_and_inside_inference_mode(photos: list[Path]):
    model = stored()
    for precision in ("fp32", "bf16", "fp16"):
        with torch.inference_mode():
            inside = Captioner(model, device="cpu", precision=precision)  # type: ignore[arg-type]
            for method in METHODS:
                assert np.isfinite(inside.caption(photos[0], method=method).alphas).all()


def test_invalid_methods_raise(captioner: Captioner, photos: list[Path]):
    with pytest.raises(
        ConfigError, match="method is 'lime'; give one of attention, attention_gate"
    ):
        captioner.caption(photos[0], method="lime")
    with pytest.raises(ConfigError, match="method is 'lime'"):  # before reading the photo
        captioner.stream(photos, method="lime")
    ensemble = ensemble_of(stored(), stored(seed=81))
    assert ensemble.caption(photos[0], method="attention_gate").method == "attention_gate"
    for call in (ensemble.caption, partial(ensemble.explain, text="a dog")):
        with pytest.raises(ConfigError, match="method grad_cam needs a single model, not an ens"):
            call(photo=photos[0], method="grad_cam")


def test_a_caption_keeps_a_small_copy_of_its_photo(captioner: Captioner, tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (900, 300), "blue").save(tmp_path / "x.jpg", exif=exif)

    for caption in (
        captioner.caption(tmp_path / "x.jpg"),
        captioner.explain(tmp_path / "x.jpg", "a"),
    ):
        assert caption.photo == (tmp_path / "x.jpg").absolute()  # encoded only when displayed
        assert "iframe" in caption._repr_html_()


def test_a_model_that_generates_no_words(photos: list[Path]):
    captioner = build()
    with torch.no_grad():
        captioner.model.decoder.word_output.bias[END] = 99
    caption = captioner.caption(photos[0])
    assert (caption.words, caption.text) == ((), "")
    assert captioner.caption(photos[0], alternatives=2).alternatives == ()
    assert caption.alphas.shape == (0, 2, 2)
    assert caption.log_prob == pytest.approx(0, abs=1e-5)


def test_captions_are_sorted_best_first(captioner: Captioner, photos: list[Path]):
    found = captioner.captions(photos[0], num_captions=3)
    assert len({caption.words for caption in found}) == 3
    scores = [caption.log_prob for caption in found]
    assert scores == sorted(scores, reverse=True)
    assert_same(found[0], captioner.caption(photos[0]))


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


# --- A list of photos ---


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_returns_a_list(captioner: Captioner, photos: list[Path], kind: Any):
    pixels = np.asarray(Image.open(photos[1]).convert("RGB"))
    given = kind([photos[0], pixels, str(photos[2]), photos[3].read_bytes()])

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


def test_an_unreadable_photo_in_a_list_is_named(
    captioner: Captioner, photos: list[Path], tmp_path: Path
):
    (tmp_path / "bad.jpg").write_text("no photo")
    for bad, name in ((tmp_path / "bad.jpg", "bad.jpg"), (b"no photo", "the given bytes")):
        with pytest.raises(NotAnImageError, match=rf"^photos\[1\]: .*{name}: not a") as caught:
            captioner.caption([photos[0], bad, photos[1]])
        assert "stream" in str(caught.value)
        found = list(captioner.stream([photos[0], bad, photos[1]]))
        assert [bool(result.error) for result in found] == [False, True, False]
    with pytest.raises(ImageError, match=r"give one photo"):
        captioner.explain(photos, "a dog")  # type: ignore[arg-type]
    with pytest.raises(ImageError, match=r"list\(photos\)"):
        captioner.caption(path for path in photos)  # type: ignore[call-overload]


def test_caption_refuses_num_captions(captioner: Captioner, photos: list[Path]):
    message = r"^num_captions is 3, but caption\(\) returns one per photo; use captions\(\)$"
    for given in (photos[0], photos):
        with pytest.raises(ConfigError, match=message):
            captioner.caption(given, num_captions=3)
    assert_same(captioner.caption(photos[0], num_captions=1), captioner.caption(photos[0]))


# --- Interactive use ---


def test_repr_describes_the_model(tmp_path: Path):
    one, other = stored(), stored(seed=81)
    one.vocabulary = Vocabulary(WORDS[:-1], ("short", "long"))
    assert repr(build()) == (
        "<Captioner encoder timm/test_resnet, grid (2, 2), words 8, styles [], device cpu, "
        "precision fp32>"
    )
    assert repr(ensemble_of(other, stored())).startswith("<Captioner models 2, encoder timm/test")
    assert "styles ['short', 'long']" in repr(ensemble_of(one))


def test_tab_completion_shows_public_names(captioner: Captioner, photos: list[Path]):
    caption = captioner.caption(photos[0])

    assert [name for name in dir(captioner) if not name.startswith("_")] == [
        "batch_captioner", "caption", "captions", "device", "explain", "from_pretrained", "info",
        "known_words", "options", "precision", "push_to_hub", "save", "save_pretrained", "stored",
        "stream",
    ]  # fmt: skip
    assert dir(caption) == [
        "alphas", "alternatives", "as_dict", "confidence", "crop_box", "doubtful", "gates",
        "geometry", "log_prob", "log_probs", "method", "photo", "pieces", "regions", "text",
        "text_until", "unsure", "words",
    ]  # fmt: skip
    assert all(hasattr(captioner, name) for name in dir(captioner))


@pytest.mark.parametrize("kind", ["rotated", "transparent", "16 bit", "palette"])
def test_an_image_gives_the_same_caption_as_its_file(
    captioner: Captioner, tmp_path: Path, kind: str
):
    """``Image.open`` neither applies EXIF rotation nor blends transparency; captioning must."""
    ramp = np.linspace(0, 255, 64 * 48).reshape(48, 64)
    path = tmp_path / "photo.png"
    if kind == "rotated":
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
        found = captioner.prepare(open_image(picture))
    expected = captioner.prepare(open_image(path))
    np.testing.assert_array_equal(found.pixels, expected.pixels)
    assert found.crop_box == expected.crop_box


def test_crop_box_is_the_part_that_the_model_saw(captioner: Captioner, tmp_path: Path):
    Image.new("RGB", (100, 50)).save(tmp_path / "wide.png")
    Image.new("RGB", (50, 200)).save(tmp_path / "high.png")
    assert captioner.caption(tmp_path / "wide.png").crop_box == CropBox(0.25, 0.0, 0.75, 1.0)
    assert captioner.caption(tmp_path / "high.png").crop_box == CropBox(0.0, 0.375, 1.0, 0.625)
    assert build("squash").caption(tmp_path / "wide.png").crop_box == CropBox()


def test_the_error_for_an_unreadable_photo_names_it(captioner: Captioner, tmp_path: Path):
    (tmp_path / "bad.jpg").write_text("no photo")
    for name in ("bad.jpg", "missing.jpg"):
        with pytest.raises(ImageError, match=name):
            captioner.caption(tmp_path / name)


def test_the_photo_is_not_modified(captioner: Captioner):
    photo = Image.new("L", (60, 50), 7)
    captioner.caption(photo)
    assert (photo.mode, photo.size, photo.getpixel((3, 3))) == ("L", (60, 50), 7)


# --- Many photos ---


@pytest.mark.parametrize("batch_size", [1, 3, 10, 99])
def test_a_stream_keeps_the_order(captioner: Captioner, photos: list[Path], batch_size: int):
    results = list(captioner.stream(iter(photos), batch_size=batch_size))
    assert [result.photo for result in results] == photos
    for photo, result in zip(photos, results, strict=True):
        assert result.error is None
        assert_same(result.captions[0], captioner.caption(photo))


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


def test_an_empty_stream(captioner: Captioner):
    assert list(captioner.stream([])) == []


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


def test_errors_of_the_photo_iterator_propagate(captioner: Captioner, photos: list[Path]):
    def source() -> Iterator[Path]:
        yield from photos[:2]
        raise KeyError("the caller's own")

    with pytest.raises(KeyError, match="the caller's own"):
        list(captioner.stream(source(), batch_size=1))


def test_a_stream_uses_its_search_options(captioner: Captioner, photos: list[Path]):
    results = list(captioner.stream(photos, beam_size=2, num_captions=2, max_length=1))
    assert all(len(result.captions) == 2 for result in results)
    assert all(len(c.words) <= 1 for result in results for c in result.captions)


# --- Options and loading ---


def test_options_default_to_the_models(captioner: Captioner):
    assert captioner.options() == SearchOptions(beam_size=3, max_length=6)
    assert captioner.options(beam_size=1) == SearchOptions(beam_size=1, max_length=6)


def test_unknown_options_are_named(captioner: Captioner, photos: list[Path]):
    names = ", ".join(sorted(field.name for field in fields(SearchOptions)))
    with pytest.raises(ConfigError, match=f"Unknown search option 'beams'; give one of {names}"):
        captioner.options(beams=3)
    with pytest.raises(ConfigError, match="Unknown search option 'beam'"):
        captioner.caption(photos[0], beam=3)


def test_options_out_of_range_are_named(captioner: Captioner):
    with pytest.raises(ConfigError, match="num_captions is 4"):
        captioner.options(num_captions=4)


def test_a_saved_model_gives_the_same_captions(
    captioner: Captioner, photos: list[Path], tmp_path: Path
):
    captioner.save(tmp_path / "model")
    loaded = load(tmp_path / "model", device="cpu", precision="fp32")
    assert loaded.info == captioner.info == {}
    assert loaded.caption(photos[0]).words == captioner.caption(photos[0]).words


def test_loading_errors(captioner: Captioner, tmp_path: Path):
    with pytest.raises(ModelError, match="does not exist"):
        load(tmp_path / "none")
    captioner.save(tmp_path / "model")
    with pytest.raises(ConfigError, match="device 'abacus'"):
        load(tmp_path / "model", device="abacus")
    with pytest.raises(ConfigError, match="precision"):
        load(tmp_path / "model", device="cpu", precision="fp7")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda c, photo: load([c, c]), r"^a model is \[.*; give each folder by its own path$"),
        (lambda c, photo: load(device=None), "device None is not available"),
        (lambda c, photo: load(device="meta"), "device 'meta' is not available"),
        (
            lambda c, photo: c.explain(photo, None),
            "caption to explain is None; give a string$",
        ),
        (lambda c, photo: c.explain(photo, ["a", "cat"]), "explain is .'a', 'cat'.; give a string"),
        (lambda c, photo: c.caption(photo, alternatives="2"), "alternatives is .2.; give a whole"),
        (lambda c, photo: c.caption(photo, alternatives=True), "alternatives is True; give"),
        (lambda c, photo: c.caption(photo, alternatives=1.5), "alternatives is 1.5; give a whole"),
        (lambda c, photo: c.options(forced_words=5), "^forced_words is 5; give words$"),
        (lambda c, photo: c.options(guard_endings="no"), "^guard_endings is 'no'; give true or"),
    ],
)
def test_invalid_photos_raise_in_one_line(
    captioner: Captioner, photos: list[Path], wrong: Any, words: str
):
    with pytest.raises(ConfigError, match=words) as caught:
        wrong(captioner, photos[0])
    assert "\n" not in str(caught.value)


def test_one_path_is_a_stream_of_one_photo(captioner: Captioner, photos: list[Path]):
    for photo in (photos[0], str(photos[0])):
        (result,) = captioner.stream(photo)
        assert_same(result.captions[0], captioner.caption(photo))


def test_a_single_photo_of_any_kind_is_a_stream(captioner: Captioner, photos: list[Path]):
    content = photos[0].read_bytes()
    for photo in (content, io.BytesIO(content), np.asarray(Image.open(photos[0]).convert("RGB"))):
        (result,) = captioner.stream(photo)
        assert_same(result.captions[0], captioner.caption(photos[0]))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"beams": 3}, "Unknown search option 'beams'"),
        ({"beam_size": 0}, "beam_size is 0"),
        ({"forced_words": "zeppelin"}, "zeppelin"),
        ({"batch_size": 0}, "batch_size is 0; give an integer >= 1"),
        ({"batch_size": 2.5}, "batch_size is 2.5; give an integer >= 1"),
        ({"style": "poem"}, "poem"),
        ({"alternatives": -1}, "alternatives is -1; give a whole"),
        ({"alternatives": "3"}, "alternatives is '3'; give a whole"),
    ],
)
def test_a_stream_checks_its_options_immediately(captioner: Captioner, given: Any, expected: str):
    with pytest.raises(ConfigError, match=expected):
        captioner.stream(["never read"], **given)


@pytest.mark.parametrize("given", ["path", "bytes"])
def test_large_jpegs_are_decoded_at_a_reduced_size(
    given, captioner: Captioner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    found = captioner.caption(path if given == "path" else path.read_bytes())

    assert sizes == [(1300, 1000)]  # at least 640 pixels wide and high
    whole = captioner.caption(open_image(path))
    assert found.words == whole.words
    np.testing.assert_allclose(found.log_probs, whole.log_probs, atol=0.01)
    assert found.crop_box == whole.crop_box


# --- Search strategies ---


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
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


def test_forced_words_occur_and_banned_words_do_not(captioner: Captioner, photos: list[Path]):
    for photo in photos:
        found = captioner.captions(
            photo, forced_words=["Red", "cat."], banned_words="DOG, zeppelin", num_captions=3
        )
        assert len(found) == 3
        for caption in found:
            assert {"red", "cat"} <= set(caption.words)
            assert "dog" not in caption.words


def test_guard_endings_prevents_bad_endings(captioner: Captioner, photos: list[Path]):
    wide = {"beam_size": 30, "num_captions": 30}
    unguarded, guarded = (
        {c.words[-1] for photo in photos for c in captioner.captions(photo, **more) if c.words}
        for more in (wide, {**wide, "guard_endings": True})
    )
    assert unguarded & {"a", "on"}
    assert not guarded & {"a", "on"}


def test_unknown_forced_words_raise_in_one_line(captioner: Captioner, photos: list[Path]):
    with pytest.raises(ConfigError, match="forced_words contains zeppelin") as caught:
        captioner.caption(photos[0], forced_words=["zeppelin", "dog"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["forced_words", "banned_words"])
def test_two_words_in_one_entry_raise(captioner: Captioner, photos: list[Path], name: str):
    with pytest.raises(ConfigError, match=r"'red dog', which is 2 words \(red dog\)"):
        captioner.caption(photos[0], **{name: ["red dog"]})


@pytest.mark.parametrize(
    "impossible",
    [
        {"banned_words": WORDS, "min_length": 1},
        {"banned_words": WORDS, "min_length": 1, "temperature": 1.0, "num_captions": 3},
        {"banned_words": WORDS, "min_length": 1, "beam_size": 4, "beam_groups": 2},
        {"block_ngrams": 1, "min_length": 9, "max_length": 12, "beam_size": 2},
    ],
    ids=str,
)
def test_options_that_no_caption_satisfies_raise(
    captioner: Captioner, photos: list[Path], impossible: dict[str, Any]
):
    with pytest.raises(ConfigError, match="no caption satisfies the search options") as caught:
        captioner.captions(photos[0], **impossible)
    assert "\n" not in str(caught.value)


def test_forced_and_banned_words_are_compared_ignoring_case(
    captioner: Captioner, photos: list[Path]
):
    with pytest.raises(ConfigError, match="forced_words and banned_words both contain dog"):
        captioner.captions(photos[0], banned_words="dog", forced_words="Dog")


def test_switching_strategy_drops_the_models_options_for_the_other(stored_model: StoredModel):
    stored_model.search = SearchOptions(
        beam_size=1, temperature=0.8, top_k=5, num_captions=4, max_length=7, banned_words=("hat",)
    )
    sampling = Captioner(stored_model, device="cpu", precision="fp32")

    assert sampling.options().top_k == 5
    assert sampling.options(seed=3).num_captions == 4
    searched = sampling.options(beam_size=3)
    assert (searched.temperature, searched.top_k, searched.num_captions) == (0, 0, 1)
    assert (searched.max_length, searched.banned_words) == (7, ("hat",))
    assert sampling.options(temperature=0).beam_size == SearchOptions.beam_size
    stored_model.search = SearchOptions(beam_size=4, beam_groups=2, max_length=7)
    sampled = Captioner(stored_model, device="cpu", precision="fp32").options(temperature=1.0)
    assert (sampled.beam_size, sampled.beam_groups, sampled.max_length) == (1, 1, 7)


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


def test_duplicate_samples_are_returned(captioner: Captioner, photos: list[Path]):
    found = captioner.captions(photos[0], temperature=1e-3, num_captions=5)
    assert len(found) == 5
    assert len({caption.words for caption in found}) == 1
    assert_same(found[0], captioner.caption(photos[0], beam_size=1))


def test_a_temperature_replaces_the_models_beam_search(photos: list[Path]):
    own = SearchOptions(
        beam_size=6, beam_groups=3, num_captions=2, max_length=6, block_ngrams=2, min_length=1
    )
    captioner = ensemble_of(stored(search=own))
    assert captioner.options() == own
    assert captioner.options(temperature=0.5) == SearchOptions(
        beam_size=1, temperature=0.5, max_length=6, block_ngrams=2, min_length=1
    )
    assert captioner.options(temperature=0.5, num_captions=9).num_captions == 9
    assert captioner.options(temperature=0) == captioner.options(temperature=0.0) == own
    assert len(captioner.captions(photos[0], temperature=0.5)) == 1


def test_a_temperature_with_an_explicit_beam_raises(captioner: Captioner):
    with pytest.raises(ConfigError, match=r"temperature 0\.5 .* beam_size 2"):
        captioner.options(temperature=0.5, beam_size=2)
    assert captioner.options(temperature=0.5, beam_size=1).beam_size == 1


def test_forced_and_banned_words_are_saved_with_the_model(photos: list[Path], tmp_path: Path):
    own = SearchOptions(
        beam_size=2, max_length=6, forced_words=("cat",), banned_words=("dog",), guard_endings=True
    )
    ensemble_of(stored(search=own)).save(tmp_path / "model")
    loaded = load(tmp_path / "model", device="cpu", precision="fp32")
    assert loaded.stored.search == loaded.options() == own
    assert isinstance(loaded.stored.search.forced_words, tuple)
    for photo in photos[:3]:
        words = loaded.caption(photo).words
        assert "cat" in words
        assert "dog" not in words
    assert "dog" not in loaded.options(banned_words=()).banned_words


# --- Ensembles ---


def test_ensemble_of_identical_models_equals_the_model(captioner: Captioner, photos: list[Path]):
    twice = ensemble_of(captioner.stored, captioner.stored)
    for photo in photos[:5]:
        for strategy in ({"num_captions": 3}, STRATEGIES["sampling"], STRATEGIES["forced"]):
            found, expected = (
                twice.captions(photo, **strategy),
                captioner.captions(photo, **strategy),
            )
            for one, two in zip(found, expected, strict=True):
                assert_same(one, two)


@torch.inference_mode()
def test_ensemble_probabilities_are_the_mean(photos: list[Path]):
    models = stored(), stored(seed=81), stored(size=96, seed=82)
    alone = [ensemble_of(model) for model in models]
    ensemble = ensemble_of(*models)
    for photo in photos[:4]:
        caption = ensemble.caption(photo)
        own = [one.explain(photo, caption.text) for one in alone]
        mean = np.mean([np.exp(c.log_probs) for c in own], axis=0)
        np.testing.assert_allclose(np.exp(caption.log_probs), mean, atol=1e-5)
        assert caption.log_prob >= min(c.log_prob for c in own)


def test_attention_is_averaged_on_a_common_grid(photos: list[Path]):
    models = stored(), stored(seed=81)
    ensemble = ensemble_of(*models)
    for photo in photos[:4]:
        caption = ensemble.caption(photo)
        own = [ensemble_of(model).explain(photo, caption.text) for model in models]
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


@pytest.mark.slow
@pytest.mark.parametrize("second", [{}, {"size": 96}, {"resize": "squash"}, {"order": "BGR"}])
def test_explaining_an_ensembles_caption_gives_the_same_evidence(
    photos: list[Path], second: dict[str, Any]
):
    ensemble, ended = ensemble_of(stored(), stored(seed=81, **second)), 0
    for photo in photos[:4]:
        for own in ensemble.captions(photo, beam_size=20, num_captions=20):
            if not own.words:
                continue
            given = ensemble.explain(photo, own.text)
            assert given.words == own.words
            assert given.crop_box == own.crop_box
            np.testing.assert_allclose(given.log_probs, own.log_probs, atol=1e-4)
            np.testing.assert_allclose(given.alphas, own.alphas, atol=1e-5)
            np.testing.assert_allclose(given.gates, own.gates, atol=1e-5)
            if len(own.words) < 6:  # a truncated caption has no end token
                ended += 1
                assert given.log_prob == pytest.approx(own.log_prob, abs=1e-3)
    assert ended > 0


def test_ensemble_options_are_the_first_models(photos: list[Path]):
    short = SearchOptions(beam_size=1, max_length=2)
    one, other = stored(search=short), stored(seed=81)
    assert ensemble_of(one, other).options() == short
    assert ensemble_of(other, one).options() == other.search
    assert len(ensemble_of(one, other).caption(photos[0]).words) <= 2


@pytest.mark.parametrize(
    "words", [WORDS[:-1], (*WORDS, "blue"), (*WORDS[:-1], "blue"), WORDS[::-1]], ids=len
)
def test_models_with_different_vocabularies_raise(words: tuple[str, ...]):
    first, same, other = stored(), stored(seed=81), stored(words=words)
    with pytest.raises(ConfigError, match="vocabularies of model 1 and model 3 differ") as caught:
        ensemble_of(first, same, other)
    message = str(caught.value)
    assert f"({len(WORDS) + 4} and {len(words) + 4} words)" in message
    assert "\n" not in message


def test_models_with_different_styles_raise():
    first, other = stored(), stored()
    other.vocabulary = first.vocabulary.extended((), ("coco", "flickr8k"))
    with pytest.raises(ConfigError, match=r"the styles of model 1 and model 2 differ \(none and"):
        ensemble_of(first, other)


def test_exported_models_and_others_cannot_be_mixed():
    model = stored()
    network = model.model
    graphs = Graphs(Path("x"), "x", network.preprocessing, network.grid, network.geometry, "fp32")
    exported = replace(model, network=graphs)
    with pytest.raises(ConfigError, match="model 1 is not and model 2 is exported; give models of"):
        ensemble_of(model, exported)
    with pytest.raises(ConfigError, match="model 1 is exported and model 2 is not; give models of"):
        ensemble_of(exported, model)


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
