"""Captions in any script, from training to scores, through the command line."""

from __future__ import annotations

import json
import sys
import unicodedata
from pathlib import Path

import pytest
from PIL import Image
from tiny_data import run_settings, write_captions

import captioner
from captioner.cli.main import main
from captioner.errors import ConfigError, ModelError
from captioner.evaluation.metrics import CaptionEvaluator
from captioner.evaluation.reward import CaptionReward
from captioner.inference.folder import load_model, save_model
from captioner.text.tokenizer import caption_tokens

pytestmark = pytest.mark.slow  # a model is trained

CAPTIONS = {
    "red": "一只狗在草地上奔跑，旁边有2个人。",
    "lime": "两个人在海滩上散步。",
    "blue": "สุนัขสีน้ำตาลวิ่งบนหญ้า",
    "yellow": "เด็กสองคนเล่นน้ำที่ชายหาด",
    "cyan": "\u304b\u3099けの上で犬が海を見ている。",  # a decomposed letter, as written by macOS
    "magenta": "ஒரு நாய் பச்சை புல்வெளியில் ஓடுகிறது.",
    "white": "একটি কুকুর সবুজ ঘাসের উপর দৌড়াচ্ছে।",
    "black": "Ein Hund läuft über die grüne Wiese.",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos/, captions.json and config.yaml."""
    folder = tmp_path_factory.mktemp("languages")
    (folder / "photos").mkdir()
    for colour in CAPTIONS:
        Image.new("RGB", (64, 64), colour).save(folder / "photos" / f"{colour}.png")
    captions = {f"{one}.png": [text] for one, text in CAPTIONS.items()}
    settings = run_settings(
        write_captions(folder / "captions.json", captions), folder / "photos",
        # Repeated to validate after 20 steps, not after each.
        data={"vocabulary_threshold": 2, "max_words": 60, "repeats": [20]},
        encoder={"image_size": 32},
        decoder={"embed_dim": 32, "hidden_dim": 64, "dropout": 0.0},
        training={
            "epochs": 6, "batch_size": 8, "lr": 0.02, "warmup_steps": 2, "precision": "fp32",
            "patience": 0, "sample_images": 1, "trackers": [],
        },
        search={"beam_size": 1, "max_length": 60},
    )  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML
    return folder


@pytest.fixture(scope="module")
def model(data: Path) -> Path:
    """The folder of a model that has memorized the captions."""
    options = ["--run-folder", str(data / "run"), "data.tokenizer=bpe"]
    assert main(["train", str(data / "config.yaml"), *options]) == 0
    return data / "run" / "best"


def photo(data: Path, colour: str) -> str:
    return str(data / "photos" / f"{colour}.png")


def test_captions_of_every_script_are_learned_verbatim(
    data: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = [photo(data, colour) for colour in CAPTIONS]
    assert main(["caption", *photos, "--model", str(model), "--format", "json"]) == 0
    found = [entry["captions"][0] for entry in json.loads(capsys.readouterr().out)]

    assert [one["text"] for one in found] == [
        unicodedata.normalize("NFC", text) for text in CAPTIONS.values()
    ]
    for one in found:  # the words are the pieces, without spaces
        assert len(one["words"]) == len(one["log_probs"])
        assert "".join(one["words"]).replace("␣", "") == one["text"].replace(" ", "")


def test_given_words_are_explained_and_drawn(
    data: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "两只狗在海滩上奔跑。"  # not a training caption, but made of their characters
    loaded = captioner.load(model, device="cpu", precision="fp32")
    explained = loaded.explain(photo(data, "red"), own, alternatives=2)
    assert explained.text == own
    assert explained.alphas.shape[0] == len(explained.words) == len(explained.pieces)
    assert explained.text_until(2) == "".join(explained.pieces[:2])

    for name, warned in (("attention.gif", True), ("attention.svg", False)):
        options = ["--model", str(model), "--words", own, "-o", str(tmp_path / name)]
        assert main(["attend", photo(data, "red"), *options]) == 0
        assert (tmp_path / name).stat().st_size > 0
        assert ("the font of pictures lacks some letters" in capsys.readouterr().err) is warned
    assert "只" in (tmp_path / "attention.svg").read_text(encoding="utf-8")
    captioner.overlay(photo(data, "red"), explained, only=["奔跑"])

    with pytest.raises(ConfigError, match="the model does not know 猫"):
        loaded.explain(photo(data, "red"), "一只猫")
    for words in ({"banned_words": "狗"}, {"forced_words": "狗"}, {"rare_words": 0.2}):
        with pytest.raises(ConfigError, match=r"needs? a model that writes whole words"):
            loaded.caption(photo(data, "red"), **words)


def test_captioning_needs_no_tokenizers_library(
    data: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    loaded = captioner.load(model, device="cpu", precision="fp32")
    assert loaded.caption(photo(data, "black")).text == CAPTIONS["black"]
    with pytest.raises(ConfigError, match="pip install tokenizers"):
        loaded.explain(photo(data, "black"), CAPTIONS["black"])


def test_the_tokenizer_is_saved_with_the_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, copy = load_model(model), tmp_path / "copy"
    save_model(copy, stored)
    assert load_model(copy).vocabulary == stored.vocabulary
    assert main(["info", "--model", str(copy), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokenizer"] == "bpe"

    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer.json .*copy the whole folder"):
        load_model(copy)


def test_rewards_of_pieces_equal_those_of_their_text(model: Path) -> None:
    vocabulary = load_model(model).vocabulary
    references = {i: [caption_tokens(text)] for i, text in enumerate(CAPTIONS.values())}
    reward = CaptionReward({"": references}, vocabulary, count_end=False)
    texts = [*CAPTIONS.values()]
    texts[1] = "两只狗在海滩上散步。"
    samples = [[vocabulary.encode(vocabulary.tokenize(text))] for text in texts]
    found = reward(list(references), samples, [[True]] * len(texts))
    expected = CaptionEvaluator({i: [text] for i, text in enumerate(CAPTIONS.values())}).score(
        dict(enumerate(texts))
    )
    assert found[:, 0].tolist() == pytest.approx(expected.counts["CIDEr"].tolist())
    assert found[1, 0] < found[0, 0]
