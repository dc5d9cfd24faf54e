"""Every mechanism as ONNX graphs: the same log-probabilities and captions as with torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch
from mechanisms import ONE_OF_EACH, config_of
from PIL import Image
from toy_captioner import add_reading, mean_colours, random_model, toy_calibrator

from captioner.errors import ConfigError, ModelError
from captioner.inference import export as exporter
from captioner.inference.captioner import Captioner, load
from captioner.inference.export import OPSET, digest, export
from captioner.inference.folder import load_model, save_model
from captioner.inference.names import CONFIG, GRAPHS, WEIGHTS
from captioner.model.caption_model import CaptionModel
from captioner.model.preprocessing import Preprocessing
from captioner.options import DecoderConfig

WORDS = tuple(f"w{number}" for number in range(9))
ENCODER_GRAPH, DECODER_GRAPH = GRAPHS


def write_model(folder: Path, config: DecoderConfig, styles: tuple[str, ...] = ()) -> Path:
    preprocessing = Preprocessing(image_size=64, resize="squash", channel_order="BGR")
    search = {"beam_size": 3, "num_captions": 2, "max_length": 6, "style": (*styles, "")[0]}
    stored = random_model(3, config, WORDS, styles, factor=3, preprocessing=preprocessing, **search)
    stored.calibrator = toy_calibrator(stored.search) if styles else None
    if styles:
        add_reading(stored, "w1", "w2", "w3")
    save_model(folder, stored)
    return folder


def photos(count: int = 4) -> list[Image.Image]:
    rng = np.random.default_rng(5)
    return [
        Image.fromarray(rng.integers(256, size=(40, 50, 3)).astype(np.uint8)) for _ in range(count)
    ]


def assert_equal_captions(one: Captioner, other: Captioner, **search: Any) -> None:
    for left, right in zip(one.captions(photos(), **search), other.captions(photos(), **search),
                           strict=True):  # fmt: skip
        assert [caption.words for caption in left] == [caption.words for caption in right]
        for a, b in zip(left, right, strict=True):
            np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-4)
            np.testing.assert_allclose(a.alphas, b.alphas, atol=1e-5)
            np.testing.assert_allclose(a.gates, b.gates, atol=1e-5)
            assert a.log_prob == pytest.approx(b.log_prob, abs=1e-4)
            assert a.geometry == b.geometry


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_mechanism_captions_as_with_torch(name, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(CaptionModel, "encode", mean_colours)
    model = write_model(tmp_path / "model", config_of(name))

    written = export(model, tmp_path / "exported")

    assert written.difference <= 1e-4
    assert_equal_captions(
        load(model, precision="fp32"), load(tmp_path / "exported"), alternatives=2
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A calibrated model folder of two styles and its exported folder."""
    folder = tmp_path_factory.mktemp("export")
    config = DecoderConfig(embed_dim=5, hidden_dim=6, attention_dim=7, dropout=0.0)
    model = write_model(folder / "model", config, ("plain", "loud"))
    text = json.loads((model / CONFIG).read_text())
    (model / CONFIG).write_text(json.dumps(text | {"confidence": {"slope": 2.0}}))
    export(model, folder / "exported")
    return model, folder / "exported"


