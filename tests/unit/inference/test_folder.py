"""Model folders: atomic, without pickle, and with clear errors."""

from __future__ import annotations

import errno
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tiny_data import contents
from toy_captioner import random_model

from captioner.errors import ModelError
from captioner.inference.find_model import find_model
from captioner.inference.folder import load_model, save_model
from captioner.inference.names import FREQUENCIES, SHIPPED_MODEL, WEIGHTS
from captioner.inference.stored_model import StoredModel
from captioner.model.caption_model import CaptionModel
from captioner.model.encoder import Encoder
from captioner.model.preprocessing import Preprocessing
from captioner.options import DecoderConfig
from captioner.text.vocabulary import Vocabulary

WORDS = ("a", "dog", "Straße", "n't", "<end>", "犬")


def build(seed: int = 0) -> StoredModel:
    decoder = DecoderConfig(embed_dim=8, hidden_dim=8, attention_dim=8, dropout=0.25)
    seen = Preprocessing(48, "squash", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "BGR")
    search = {"beam_size": 3, "max_length": 5}
    stored = random_model(seed, decoder, WORDS, factor=1, preprocessing=seen, **search)
    stored.info = {"trained": "nowhere", "n": 1}
    return stored


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model", build())
    return tmp_path / "model"


@torch.no_grad()
def test_a_transformer_is_stored_at_its_image_size(tmp_path: Path) -> None:
    decoder = DecoderConfig(embed_dim=8, hidden_dim=8, attention_dim=8)
    images = torch.randn(1, 3, 96, 96)
    encoder = Encoder("timm/test_vit", image_size=96)
    model = CaptionModel(encoder, decoder, Preprocessing(96), len(WORDS) + 4).eval()
    save_model(tmp_path / "vit", StoredModel(model, decoder, Vocabulary(WORDS)))

    loaded = load_model(tmp_path / "vit").model

    assert loaded.grid == (6, 6)
    expected = model.encoder.to(torch.float16).float()(images)[0]  # stored in float16
    torch.testing.assert_close(loaded.encoder(images)[0], expected, atol=2e-3, rtol=2e-3)


def assert_refused(folder: Path, expected: str) -> None:
    with pytest.raises(ModelError, match=expected) as caught:
        load_model(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message


# --- Run folders ---


def test_a_run_folder_loads_its_best_model(folder: Path, tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("run_folder: run")
    folder.rename(run / "best")

    assert find_model(run) == run / "best"
    assert load_model(run).info == load_model(run / "best").info


# --- Round trip ---


def test_round_trip(folder: Path):
    stored, loaded = build(), load_model(folder)
    assert loaded.decoder == stored.decoder
    assert loaded.vocabulary == stored.vocabulary
    assert loaded.search == stored.search
    assert loaded.info == stored.info
    assert loaded.model.preprocessing == stored.model.preprocessing
    assert loaded.model.encoder.name == "timm/test_resnet"
    assert not loaded.model.training
    found = loaded.model.state_dict()
    for name, tensor in stored.model.state_dict().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-7)
        assert found[name].dtype == tensor.dtype


def test_saving_a_loaded_model_gives_equal_files(tmp_path: Path):
    stored = build()
    stored.frequencies = b"a file"
    save_model(tmp_path / "model", stored)
    save_model(tmp_path / "again", load_model(tmp_path / "model"))
    assert contents(tmp_path / "again") == contents(tmp_path / "model")
    assert contents(tmp_path / "again")[FREQUENCIES] == b"a file"


def test_nothing_is_pickled(folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert set(contents(folder)) == {"config.json", "model.safetensors"}
    json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert load_file(folder / "model.safetensors")  # NumPy's reader

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr(pickle, "Unpickler", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    load_model(folder)


def test_the_stored_geometry_is_used(folder: Path):
    change(folder, lambda config: config["encoder"]["geometry"]["x"].update(first=5.0))
    assert load_model(folder).model.geometry.x.first == 5


def test_weights_that_overflow_float16_are_kept(tmp_path: Path):
    stored = build()
    with torch.no_grad():
        stored.model.encoder.get_buffer("backbone.bn1.running_var").fill_(1e6)
    save_model(tmp_path / "model", stored)
    found = load_model(tmp_path / "model").model.encoder.get_buffer("backbone.bn1.running_var")
    torch.testing.assert_close(found, torch.full_like(found, 1e6))


# --- Invalid folders ---


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file(folder: Path, name: str):
    (folder / name).unlink()
    assert_refused(folder, rf"has no {name}; copy the whole folder again")


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.9999])
def test_truncated_weights(folder: Path, kept: float):
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[: int(kept * len(raw))])
    assert_refused(folder, r"is damaged or not a safetensors file .*; copy the whole folder again")


