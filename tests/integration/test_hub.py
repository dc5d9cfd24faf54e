"""Models of the Hugging Face hub: pushed, loaded, loaded offline, and everything that goes wrong.

A transport in memory implements the hub's API; see hub_server.py.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import hub_server
import pytest
import yaml
from huggingface_hub import ModelCard, constants

import captioner
from captioner.cli import train
from captioner.cli.main import FAILED, OK, USAGE, main
from captioner.errors import ConfigError, ModelError
from captioner.inference import hub as hub_module
from captioner.inference.folder import SHIPPED_MODEL, WEIGHTS

ROOT = Path(__file__).parents[2]
PHOTO = ROOT / "assets" / "examples" / "chelsea.jpg"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub, an empty cache, and the token of the account ``me``."""
    with hub_server.running() as server:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
        monkeypatch.setenv("HF_TOKEN", "hf_good")
        yield server


@pytest.fixture
def model(tiny, tmp_path) -> Path:
    """A copy of the tiny model, which tests may change."""
    return shutil.copytree(tiny.model, tmp_path / "model")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def said(name: str | Path, **options) -> str:
    return captioner.load(name, **options).caption(PHOTO).text


# --- push and load -------------------------------------------------------------------------------


def test_a_pushed_model_is_loaded_and_captions_the_same(hub, model, capsys):
    assert main(["push", str(model), "hf:me/pets", "--license", "apache-2.0"]) == OK

    repo = hub.repos["me/pets"]
    [commit] = repo.branches["main"]
    assert capsys.readouterr().out == f"{hub.url}/me/pets/commit/{commit}\n"
    assert repo.messages == ["Upload a captioner model"]
    assert not repo.private
    assert set(repo.trees[commit]) == {"config.json", "model.safetensors", "README.md"}
    assert said("hf:me/pets") == said(model)
    assert hub.downloads().count("model.safetensors") == 1
    said("hf:me/pets")  # from the cache
    assert hub.downloads().count("model.safetensors") == 1


def test_revisions(hub, model, tiny):
    main(["push", str(model), "hf:me/pets", "--message", "the first"])
    main(["push", str(tiny.twin), "hf:me/pets@wild/idea"])
    first = hub.repos["me/pets"].branches["main"][0]
    main(["push", str(tiny.twin), "hf:me/pets", "--message", "the second"])

    assert hub.repos["me/pets"].messages == ["the first", "Upload a captioner model", "the second"]
    assert said("hf:me/pets") == said(tiny.twin) != said(model)
    assert said(f"hf:me/pets@{first}") == said("hf:me/pets", revision=first) == said(model)
    assert said("hf:me/pets@wild/idea") == said(tiny.twin)


def test_the_python_functions_of_other_libraries(hub, model, tmp_path):
    own = captioner.Captioner.from_pretrained(model)
    url = own.push_to_hub("me/pets", private=True, commit_message="from Python", branch="dev")

    assert hub.repos["me/pets"].private
    assert hub.repos["me/pets"].messages == ["from Python"]
    assert url.startswith(f"{hub.url}/me/pets/commit/")
    other = captioner.Captioner.from_pretrained("me/pets", revision="dev", cache_dir=tmp_path / "c")
    assert other.caption(PHOTO).text == own.caption(PHOTO).text
    assert (tmp_path / "c" / "models--me--pets").is_dir()
    assert other.save_pretrained(tmp_path / "saved") is None
    assert "pipeline_tag: image-to-text" in (tmp_path / "saved" / "README.md").read_text()
    assert own.save_pretrained(tmp_path / "kept", repo_id="hf:me/kept", push_to_hub=True)
    assert "me/kept" in hub.repos


def test_an_exported_folder_is_loaded_but_not_pushed(hub, capsys, tmp_path):
    files = {name: data for name, data in contents(SHIPPED_MODEL).items() if name != WEIGHTS}
    hub.add("me/small", files)

    assert said("hf:me/small") == said(SHIPPED_MODEL)

    assert {"encoder.onnx", "decoder.onnx"} < set(hub.downloads())
    exported = tmp_path / "exported"
    shutil.copytree(SHIPPED_MODEL, exported, ignore=shutil.ignore_patterns(WEIGHTS))
    assert main(["push", str(exported), "hf:me/other"]) != OK
    *_, line = capsys.readouterr().err.splitlines()  # after the bar of the download
    assert "is exported" in line


