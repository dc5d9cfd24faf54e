"""What an import loads, and what the top-level package offers."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys

import pytest

import captioner

# --- lazy imports --------------------------------------------------------------------------------

HEAVY = (
    "torch", "torchvision", "timm", "matplotlib", "accelerate", "pycocoevalcap", "onnxruntime",
    "fastapi",
)  # fmt: skip


def output_of(script: str) -> str:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import captioner",
        "import captioner; dir(captioner); captioner.ConfigError; captioner.Caption; "
        "captioner.SearchOptions; captioner.tokenize",
        "from captioner.cli.main import COMMANDS, parser_of\n"
        "for name in COMMANDS: parser_of(name).format_help()",
        "import captioner.drawing.figure, captioner.data.images",
    ],
)
def test_no_heavy_library_is_imported(code) -> None:
    report = f"print([name for name in {HEAVY} if name in sys.modules])"

    assert output_of(f"import sys\n{code}\n{report}") == "[]\n"


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

    assert output_of(script) == "[]\n"


def test_captioning_leaves_no_trace_in_the_home_folder(tmp_path, monkeypatch) -> None:
    """ONNX Runtime would store an id of the device there, and report its use to Microsoft."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)

    output_of("import captioner\ncaptioner.load()")

    assert list(tmp_path.rglob("*")) == []


@pytest.mark.slow
def test_scoring_needs_only_the_packages_that_its_page_lists(tmp_path) -> None:
    """In docs/evaluation.md, "Without torch or Java"."""
    images = [{"id": n, "file_name": f"{n}.jpg"} for n in range(3)]
    texts = [{"id": n, "image_id": n, "caption": f"a dog and {n} cats"} for n in range(3)]
    references, results = tmp_path / "captions.json", tmp_path / "results.json"
    references.write_text(json.dumps({"images": images, "annotations": texts}))
    results.write_text(json.dumps(texts))
    script = (
        f"import sys\nfor name in {(*HEAVY, 'contourpy', 'yaml')}:\n"
        "    sys.modules[name] = None\n"
        "from captioner.cli.main import main\n"
        f"main(['evaluate', '--annotations', {str(references)!r}, '--results', {str(results)!r}])"
    )

    assert re.search(r"^Bleu_4 +100\.00", output_of(script), re.MULTILINE)


def test_a_backend_that_does_not_exist_stops_no_drawing() -> None:
    """As notebooks name one in ``MPLBACKEND`` for every program that they start."""
    backend = "module://not_installed.backend"
    script = (
        "import os, sys\n"
        f"os.environ['MPLBACKEND'] = {backend!r}\n"
        "import numpy as np\n"
        "from captioner.drawing.heatmap import palette\n"
        "from captioner.drawing.style import lacks_letters\n"
        "palette('inferno'), lacks_letters('a')\n"
        "from captioner.drawing import canvas, sheet\n"
        "print(os.environ['MPLBACKEND'], canvas.to_image(canvas.Figure(figsize=(1, 1))).size)"
    )

    assert output_of(script) == f"{backend} (100, 100)\n"


def test_a_backend_that_exists_is_kept_for_pyplot() -> None:
    script = (
        "import os\nos.environ['MPLBACKEND'] = 'svg'\nimport captioner.drawing.canvas\n"
        "from matplotlib import pyplot\nprint(pyplot.get_backend())"
    )

    assert output_of(script) == "svg\n"


# --- the top-level package -----------------------------------------------------------------------


def test_all_equals_dir() -> None:
    assert sorted(captioner.__all__) == dir(captioner)


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
