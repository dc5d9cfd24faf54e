"""captioner and captioner-runtime: two distributions that install one package."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from captioner.cli.main import COMMANDS, FULL
from captioner.extras import EXTRAS
from captioner.model_config import EXPORTED, PRETRAINED, PRETRAINED_INT8, SOURCE, read_config
from captioner.model_config import fingerprint as fingerprint_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PHOTO = ROOT / "assets" / "examples" / "astronaut.jpg"


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


WHOLE, RUNTIME = project(ROOT), project(ROOT / "runtime")
OF_FULL = WHOLE["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]


def is_of_full(path: Path) -> bool:
    """Whether the full package installs this file, and not the runtime."""
    name = path.relative_to(ROOT).as_posix()
    return any(name == one or name.startswith(f"{one}/") for one in OF_FULL)


SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "captioner").rglob("*.py"))
}
RUNTIME_SOURCES = {name: path for name, path in SOURCES.items() if not is_of_full(path)}


def at_import(node: ast.AST) -> Iterator[str]:
    """The modules that are imported when a module is, not when its functions are called."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                full = f"{child.module}.{alias.name}"
                yield full if full in SOURCES else str(child.module)
        yield from at_import(child)


def names(requirements: list[str]) -> set[str]:
    """The modules of requirements."""
    found = set()
    for one in requirements:
        name = one.replace("[", " ").replace(">", " ").replace("<", " ").split()[0]
        found.add(MODULE.get(name, name.replace("-", "_")))
    return found


MODULE = {"pillow": "PIL", "pyyaml": "yaml", "fonttools": "fontTools"}


def test_a_file_belongs_to_one_of_the_two() -> None:
    """The wheel of captioner has a list; the runtime has all but the same list."""
    excluded = RUNTIME["tool"]["hatch"]["build"]["exclude"]

    assert [f"/{name}" for name in OF_FULL] == [one for one in excluded if one != "__pycache__"]
    assert [name for name in OF_FULL if not (ROOT / name).exists()] == []
    assert sorted(OF_FULL) == OF_FULL


@pytest.mark.parametrize("name", RUNTIME_SOURCES)
def test_the_runtime_imports_neither_the_rest_nor_what_it_does_not_require(name) -> None:
    path = RUNTIME_SOURCES[name]
    extras = RUNTIME["project"]["optional-dependencies"]
    allowed = names(RUNTIME["project"]["dependencies"])
    part = name.split(".")[1] if "." in name else ""
    for folder, extra in (("serving", "serve"), ("client", "client"), ("bulk", "ray")):
        if part == folder:
            allowed |= names(extras[extra])
    allowed |= {"pydantic", "pydantic_core"} if part == "serving" else set()  # of fastapi
    allowed |= {"ray", "fsspec", "pyarrow"} if part in ("ray", "bulk") else set()

    for target in at_import(ast.parse(path.read_text(encoding="utf-8"))):
        top = target.partition(".")[0]
        if top == "captioner":
            assert not is_of_full(SOURCES[target]), f"{name} imports {target}"
        elif top not in sys.stdlib_module_names:
            assert top in allowed, f"{name} imports {target}"


def test_extras_are_the_same_in_both() -> None:
    whole, runtime = (one["project"]["optional-dependencies"] for one in (WHOLE, RUNTIME))
    both = whole.keys() & runtime.keys() - {"all"}

    for extra in both:
        shared = [one for one in runtime[extra] if not one.startswith("captioner-runtime[")]
        assert shared == whole[extra]
    assert whole.keys() - both - {"all"} == {"train", "export", "lite", "docs", "dev"}
    required = {one.replace("[signatures]", "") for one in WHOLE["project"]["dependencies"]}
    assert {*RUNTIME["project"]["dependencies"], *runtime["attend"]} <= required
    assert set(EXTRAS) <= {*whole, *runtime}