# --- nothing else is read from other people's folders --------------------------------------------


def test_code_and_pickles_are_not_downloaded(hub, model):
    others = ("pytorch_model.bin", "modeling.py", "__init__.py", "captioner/config.json")
    hub.add("other/trap", contents(model) | dict.fromkeys(others, b"raise SystemExit"))

    said("hf:other/trap")

    assert set(hub.downloads()) == {"config.json", "model.safetensors"}


def test_another_kind_of_model_is_refused_before_its_weights(hub):
    bert = json.dumps({"architectures": ["BertModel"]}).encode()
    hub.add("google/bert", {"config.json": bert, "model.safetensors": b"0" * 9})
    hub.add("someone/yolo", {"yolo.pt": b"0"})
    hub.repos["me/empty"] = hub_server.Repo()

    for name in ("google/bert", "someone/yolo"):
        with pytest.raises(ModelError, match=rf"^hf:{name} is not a captioner model: .*no "):
            captioner.load(f"hf:{name}")
    with pytest.raises(ModelError, match=r"^hf:me/empty"):
        captioner.load("hf:me/empty")
    assert "model.safetensors" not in hub.downloads()


# --- errors of one line --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:me/none", "hf:me/none does not exist, or is private; check the name, or log in with"),
        ("hf:other/secret", "hf:other/secret does not exist, or is private; check the name"),
        ("hf:me/pets@v9", "hf:me/pets@v9: Invalid rev id: v9"),
        ("hf:pets", "'hf:pets' is not a model of the hub; give hf:user/name or hf:user/name@rev"),
    ],
)
def test_a_wrong_name_is_an_error_of_one_line(name, message, hub, model, capsys):
    hub.add("me/pets", contents(model))
    hub.add("other/secret", contents(model), private=True)

    assert main(["caption", str(PHOTO), "--model", name]) in (FAILED, USAGE)

    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"captioner: {message}")


@pytest.mark.parametrize(
    ("command", "token", "problem"),
    [
        ("caption", "hf_wrong", "Invalid credentials in Authorization header"),
        ("push", "hf_wrong", "Invalid credentials in Authorization header"),
        ("push", "hf_read", "You don't have the rights to write to me/pets"),
    ],
)
def test_a_token_without_the_right(  # noqa: PLR0917
    command, token, problem, hub, model, monkeypatch, capsys
):
    monkeypatch.setenv("HF_TOKEN", token)
    arguments = [str(PHOTO), "--model"] if command == "caption" else [str(model)]

    assert main([command, *arguments, "hf:me/pets"]) == FAILED

    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"captioner: hf:me/pets: {problem}")


def test_a_hub_that_is_down_is_no_reason_to_wait_for_a_cached_model(hub, model):
    hub.add("me/pets", contents(model))
    before = said("hf:me/pets")
    hub.down = True

    assert said("hf:me/pets") == before
    with pytest.raises(ModelError, match=r"^hf:me/new: .*down for maint"):
        captioner.load("hf:me/new")
    with pytest.raises(ModelError, match=r"^hf:me/other: .*local_files_only"):
        captioner.Captioner.from_pretrained("me/other", local_files_only=True)


def test_revisions_are_for_one_model_of_the_hub(model):
    with pytest.raises(ConfigError, match="has no revisions"):
        captioner.load(model, revision="main")
    with pytest.raises(ConfigError, match="has no revisions"):
        captioner.load(revision="main")
    with pytest.raises(ConfigError, match="contradict each other"):
        captioner.load("hf:a/b@one", revision="two")
    assert hub_module.parse("hf:a/b@refs/pr/1") == ("a/b", "refs/pr/1")


# --- what push refuses ---------------------------------------------------------------------------


def test_a_private_push_never_goes_to_a_public_repository(hub, model, capsys):
    main(["push", str(model), "hf:me/pets"])
    capsys.readouterr()

    assert main(["push", str(model), "hf:me/pets", "--private"]) == USAGE

    assert "hf:me/pets exists and is public" in capsys.readouterr().err
    assert len(hub.repos["me/pets"].messages) == 1


