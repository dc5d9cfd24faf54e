"""Generate the site's pages that are not in docs/, during ``mkdocs build`` (see mkdocs.yml).

The generated pages and files are

- the README, the changelog, the contributing guide and the model card;
- the notebooks, which are executed so that they show the output of the current code and model;
- the command reference, made from ``--help``, and the Python reference, made from docstrings;
- source files that a page links to;
- ``llms.txt`` (https://llmstxt.org), a table of contents for language models, and each page as
  Markdown.

Pages contain relative links that work on GitHub. They are translated to links within the site.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import nbformat
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

import captioner
from captioner.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "captioner/pretrained/README.md": "model_card.md",
}
"""Paths on the site of pages from outside docs/, by their path in the repository."""

LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)")
"""The path in a relative Markdown link, without its anchor."""
BADGE = re.compile(r"^\[!\[.*\n\n", re.MULTILINE)
"""A line of badges, which is left out of the site."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json"}
"""Language for the syntax highlighting of a source file, by suffix."""

API = {
    "Captioning": ("inference.captioner.caption", "load", "Captioner", "Caption", "CropBox"),
    "Captions in photos": ("write_caption", "remove_caption", "apply_captions"),
    "Alternative texts": ("suggest_alt", "apply_alt"),
    "Pictures": ("overlay", "attention_map", "animate", "page", "gallery", "Entry", "MapArchive"),
    "Training and evaluation": ("train", "evaluate", "tokenize"),
    "Extensions": (
        "register_encoder", "register_scorer", "model.backbones.ENCODERS",
        "model.build.SCORERS", "model.attention.Scorer", "model.attention.Sizes",
    ),
    "Options": (
        "SearchOptions", "FaithfulnessOptions", "TrainConfig", "options.DataConfig",
        "options.EncoderConfig", "options.DecoderConfig", "options.TrainingConfig",
        "options.SelfCriticalConfig",
    ),
    "Errors": (
        "CaptionerError", "CheckpointError", "ConfigError", "DataError", "ImageError", "ModelError",
    ),
}  # fmt: skip
"""The sections of the Python reference, with the names in each section below ``captioner``."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, then the files that pages link to.

    MkDocs calls this function when it has listed the files in docs/.
    """

    def add(uri: str, content: str | bytes) -> None:
        """Add a file with this path on the site."""
        files.append(File.generated(config, uri, content=content))

    for source, uri in MOVED.items():
        add(uri, BADGE.sub("", (ROOT / source).read_text("utf-8")))
    add("commands.md", commands())
    add("api.md", api())
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
        text, pictures = executed(file.content_string, Path(file.src_uri).stem)
        add(site_path(f"docs/{file.src_uri}"), text)
        for name, picture in pictures.items():
            add(name, picture)
    for page in files.documentation_pages():
        for link in LINK.finditer(page.content_string):
            path = target(repository_path(page.src_uri), link[0])
            if path and files.get_file_from_path(uri := site_path(path)) is None:
                content = (ROOT / path).read_bytes()
                add(uri, source_page(path, content.decode()) if uri.endswith(".md") else content)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Translate links within the repository to links within the site.

    MkDocs calls this function for each page.
    """
    source = repository_path(page.file.src_uri)

    def translate(link: re.Match[str]) -> str:
        """Return the path on the site. Links to other sites stay as they are."""
        path = target(source, link[0])
        here = posixpath.dirname(page.file.src_uri)
        return posixpath.relpath(site_path(path), here or ".") if path else link[0]

    if page.is_homepage and config.site_url:  # docs.yml publishes the demo with the site
        demo = f"[Try it in the browser]({config.site_url}demo/): no photo leaves your device."
        markdown = markdown.replace("\n\n", f"\n\n{demo}\n\n", 1)
    return LINK.sub(translate, markdown)


def on_env(_: object, /, config: MkDocsConfig, files: Files) -> None:
    """Add ``llms.txt``, and the Markdown of each page at the page's address plus ``.md``.

    MkDocs calls this function when all pages have been read.
    """
    text = f"# {config.site_name}\n\n> {config.site_description}\n"
    for [(section, content)] in (entry.items() for entry in config.nav or []):
        text += "\n" if isinstance(content, str) else f"\n## {section}\n\n"
        pages = [{section: content}] if isinstance(content, str) else content
        for [(title, uri)] in (page.items() for page in pages):
            page = files.src_uris[uri].page
            url, markdown = page.url, page.markdown
            if "\n::: " not in markdown:  # docstrings are inserted in HTML only
                url += ".md"
                markdown = LINK.sub(lambda link: re.sub(r"\.md$", ".html", link[0]), markdown)
                file = File.generated(config, f"{uri}.txt", content=markdown)
                file.dest_uri = url
                files.append(file)
            text += f"- [{title}]({config.site_url or ''}{url})\n"
    files.append(File.generated(config, "llms.txt", content=text))


# --- paths ---------------------------------------------------------------------------------------


def repository_path(uri: str) -> str:
    """Return the path in the repository of a page with this path on the site."""
    moved = {page: source for source, page in MOVED.items()}
    return moved.get(uri, f"docs/{uri}")


def site_path(path: str) -> str:
    """Return the path on the site of a file with this path in the repository."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))
    return path if Path(path).suffix in (".jpg", ".png") else f"source/{path}.md"


