"""Models of the Hugging Face hub: pushed, loaded, loaded offline, and everything that goes wrong.

A transport in memory implements the hub's API; see hub_server.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pages
import pytest
from hub_server import HTTP, URL, Hub, Refused, Repo
from huggingface_hub import ModelCard, constants, set_client_factory
from tiny_data import contents

import captioner
from captioner.cli import train
from captioner.cli.main import NOT_DONE, OK
from captioner.errors import ConfigError, ModelError
from captioner.inference import hub as hub_module
from captioner.inference.names import SHIPPED_MODEL, WEIGHTS

PHOTO = pages.ROOT / "assets" / "examples" / "chelsea.jpg"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub, and an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_any")
    empty = Hub()
    set_client_factory(empty.client)
    yield empty
    set_client_factory(lambda: HTTP.Client(follow_redirects=True, timeout=None))


@pytest.fixture
def model(tiny, tmp_path) -> Path:
    """A copy of the tiny model, which tests may change."""
    return shutil.copytree(tiny.model, tmp_path / "model")


def said(name: str | Path, **options) -> str:
    return captioner.load(name, **options).caption(PHOTO).text


# --- push and load -------------------------------------------------------------------------------


def test_a_pushed_model_is_loaded_and_captions_the_same(hub, model, tiny, run):
    code, out, _ = run("push", model, "hf:me/pets", "--license", "apache-2.0")

    repo = hub.repos["me/pets"]
    first = repo.branches["main"]
    assert (code, out) == (OK, f"{URL}/me/pets/commit/{first}\n")
    assert not repo.private
    assert set(repo.files()) == {"config.json", "model.safetensors", "README.md"}
    assert said("hf:me/pets") == said(model)
    assert hub.downloads().count("model.safetensors") == 1
    said("hf:me/pets")  # from the cache
    assert hub.downloads().count("model.safetensors") == 1

    for folder in (model, tiny.twin):  # to a branch that is new, and to one that exists
        run("push", folder, "hf:me/pets@wild/idea")
    run("push", tiny.twin, "hf:me/pets", "--message", "the second")
    assert repo.messages == [*["Upload a captioner model"] * 3, "the second"]
    assert said("hf:me/pets") == said("hf:me/pets@wild/idea") == said(tiny.twin) != said(model)
    assert said(f"hf:me/pets@{first}") == said("hf:me/pets", revision=first) == said(model)


def test_the_python_functions_of_other_libraries(hub, model, tmp_path):
    own = captioner.Captioner.from_pretrained(model)
    url = own.push_to_hub("me/pets", private=True, commit_message="from Python", branch="dev")

    assert hub.repos["me/pets"].private
    assert hub.repos["me/pets"].messages == ["from Python"]
    assert url.startswith(f"{URL}/me/pets/commit/")
    other = captioner.Captioner.from_pretrained("me/pets", revision="dev", cache_dir=tmp_path / "c")
    assert other.caption(PHOTO).text == own.caption(PHOTO).text
    assert (tmp_path / "c" / "models--me--pets").is_dir()
    assert other.save_pretrained(tmp_path / "saved") is None
    assert "pipeline_tag: image-to-text" in (tmp_path / "saved" / "README.md").read_text()
    assert own.save_pretrained(tmp_path / "kept", repo_id="hf:me/kept", push_to_hub=True)
    assert "me/kept" in hub.repos


def test_an_exported_folder_is_loaded_but_not_pushed(hub, run, tmp_path):
    exported = tmp_path / "exported"
    shutil.copytree(SHIPPED_MODEL, exported, ignore=shutil.ignore_patterns(WEIGHTS))
    hub.add("me/small", contents(exported))

    assert said("hf:me/small") == said(SHIPPED_MODEL)

    assert {"encoder.onnx", "decoder.onnx"} < set(hub.downloads())
    code, _, err = run("push", exported, "hf:me/other")
    assert code != OK
    assert (
        "contains an exported model without weights" in err.splitlines()[-1]
    )  # after the bar of the download


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
    hub.repos["me/empty"] = Repo()

    for name in ("google/bert", "someone/yolo"):
        with pytest.raises(
            ModelError, match=rf"^hf:{name} is not a captioner model, because it has no "
        ):
            captioner.load(f"hf:{name}")
    with pytest.raises(ModelError, match=r"^hf:me/empty"):
        captioner.load("hf:me/empty")
    assert "model.safetensors" not in hub.downloads()


# --- errors of one line --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "name", "message"),
    [
        ("caption", "hf:me/none", "hf:me/none does not exist or is private; check the name, or"),
        ("caption", "hf:me/pets@v9", "hf:me/pets@v9 cannot be used (Invalid rev id: v9); check"),
        ("caption", "hf:pets", "'hf:pets' is not the name of a model on the hub; use hf:user/name"),
        ("push --private", "hf:me/pets", "hf:me/pets exists and is public"),
        ("push", "hf:me/bert", "hf:me/bert is not a captioner model"),
    ],
)
def test_what_is_refused(command, name, message, *, hub, model, run):
    hub.add("me/pets", contents(model))
    hub.add("me/bert", {"config.json": b"{}"})

    given = [PHOTO, "--model"] if command == "caption" else [model]
    code, _, err = run(*command.split(), *given, name)

    assert code == NOT_DONE
    [line] = err.splitlines()
    assert line.startswith(f"captioner: {message}")
    assert [len(repo.messages) for repo in hub.repos.values()] == [1, 1]  # nothing is pushed


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (401, "Invalid credentials in Authorization header"),
        (403, "You don't have the rights to write to me/new"),
        (503, "down for maintenance"),
    ],
)
def test_a_hub_that_refuses(status, problem, hub, model, run):
    """A cached model needs no answer."""
    hub.add("me/pets", contents(model))
    before = said("hf:me/pets")
    hub.refusal = Refused(status, problem)

    for command in (("caption", PHOTO, "--model", "hf:me/new"), ("push", model, "hf:me/new")):
        code, _, err = run(*command)
        [line] = err.splitlines()
        assert code == NOT_DONE
        assert line.startswith(f"captioner: hf:me/new cannot be used ({problem}); check")
    if status == 503:
        assert said("hf:me/pets") == before
        with pytest.raises(ModelError, match=r"^hf:me/other cannot .*local_files_only"):
            captioner.Captioner.from_pretrained("me/other", local_files_only=True)


def test_revisions_are_for_one_model_of_the_hub(model):
    for folder in (model, None):
        with pytest.raises(ConfigError, match="has no revisions"):
            captioner.load(*filter(None, [folder]), revision="main")
    with pytest.raises(ConfigError, match="contradict each other"):
        captioner.load("hf:a/b@one", revision="two")
    assert hub_module.parse("hf:a/b@refs/pr/1") == ("a/b", "refs/pr/1")


# --- the card ------------------------------------------------------------------------------------


def test_a_dry_run_lists_everything_and_connects_to_nothing(hub, model, run):
    code, out, _ = run("push", model, "hf:me/pets", "--private", "--dry-run")

    assert code == OK
    assert "private repository hf:me/pets" in out
    for name in ("config.json", "model.safetensors"):
        assert f"{(model / name).stat().st_size:>11,} bytes  {name}\n" in out
    assert "captioner caption photo.jpg --model hf:me/pets" in out
    assert hub.requests == []


def test_the_hub_understands_the_header(hub, model, tiny, run, tmp_path):
    report = tmp_path / "report.json"
    scores = ("--annotations", tiny.captions, "--images", tiny.photos)
    assert run("evaluate", "--model", model, *scores, "-o", report)[0] == OK
    given = ("--license", "mit", "--dataset", "me/photos", "--report", report)
    assert run("push", model, "hf:me/pets", *given, "--picture", PHOTO)[0] == OK

    files = hub.repos["me/pets"].files()
    card = ModelCard(files["README.md"].decode())
    assert (card.data.license, card.data.datasets) == ("mit", ["me/photos"])
    assert card.data.metrics == ["bleu", "rouge", "cider"]
    found = json.loads(report.read_text())["metrics"]
    values = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert values["CIDEr"] == round(100 * found["CIDEr"], 1)
    assert f"(attention.png)\n\n*{said(model)}*\n" in card.text
    assert files["attention.png"].startswith(b"\x89PNG")


def test_an_edited_card_is_kept(hub, model, run):
    (model / "README.md").write_text("# My pets\n\nThey are lovely.\n")
    assert run("push", model, "hf:me/pets", "--license", "mit")[0] == OK
    card = ModelCard(hub.repos["me/pets"].files()["README.md"].decode())
    assert (card.data.license, card.text.lstrip()) == ("mit", "# My pets\n\nThey are lovely.\n")

    for option in (("--picture", PHOTO), ("--report", "report.json")):
        code, _, err = run("push", model, "hf:me/pets", *option)
        assert (code, "README.md was edited" in err) == (NOT_DONE, True)


# --- the page ------------------------------------------------------------------------------------


def test_the_page_about_sharing_runs(hub, tiny, tmp_path, monkeypatch, run):
    """Its commands from the second block on, which push to an empty hub; then the first block."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny.model, "runs/mine/best")
    Path("runs/mine/config.yaml").write_text("run_folder: runs/mine\n")
    shutil.copy(PHOTO, "photo.jpg")
    Path("photos").symlink_to(tiny.photos)
    Path("test.json").symlink_to(tiny.captions)
    rows = [f"{number}.png,A dog runs" for number in (1, 2, 3, 4)]
    Path("captions.csv").write_text("\n".join(["image,caption", *rows]))
    page = pages.read("docs/sharing.md")
    shell, python = (pages.examples(page, language) for language in ("bash", "python"))

    def run_all(block: str) -> None:
        for program, command, *arguments in pages.commands(block):
            if command == "train":
                options, given = train.train.parser().parse(arguments)
                train.read_config(options, train.read_changes(options, given))
            elif program == "captioner":
                assert run(command, *arguments)[0] == OK, arguments

    names: dict[str, object] = {"captioner": captioner}
    run_all(shell[1])
    assert hub.repos["user/name"].private
    run_all(shell[2])
    exec(compile(python[1], "docs/sharing.md", "exec"), names)
    assert len(hub.repos["user/name"].messages) == 3
    hub.repos["user/name"].branches["v1.0"] = hub.repos["user/name"].branches["main"]
    run_all(shell[0])
    exec(compile(python[0], "docs/sharing.md", "exec"), names)