def test_another_kind_of_model_is_not_replaced(hub, model, capsys):
    hub.add("me/bert", {"config.json": b"{}"})

    assert main(["push", str(model), "hf:me/bert"]) == FAILED

    assert "hf:me/bert is not a captioner model" in capsys.readouterr().err
    assert hub.repos["me/bert"].messages == [""]


# --- the card ------------------------------------------------------------------------------------


def test_a_dry_run_lists_everything_and_connects_to_nothing(hub, model, capsys):
    assert main(["push", str(model), "hf:me/pets", "--private", "--dry-run"]) == OK

    out = capsys.readouterr().out
    assert "private repository hf:me/pets" in out
    for name in ("config.json", "model.safetensors"):
        assert f"{(model / name).stat().st_size:>11,} bytes  {name}\n" in out
    assert "captioner caption photo.jpg --model hf:me/pets" in out
    assert hub.requests == []


def test_the_hub_understands_the_header(hub, model, tiny, tmp_path):
    report = tmp_path / "report.json"
    scores = ["--annotations", str(tiny.captions), "--images", str(tiny.photos)]
    assert main(["evaluate", "--model", str(model), *scores, "-o", str(report)]) == OK
    given = ["--license", "mit", "--dataset", "me/photos", "--report", str(report)]
    assert main(["push", str(model), "hf:me/pets", *given, "--picture", str(PHOTO)]) == OK

    tree = hub.repos["me/pets"].trees[hub.repos["me/pets"].resolve("main")]
    card = ModelCard(tree["README.md"].decode())
    assert (card.data.license, card.data.datasets) == ("mit", ["me/photos"])
    assert card.data.metrics == ["bleu", "rouge", "cider"]
    found = json.loads(report.read_text())["metrics"]
    values = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert values["CIDEr"] == round(100 * found["CIDEr"], 1)
    assert f"(attention.png)\n\n*{said(model)}*\n" in card.text
    assert tree["attention.png"].startswith(b"\x89PNG")


def test_an_edited_card_is_kept(hub, model, capsys):
    (model / "README.md").write_text("# My pets\n\nThey are lovely.\n")
    assert main(["push", str(model), "hf:me/pets", "--license", "mit"]) == OK
    tree = hub.repos["me/pets"].trees[hub.repos["me/pets"].resolve("main")]
    header, card = tree["README.md"].decode().removeprefix("---\n").split("---\n\n", 1)
    assert yaml.safe_load(header)["license"] == "mit"
    assert card == "# My pets\n\nThey are lovely.\n"
    capsys.readouterr()

    for option in (["--picture", str(PHOTO)], ["--report", "report.json"]):
        assert main(["push", str(model), "hf:me/pets", *option]) == USAGE
        assert "README.md was edited" in capsys.readouterr().err


# --- the page ------------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "sharing.md").read_text(encoding="utf-8")


def test_the_page_about_sharing_runs(hub, tiny, tmp_path, monkeypatch, capsys):
    """Its commands from the second block on, which push to an empty hub; then the first block."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_user")
    shutil.copytree(tiny.model, "runs/mine/best")
    Path("runs/mine/config.yaml").write_text("run_folder: runs/mine\n")
    shutil.copy(PHOTO, "photo.jpg")
    Path("photos").symlink_to(tiny.photos)
    Path("test.json").symlink_to(tiny.captions)
    rows = [f"{number}.png,A dog runs" for number in (1, 2, 3, 4)]
    Path("captions.csv").write_text("\n".join(["image,caption", *rows]))
    shell = [block.replace("\\\n", " ") for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S)]
    python = re.findall(r"```python\n(.*?)```", PAGE, re.S)

    def run_all(block: str) -> None:
        for line in block.splitlines():
            program, command, *arguments = shlex.split(line, comments=True)
            if command == "train":
                train.read(arguments)
            elif program == "captioner":
                assert main([command, *arguments]) == OK, line

    names: dict[str, object] = {"captioner": captioner}
    run_all(shell[1])
    assert hub.repos["user/name"].private
    run_all(shell[2])
    exec(compile(python[1], "docs/sharing.md", "exec"), names)
    assert len(hub.repos["user/name"].messages) == 3
    hub.repos["user/name"].branches["v1.0"] = hub.repos["user/name"].branches["main"]
    run_all(shell[0])
    exec(compile(python[0], "docs/sharing.md", "exec"), names)
