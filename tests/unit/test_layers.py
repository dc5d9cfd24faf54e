"""Imports between packages go from higher layers to lower ones, and heavy libraries load lazily."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import captioner

PACKAGE = Path(captioner.__file__).parent

# From the bottom up. A module may import from its own package and from packages in lower layers.
LAYERS = [
    ["errors"],
    ["extras", "files", "geometry", "hardware", "option_fields", "registry", "tokenizer"],
    ["config", "subwords", "caption", "hub", "metadata"],
    ["client", "vocabulary"],
    ["model_config"],
    ["confidence", "model_card"],
    ["sharing"],
    ["data"],
    ["visualization"],
    ["models"],
    ["decoding"],
    ["model_folder"],
    ["inference"],
    ["onnx_engine", "torch_engine"],
    ["loading"],
    ["batch_captioner"],
    ["api"],
    ["bulk"],
    ["ray"],
    ["evaluation"],
    ["training"],
    ["prepare"],
    ["serving"],
    ["export"],
    ["cli"],
    ["__main__"],
]
LAYER = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}

# Further modules that a package or module must not import.
FORBIDDEN = {
    "visualization": (
        "torch",
        "captioner.models",
        "captioner.decoding",
        "captioner.inference",
        "captioner.batch_captioner",
        "captioner.api",
    ),
    "decoding.search": ("captioner.models", "torch"),
    "inference": ("torch", "captioner.models"),
    "onnx_engine": ("torch", "captioner.models"),
    "loading": ("torch",),
    "batch_captioner": ("torch",),
    "api": ("torch",),
    "models": ("PIL", "json"),
    "caption": ("torch",),
    "client": ("torch", "captioner.serving"),
    "tokenizer": ("torch",),
    "vocabulary": ("torch", "tokenizers"),
    "confidence": ("torch",),
    "config": ("torch",),
    "serving": ("captioner.api", "captioner.training", "captioner.evaluation"),
}


def modules() -> dict[str, Path]:
    """Paths by dotted name without ``captioner.``; excludes ``captioner/__init__.py``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


def imports(path: Path) -> set[str]:
    """All modules imported in a file, even inside functions; ``from a import b`` gives a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


MODULES = modules()


def test_every_package_has_a_layer() -> None:
    assert {name.split(".")[0] for name in MODULES} == set(LAYER)
    assert set(MODULES) >= FORBIDDEN.keys()


@pytest.mark.parametrize("name", MODULES)
def test_modules_import_only_lower_layers(name) -> None:
    own = name.split(".")[0]
    for target in imports(MODULES[name]):
        if target.split(".")[0] != "captioner":
            continue
        package = target.split(".")[1]
        if package not in LAYER:  # a name of the package itself, such as its version
            allowed = own == "cli" or target == "captioner.__version__"
            assert allowed, f"{name} imports {target} from the top-level package"
            continue
        assert package == own or LAYER[package] < LAYER[own], f"{name} imports {target}"


@pytest.mark.parametrize("name", MODULES)
def test_forbidden_imports(name) -> None:
    for importer, forbidden in FORBIDDEN.items():
        if f"{name}.".startswith(f"{importer}."):
            for target in imports(MODULES[name]):
                assert not f"{target}.".startswith(tuple(f"{k}." for k in forbidden)), target


def test_only_the_cli_prints_exits_and_reads_arguments() -> None:
    """``print``, ``input``, ``sys.argv`` and ``sys.exit`` are used in ``cli`` only."""
    for name, path in MODULES.items():
        if name.split(".")[0] in ("cli", "__main__"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("print", "exit", "input"), f"{name}:{node.lineno}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used = f"{node.value.id}.{node.attr}"
                assert used not in ("sys.argv", "sys.exit"), f"{name}:{node.lineno}"


# --- lazy imports --------------------------------------------------------------------------------

HEAVY = ("torch", "torchvision", "timm", "matplotlib", "accelerate", "pycocoevalcap")


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import captioner",
        "import captioner; dir(captioner); captioner.ConfigError; captioner.Caption; "
        "captioner.SearchOptions; captioner.tokenize",
        "import captioner.cli.main",
        "import captioner.client",
        "import captioner.visualization.figure, captioner.data.images",
        "from captioner.cli.main import main; main(['--help'])",
        "from captioner.cli.main import main; main(['--version'])",
        *(
            f"from captioner.cli.main import main; main([{words}, '--help'])"
            for words in (
                "'caption'",
                "'attend'",
                "'serve'",
                "'evaluate'",
                "'calibrate'",
                "'train'",
                "'info'",
                "'push'",
                "'prepare'",
                "'prepare', 'features'",
                "'prepare', 'shards'",
            )
        ),
    ],
)
def test_no_heavy_library_is_imported(code) -> None:
    report = f"print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    script = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit as e:\n    assert not e.code\n{report}"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True
    )

    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_captioning_imports_neither_timm_nor_torchvision() -> None:
    """The shipped model does not need them, and importing them takes longer than captioning."""
    script = (
        "import sys, captioner\n"
        "from PIL import Image\n"
        "captioner.load().caption(Image.new('RGB', (64, 64)), beam_size=1)\n"
        "print([name for name in ('timm', 'torchvision', 'torch._dynamo', 'sympy', 'matplotlib', "
        "'accelerate', 'captioner.training') if name in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout == "[]\n"


# --- the top-level package -----------------------------------------------------------------------


def test_all_equals_dir() -> None:
    assert sorted(captioner.__all__) == dir(captioner)
    assert sorted(captioner._MODULES) == sorted(set(captioner.__all__) - {"__version__"})


@pytest.mark.parametrize("name", captioner.__all__)
def test_every_public_name_exists_and_has_a_docstring(name) -> None:
    value = getattr(captioner, name)

    if name == "__version__":
        assert value.count(".") == 2
        return
    home = importlib.import_module(captioner._MODULES[name])
    assert value is getattr(home, name)
    assert value.__doc__


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        captioner.nothing  # noqa: B018