def test_both_have_the_licence_and_the_same_python() -> None:
    assert (ROOT / "runtime/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    for key in ("requires-python", "license"):
        assert WHOLE["project"][key] == RUNTIME["project"][key]


def test_the_exported_model_is_the_shipped_one() -> None:
    """scripts/export_shipped.py writes it; scripts/ship_model.py runs that for a new model."""
    exported = read_config(PRETRAINED_INT8)[EXPORTED]

    assert exported["precision"] == "int8"
    assert exported[SOURCE] == fingerprint_of(PRETRAINED), "run scripts/export_shipped.py"


# --- what a user of the runtime alone sees -------------------------------------------------------

NOT_INSTALLED = ("torch", "torchvision", "matplotlib", "contourpy", "fontTools", "fastapi", "onnx")


@pytest.fixture(scope="module")
def runtime_alone(tmp_path_factory) -> Path:
    """A folder with the runtime's files only, where the full package's requirements are missing."""
    folder = tmp_path_factory.mktemp("runtime")
    for path in (ROOT / "captioner").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and not is_of_full(path):
            link = folder / path.relative_to(ROOT)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({NOT_INSTALLED!r}))\n"
    )
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in an empty folder, with the modules of ``folder``."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(folder)},
        cwd=folder.parent,
        timeout=120,
        check=False,
    )


def captioner(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "-m", "captioner", *arguments)


def test_the_runtime_alone_captions_with_the_shipped_model(runtime_alone) -> None:
    done = captioner(runtime_alone, "caption", str(PHOTO))
    script = (
        "import captioner; model = captioner.load(); print(model.precision); "
        f"print(model.caption({str(PHOTO)!r}).text)"
    )
    in_python = run(runtime_alone, "-c", script)

    assert done.returncode == 0, done.stderr
    precision, text = in_python.stdout.splitlines()
    assert precision == "int8"
    assert done.stdout == f"{PHOTO}: {text}\n"


def test_the_overview_marks_what_the_runtime_lacks(runtime_alone) -> None:
    lines = captioner(runtime_alone, "--help").stdout.splitlines()

    for name in COMMANDS:
        (line,) = [one for one in lines if one.startswith(f"  captioner {name} ")]
        assert line.endswith("(needs: pip install captioner)") == (name in FULL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--data", "x.csv"), "captioner train needs torch and the full package"),
        (("export", "--help"), "run: pip install captioner"),
        (("push", "hf:me/x"), "captioner push needs torch and the full package"),
        (("prepare", "shards"), "captioner prepare needs torch and the full package"),
        (("attend", str(PHOTO)), "run: pip install 'captioner-runtime[attend]'"),
        (("serve",), "run: pip install 'captioner-runtime[serve]'"),
        (("caption", str(PHOTO), "--model", str(PRETRAINED)), "run: pip install captioner"),
        (("info", "--model", str(PRETRAINED)), "run: pip install captioner"),
        (("attend", str(PHOTO), "--method", "occlusion"), "captioner-runtime[attend]"),
    ],
)
def test_what_the_runtime_lacks_is_one_line(runtime_alone, arguments, message) -> None:
    done = captioner(runtime_alone, *arguments)

    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert message in line


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - set(FULL)))
def test_help_of_the_runtimes_commands_needs_no_extra(runtime_alone, command) -> None:
    done = captioner(runtime_alone, command, "--help")

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ") or "captioner" in done.stdout


def test_drawing_without_what_draws_is_one_line(runtime_alone) -> None:
    """A caption in a notebook is then shown as text."""
    script = (
        "import captioner; "
        f"caption = captioner.load().caption({str(PHOTO)!r}, beam_size=1); "
        "print(caption._repr_html_()); "
        f"captioner.overlay({str(PHOTO)!r}, caption)"
    )
    done = run(runtime_alone, "-c", script)

    assert done.stdout == "None\n"
    last = done.stderr.splitlines()[-1]
    assert "needs contourpy, fontTools, matplotlib; run: pip install 'captioner-run" in last


def test_names_of_the_full_package_are_import_errors(runtime_alone) -> None:
    for name in ("train", "register_encoder", "register_scorer"):
        done = run(runtime_alone, "-c", f"from captioner import {name}")

        assert done.stderr.splitlines()[-1].startswith(f"ImportError: captioner.{name} needs torch")
