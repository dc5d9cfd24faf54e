"""Tests of the documentation site: navigation, notebooks, build and pages in a browser."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from threading import Thread

import pytest
import yaml
from pages import ROOT
from playwright.sync_api import expect
from running import static_server

from captioner.cli.main import COMMANDS
from captioner.options import DataConfig, SearchOptions

NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))
MADE = {"index.md", "changelog.md", "contributing.md", "model_card.md", "commands.md", "api.md"}


def navigation() -> list[str]:
    """Return the pages in the navigation of mkdocs.yml."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    nav = yaml.safe_load(re.search(r"^nav:\n(?:[ #].*\n)+", text, re.MULTILINE)[0])["nav"]
    entries = [page for section in nav for page in section.values()]
    return [
        page
        for entry in entries
        for page in ([entry] if isinstance(entry, str) else [p for e in entry for p in e.values()])
    ]


def test_every_page_is_in_the_navigation() -> None:
    """To mend a failure, add the new page to the nav in mkdocs.yml."""
    pages = {page.name for page in (ROOT / "docs").glob("*.md") if "_table" not in page.name}

    assert sorted(navigation()) == sorted(pages | MADE | {f"{page.stem}.md" for page in NOTEBOOKS})


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_stored_without_output(notebook) -> None:
    """The build computes the output. To remove it in Jupyter: Edit, Clear All Outputs."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]

    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    text = "".join(line for cell in cells for line in cell["source"])
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (ROOT / "docs" / link).exists(), link


def test_links_to_other_sites_are_listed_and_followed(script) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response({"/here": 200, "/people": 403}.get(self.path, 404))
            self.end_headers()

    check = script("check_links")

    assert check.links()["https://arxiv.org/abs/1502.03044"] == {"README.md"}
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        problems = [check.problem(address + path) for path in ("/here", "/people", "/gone")]
        server.shutdown()
    assert problems == [None, None, "HTTP 404"]
    assert "refused" in check.problem(f"{address}/here")


# --- the tutorials -------------------------------------------------------------------------------

SMALL_ENVIRONMENT = """
import sys
from importlib.abc import MetaPathFinder

class ExtrasAreMissing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, ExtrasAreMissing())
"""
"""A ``sitecustomize`` module that hides every package that only an extra installs."""

TRUE_OF_THE_PHOTOS = """
assert caption.gates.argmin() == 0, "the first word has the smallest gate"
assert caption.left_out, "the figure shows words that were left out"
assert wrong.confidence < caption.confidence / 2, "the wrong caption is much less confident"
"""
"""A cell that checks the claims in the text of the first tutorial."""


def modules_of_extras() -> set[str]:
    """Return the modules of all packages that an extra requires, except for Jupyter's packages."""
    requirements = [
        re.fullmatch(r"([\w-]+).*extra == ['\"]([\w-]+)['\"]", requirement)
        for requirement in requires("captioner") or ()
    ]
    named = {
        found[1].lower().replace("-", "_")
        for found in requirements
        if found and found[2] not in ("docs", "dev", "dev-all")
    }
    return {
        module
        for module, packages in packages_distributions().items()
        if named & {package.lower().replace("-", "_") for package in packages}
    } - {"captioner"}


@pytest.mark.slow
def test_first_tutorial_runs_twice_without_extras(tmp_path, monkeypatch) -> None:
    """A reader has only the packages that the README installs, and Jupyter."""
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    modules = modules_of_extras()
    assert {"torch", "timm", "fastapi"} <= modules
    (tmp_path / "sitecustomize.py").write_text(SMALL_ENVIRONMENT.format(modules=modules))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    (tmp_path / "docs").mkdir()
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    notebook = nbformat.read(ROOT / "docs" / "first_caption.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(TRUE_OF_THE_PHOTOS))

    for _ in range(2):
        resources = {"metadata": {"path": tmp_path / "docs"}}
        NotebookClient(notebook, timeout=300, resources=resources).execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output["text"] for output in outputs if output.output_type == "stream")
    assert "great_dane.jpg: a woman with a brown dog" in printed


def test_second_tutorial_names_the_extra_that_it_needs() -> None:
    notebook = json.loads((ROOT / "docs" / "attention_explained.ipynb").read_text("utf-8"))

    assert "pip install -e '.[torch]' notebook" in "".join(notebook["cells"][0]["source"])


# --- the build -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.slow
def test_reference_is_complete(site) -> None:
    commands = (site / "commands.html").read_text("utf-8")
    api = (site / "api.html").read_text("utf-8")

    for name in COMMANDS:
        assert f'id="captioner-{name.replace(" ", "-")}"' in commands, name
    assert "training.label_smoothing=" in commands
    for name in (*vars(SearchOptions()), *vars(DataConfig())):
        assert re.search(rf'id="captioner\.(options\.)?\w+\.{name}"', api), name


@pytest.mark.slow
def test_llms_txt_is_the_navigation(site) -> None:
    links = re.findall(r"\]\((.*)\)$", (site / "llms.txt").read_text("utf-8"), re.MULTILINE)

    assert [re.sub(r"\.html(\.md)?$", ".md", link) for link in links] == navigation()
    for link in links:
        text = (site / link).read_text("utf-8")
        for target in re.findall(r"\]\((?!\w+:)([^)#\s]+)", text) if link.endswith(".md") else ():
            assert (site / target).is_file(), (link, target)


@pytest.mark.slow
def test_notebooks_show_their_output(site) -> None:
    first = (site / "first_caption.html").read_text("utf-8")
    explained = (site / "attention_explained.html").read_text("utf-8")

    assert "assets/great_dane.jpg: " in first
    assert "largest difference from caption.alphas: " in explained
    for page, picture in re.findall(r'src="((\w+)_files/[\w.]+)"', first + explained):
        assert (site / page).is_file(), picture
    assert "%%bash" not in first


@pytest.mark.slow
def test_site_loads_nothing_from_other_hosts(site) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]*\ssrc=\"?(?:https?:)?//[^\s>]*|<link[^>]*stylesheet[^>]*//[^\s>]*",
            page.read_text("utf-8"),
        )
        assert not loaded, (page, loaded)


@pytest.mark.slow
def test_site_in_a_browser(site, visit) -> None:
    """The site works on a plain file server, without other hosts, on a narrow screen."""
    with static_server(site) as address:
        for page in ("index", "first_caption", "attention", "api", "commands", "coco"):
            tab = visit(f"{address}{page}.html", address, viewport={"width": 390, "height": 800})
            assert tab.evaluate("document.documentElement.scrollWidth") <= 390, page
        tab.keyboard.press("/")
        tab.keyboard.type("label smoothing")
        expect(tab.locator(".md-search-result__link").first).to_be_visible()