def target(source: str, link: str) -> str | None:
    """Return the file in the repository that a relative link points to.

    Args:
        source: Path of the page with the link, in the repository.
        link: The relative link.

    Returns:
        The path in the repository, or None if it contains no such file.
    """
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    return path if (ROOT / path).is_file() and not path.startswith("..") else None


# --- pages ---------------------------------------------------------------------------------------


def source_page(path: str, content: str) -> str:
    """Return a page in Markdown that shows a source file and is excluded from the site's search."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    return (
        f"---\nsearch: {{exclude: true}}\n---\n\n# {path}\n\n"
        f"`````{language}\n{content.rstrip()}\n`````\n"
    )


def commands() -> str:
    """Return the command reference, as Markdown."""
    parts = ["# Commands", "Every command with its `--help`.", f"```text\n{_help()}```"]
    for name, summary in COMMANDS.items():
        parts += [f"## captioner {name}", f"{summary[0].upper()}{summary[1:]}."]
        parts.append(f"```text\n{_help(*name.split())}```")
    settings = _output("train", "--settings")
    parts += ["## Settings of training", f"```text\n{settings}```"]
    return "\n\n".join(parts)


def _help(*words: str) -> str:
    """Return the help of a command."""
    return _output(*words, "--help")


def _output(*words: str) -> str:
    """Run captioner with these arguments, and return its standard output, 80 characters wide."""
    command = [sys.executable, "-m", "captioner", *words]
    environment = {**os.environ, "COLUMNS": "80"}
    return subprocess.check_output(command, text=True, cwd=ROOT, env=environment)


def api() -> str:
    """Return the Python reference as Markdown. It must contain every public name.

    Raises:
        ValueError: ``API`` lacks a public name.
    """
    names = [name.rpartition(".")[2] for section in API.values() for name in section]
    missing = set(captioner.__all__) - {"__version__"} - set(names)
    if missing:
        raise ValueError(f"API in {__file__} does not contain {', '.join(sorted(missing))}; add it")
    parts = ["# Python API", "[Python](python.md) shows how to use it."]
    for title, section in API.items():
        parts.append(f"## {title}")
        parts += [f"::: captioner.{name}" for name in section]
    return "\n\n".join(parts)


@cache  # mkdocs serve rebuilds the site after every change
def executed(notebook: str, name: str) -> tuple[str, dict[str, bytes]]:
    """Execute a notebook.

    Args:
        notebook: The content of the notebook's file.
        name: Name of the file without its suffix.

    Returns:
        The notebook with its output, as Markdown.
        Its images, by path on the site.

    Raises:
        ValueError: The notebook prints to standard error, or a picture has no description.
    """
    parsed = nbformat.reads(notebook, as_version=4)
    # Run notebooks with this checkout and environment, activated or not.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder, "docs")
        work.mkdir()
        (work.parent / "assets").symlink_to(ROOT / "assets")
        resources = {"metadata": {"path": str(work)}}
        NotebookClient(parsed, timeout=600, resources=resources).execute(env=environment)
    for output in (output for cell in parsed.cells for output in cell.get("outputs", [])):
        if output.get("name") == "stderr":
            raise ValueError(
                f"docs/{name}.ipynb prints to standard error; fix the cause: {output.text}"
            )
    text, made = MarkdownExporter().from_notebook_node(
        parsed, {"unique_key": name, "output_files_dir": f"{name}_files"}
    )
    text = text.replace("```bash\n%%bash\n", "```bash\n")

    def describe(picture: re.Match[str]) -> str:
        """Return a picture's Markdown with the description from the metadata of its cell."""
        alt = parsed.cells[int(picture[2])].metadata.get("alt")
        if not alt:
            raise ValueError(
                f"docs/{name}.ipynb has a picture without text in cell {picture[2]}; add alt to "
                "the cell's metadata"
            )
        return f"![{alt}]({picture[1]})"

    text = re.sub(rf"!\[\w+\]\(({name}_files/{name}_(\d+)_\d+\.\w+)\)", describe, text)
    return text, made["outputs"]