NOT_JSON = r"cannot read .*config\.json .*; copy the whole folder again"
FOREIGN = r"config\.json is not a captioner model config \('format_version' is missing\)"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", NOT_JSON),
        (b"\xff\xfe\x00", NOT_JSON),
        (b"[" * 100_000, NOT_JSON),
        (b"[]", FOREIGN),
        (b'{"model_type": "vit-gpt2"}', FOREIGN),
        (b'{"format_version": "1"}', FOREIGN),
        (b'{"format_version": 3, "surprise": 1}', "newer captioner"),
    ],
    ids=range(7),
)
def test_a_foreign_config(folder: Path, content: bytes, expected: str):
    (folder / "config.json").write_bytes(content)
    assert_refused(folder, expected)


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    edit(config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda c: c.pop("vocabulary"), id="no vocabulary"),
        pytest.param(lambda c: c.update(encoder="resnet"), id="encoder is text"),
        pytest.param(lambda c: c.update(decoder={"size": 3}), id="unknown setting"),
        pytest.param(lambda c: c["decoder"].update(dropout=2), id="setting out of range"),
        pytest.param(lambda c: c["vocabulary"].append("a"), id="a word twice"),
        pytest.param(lambda c: c["vocabulary"].append("\ud800"), id="half a surrogate pair"),
        pytest.param(lambda c: c["preprocessing"].update(image_size=50_000), id="huge image"),
        pytest.param(lambda c: c["search"].update(beam_size=100_000), id="huge beam"),
        pytest.param(lambda c: c["search"].update(max_length=100_000), id="endless search"),
        pytest.param(lambda c: c["decoder"].update(hidden_dim=10**9), id="huge decoder"),
    ],
)
def test_an_invalid_config_is_an_error(folder: Path, edit: Callable[[dict[str, Any]], object]):
    change(folder, edit)
    assert_refused(folder, r"config\.json is not a valid captioner model config \(.+")


EMBEDDING = "decoder.embedding.weight"
MISMATCH = r"does not match its config\.json .*; copy both files from the same model"


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        pytest.param(lambda t: t.update(more=t[EMBEDDING]), MISMATCH, id="one more"),
        pytest.param(lambda t: t.pop(EMBEDDING), MISMATCH, id="one less"),
        pytest.param(lambda t: t.update({EMBEDDING: t[EMBEDDING][1:].copy()}), MISMATCH, id="size"),
        pytest.param(
            lambda t: t[EMBEDDING].put(0, np.nan), "contains NaN or infinite weights", id="nan"
        ),
        pytest.param(
            lambda t: t[EMBEDDING].put(0, np.inf), "contains NaN or infinite weights", id="infinite"
        ),
    ],
)
def test_tensors_that_do_not_fit(folder: Path, edit: Callable[[Any], object], expected: str):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    assert_refused(folder, expected)


def test_an_unknown_decoder_is_named(folder: Path):
    change(folder, lambda config: config["decoder"].update(order="gru"))
    assert_refused(folder, "needs the decoder 'gru'")


def test_a_decoder_larger_than_its_weights_takes_no_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("captioner.inference.weights.CaptionModel", None)
    change(folder, lambda config: config["decoder"].update(hidden_dim=16_000))
    assert_refused(folder, r"does not match its config\.json")


# --- Writing ---


def test_loading_leaves_layers_of_other_threads_alone(folder: Path, monkeypatch):
    """Random weights are skipped for the loaded model only, and only while it is built."""

    def weights(generator: torch.Generator) -> list[torch.Tensor]:
        tensors = torch.full((3, 4), torch.nan), torch.full((4, 4), torch.nan)
        torch.nn.init.kaiming_uniform_(tensors[0], generator=generator)
        torch.nn.init.trunc_normal_(tensors[1], generator=generator)
        linear = torch.nn.Linear(2, 2)
        assert bool(linear.weight.abs().max() > 0)
        return [*tensors]

    expected = weights(torch.Generator().manual_seed(0))
    found: list[torch.Tensor] = []

    def build_meanwhile(*given: Any, **options: Any) -> Encoder:
        with torch.no_grad():
            other = Thread(target=lambda: found.extend(weights(torch.Generator().manual_seed(0))))
            other.start()
            other.join()
        return Encoder(*given, **options)

    monkeypatch.setattr("captioner.inference.weights.Encoder", build_meanwhile)
    load_model(folder)

    assert all(map(torch.equal, found, expected)), "another thread"
    assert len(found) == len(expected)
    assert all(map(torch.equal, weights(torch.Generator().manual_seed(0)), expected)), "afterwards"


def test_loading_draws_no_random_numbers(folder: Path):
    state = torch.get_rng_state()
    load_model(folder)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_full_disk_keeps_the_old_folder(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = contents(folder)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(ModelError, match=rf"^cannot save {folder} \(No space left [^\n]*$"):
            save_model(folder, build(seed=1))
    assert contents(folder) == before


def test_every_tensor_comes_from_the_file():
    """Models are built without initial weights, so a missing tensor would be uninitialized."""
    model = load_model(SHIPPED_MODEL).model

    stored = load_file(SHIPPED_MODEL / WEIGHTS)
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    assert found.keys() == stored.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor.detach(), stored[name].astype(np.float32))


def test_tensors_missing_from_the_file_are_computed(monkeypatch):
    """For example, a non-persistent table of a registered scorer."""
    build = CaptionModel.__init__

    def with_a_table(self: CaptionModel, *arguments: Any, **more: Any) -> None:
        build(self, *arguments, **more)
        self.table = torch.arange(3)

    monkeypatch.setattr(CaptionModel, "__init__", with_a_table)

    assert load_model(SHIPPED_MODEL).model.table.tolist() == [0, 1, 2]