# What a stepper must do: one beam, several, styles, samples, a blank photo, and words by rules.
WAYS = {
    "greedy": {"beam_size": 1, "num_captions": 1},
    "beams": {"beam_size": 5, "num_captions": 3, "length_penalty": 0.7},
    "style": {"style": "loud"},
    "samples": {"temperature": 1.5, "top_p": 0.8, "top_k": 5, "num_captions": 3, "seed": 4},
    "candidates": {"beam_size": 6, "candidates": 6, "num_captions": 2, "rare_words": 0.3},
    "rules": {"block_repeats": True, "banned_words": ("w1",), "min_length": 3, "block_ngrams": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_search_gives_the_captions_of_torch(pair, way) -> None:
    model, exported = pair

    assert_equal_captions(load(model, precision="fp32"), load(exported), **WAYS[way])


def test_a_given_caption_is_explained_as_with_torch(pair) -> None:
    one, other = (load(folder) for folder in pair)

    for photo in photos():
        left, right = (m.explain(photo, "w1 w2 w2", alternatives=3) for m in (one, other))
        np.testing.assert_allclose(left.log_probs, right.log_probs, atol=1e-4)
        np.testing.assert_allclose(left.alphas, right.alphas, atol=1e-5)
        assert [[a.word for a in at] for at in left.alternatives] == [
            [a.word for a in at] for at in right.alternatives
        ]


@pytest.mark.parametrize("style", ["plain", "loud"])
def test_a_caption_has_the_confidence_of_torch(pair, style) -> None:
    one, other = load(pair[0], precision="fp32"), load(pair[1])

    expected, found = (model.captions(photos(), style=style) for model in (one, other))

    confidences = [best.confidence for best, *_ in expected]
    assert len({round(value, 3) for value in confidences}) > 1
    assert [best.confidence for best, *_ in found] == pytest.approx(confidences, abs=1e-4)
    [words] = one.stream(photos(1), words=["w1 w2"], style=style)
    explained = other.explain(photos(1)[0], "w1 w2", style=style)
    assert words.captions[0].log_prob == pytest.approx(explained.log_prob, abs=1e-4)
    prepared = [one.prepare(photo) for photo in photos()]
    np.testing.assert_allclose(
        other.photo_vectors(prepared), one.photo_vectors(prepared), atol=1e-4
    )
    for left, right in zip(
        one.observe_batch(prepared, one.options(style=style)),
        other.observe_batch(prepared, other.options(style=style)),
        strict=True,
    ):
        assert left.text == right.text
        np.testing.assert_allclose(
            left.found.token_log_probs, right.found.token_log_probs, atol=1e-4
        )


def test_a_photo_is_read_as_with_torch(pair) -> None:
    one, other = load(pair[0], precision="fp32"), load(pair[1])
    prepared = [one.prepare(photo) for photo in photos()]

    expected, found = (m.ensemble.read(m.ensemble.encode(prepared)) for m in (one, other))

    assert expected.words.shape == (4, 3)
    assert expected.regions.shape == (4, 4, 3)
    assert expected.words.std(axis=0).min() > 1e-3  # it depends on the photo
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    left, right = (model.caption(photos()[0], keywords=3).keywords for model in (one, other))
    assert [word.word for word in left] == [word.word for word in right]


def test_exported_folders_form_an_ensemble(pair) -> None:
    model, exported = pair

    assert_equal_captions(load(model, model, precision="fp32"), load(exported, exported))
    assert load(exported, exported).caption(photos()[0]).confidence is None  # not calibrated


def test_the_folder_describes_itself(pair) -> None:
    exported = pair[1]
    config, own = (json.loads((folder / CONFIG).read_text()) for folder in pair)

    assert own.pop("exported") == {
        "opset": OPSET,
        "precision": "fp32",
        "tokens": {
            "start": 13,
            "end": 2,
            "never_generated": [0, 1, 3],
            "first_word": 4,
            "styles": {"plain": 13, "loud": 14},
        },
        "source": digest(pair[0] / WEIGHTS),
    }
    assert own == config  # entries that this version does not know, too
    for name in GRAPHS:
        graph = onnx.load(exported / name)
        onnx.checker.check_model(graph, full_check=True)
        assert [(o.domain, o.version) for o in graph.opset_import] == [("", OPSET)]


# --- what is refused -----------------------------------------------------------------------------


def test_folders_of_both_kinds_are_refused_together(pair) -> None:
    with pytest.raises(ConfigError, match=r"must all have weights or must all be exported"):
        load(*pair)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"precision": "bf16"},
            "precision is 'bf16', but .* was exported in .fp32.; set precision to .auto.",
        ),
        ({"device": "cuda:7"}, "device 'cuda:7' is not available for the exported model"),
    ],
)
def test_what_the_runtime_lacks_is_refused(pair, options, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(pair[1], **options)


@pytest.mark.parametrize(
    "use",
    [
        lambda model, folder: model.save(folder / "copy"),
        lambda model, folder: model.model,
        lambda model, folder: model.caption_features(np.zeros((1, 4, 96)), [], model.options()),
        lambda model, folder: model.caption(photos()[0], method="grad_cam"),
    ],
    ids=["save", "module", "features", "method"],
)
def test_what_needs_the_weights_is_refused(pair, use, tmp_path) -> None:
    with pytest.raises(
        ConfigError, match=r"use the model folder that it was exported from"
    ) as refused:
        use(load(pair[1]), tmp_path)

    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def copied(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the exported folder, to damage."""
    return shutil.copytree(pair[1], tmp_path / "model")


def test_a_damaged_graph_is_one_line(copied) -> None:
    (copied / DECODER_GRAPH).write_bytes(b"nothing")

    with pytest.raises(ModelError, match=r"cannot load .*decoder.onnx .*export the model again"):
        load(copied)


IMPOSSIBLE = "is not a valid captioner model config"
OTHERS = r"graphs of .* do not match its config\.json"
READING = "the words of the entry 'reading' do not match the vocabulary"


@pytest.mark.parametrize(
    ("section", "value", "expected"),
    [
        ("exported", "x", IMPOSSIBLE),
        ("exported", {"opset": 18, "precision": "fp32"}, IMPOSSIBLE),
        ("encoder", {"name": None}, IMPOSSIBLE),
        ("encoder", {"grid": "ab"}, IMPOSSIBLE),
        ("encoder", {"geometry": {}}, IMPOSSIBLE),
        ("preprocessing", {"image_size": 50_000}, IMPOSSIBLE),
        ("info", 7, IMPOSSIBLE),
        ("encoder", {"grid": [7, 7]}, OTHERS),
        ("vocabulary", [f"w{number}" for number in range(8)], READING),
        ("preprocessing", {"image_size": 32}, OTHERS),
        ("reading", {"stems": ["w1", "w2", "w3", "w4"]}, OTHERS),
    ],
)
def test_the_config_of_other_graphs_is_refused(copied, section, value, expected) -> None:
    config = json.loads((copied / CONFIG).read_text())
    merged = section in ("encoder", "preprocessing", "reading")
    config[section] = config[section] | value if merged else value
    if section == "encoder" and not config[section]["name"]:
        del config[section]["name"]
    (copied / CONFIG).write_text(json.dumps(config))

    with pytest.raises(ModelError, match=expected):
        # A site has no engine that would find what is impossible.
        (load_model if expected == IMPOSSIBLE else load)(copied)


def test_graphs_in_each_others_place_are_refused(copied) -> None:
    shutil.copyfile(copied / ENCODER_GRAPH, copied / DECODER_GRAPH)

    with pytest.raises(ModelError, match=OTHERS):
        load(copied)


def test_graphs_with_nan_are_one_line(copied) -> None:
    graph = onnx.load(copied / DECODER_GRAPH)
    for part in graph.graph.initializer:
        values = onnx.numpy_helper.to_array(part)
        if values.dtype == np.float32 and values.size > 4:
            broken = onnx.numpy_helper.from_array(values * np.float32("nan"), part.name)
            part.CopyFrom(broken)
    onnx.save(graph, copied / DECODER_GRAPH)

    with pytest.raises(ModelError, match="results are NaN"):
        load(copied).caption(Image.new("RGB", (8, 8)))


def test_graphs_that_compute_something_else_are_not_kept(pair, tmp_path, monkeypatch) -> None:
    def write_others(model: CaptionModel, attention: str, *files: Path) -> None:
        for file in files:
            shutil.copyfile(pair[1] / file.name, file)
        with torch.no_grad():
            model.decoder.word_output.bias[5] += 0.001

    monkeypatch.setattr(exporter, "write_graphs", write_others)

    with pytest.raises(ModelError, match=r"differ from the model by .* nothing was written"):
        export(pair[0], tmp_path / "exported")
    assert list(tmp_path.iterdir()) == []


def test_a_mechanism_that_cannot_be_exported_is_named(tmp_path, monkeypatch) -> None:
    def fails(*given: object, **options: object) -> None:
        raise RuntimeError("no such operator\nand much more")

    monkeypatch.setattr(torch.onnx, "export", fails)
    config = DecoderConfig(embed_dim=5, hidden_dim=6, dropout=0.0, attention="general")
    model = write_model(tmp_path / "model", config)

    problem = r"the decoder with attention general cannot be exported to ONNX \(no such operator\);"
    with pytest.raises(ConfigError, match=problem):
        export(model, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
