"""Measure how much readers of this project have to read, choose and follow.

    python scripts/journeys.py                       # the whole table
    python scripts/journeys.py calls words           # some rows of the table
    python scripts/journeys.py --tree ../before      # the table for a different checkout

calls: function calls in the package while `captioner caption PHOTO` runs, imports included.
    Python 3.12 and later make fewer calls, because they inline list comprehensions.
words: words in the files that explain the model to a reader, as `wc -w` counts them.
options: distinct options of all commands. An option with several spellings, such as -o and
    --output or --neutral and --no-neutral, counts once. A training setting that is also an option
    of other commands counts once too: `search.beam_size` and `--beam-size` are the same field.
unused: training settings that no config, script or page mentions. Search options do not count.
lists: tuples, lists, sets and dictionaries in the package that repeat names of options. Whoever
    adds an option may have to extend them.

The script depends only on the files and the command line of a checkout. It can therefore also
measure older checkouts, in which functions have different names.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

ROOT = Path(__file__).parents[1]
PHOTO = "assets/examples/chelsea.jpg"
SCHEMA = ("schema.py", "option_fields.py")
"""Names that the file with the schema of options has had. The first that exists is used."""
TRAIN_CONFIG = ("captioner.options", "captioner.training.options")
"""Modules that have contained ``TrainConfig``, the settings of a training run. The first that
contains it is used."""
READERS_PATH = (
    ("model/attention.py",),
    ("model/decoder.py",),
    ("model/encoder.py",),
    ("model/caption_model.py", "model/captioner.py"),
    ("model/losses.py",),
    ("training/optim.py", "training/optimizer.py"),
    ("training/loop.py",),
)
"""Files that explain the model to a reader, each with the names it has had in the package."""


def main() -> None:
    """Print one line for each measure. Each measure except ``words`` runs in a new process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "measures", nargs="*", metavar="MEASURE", help=f"rows to print: {', '.join(MEASURES)}"
    )
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout to measure")
    parser.add_argument("--files", nargs="+", help="count the words in these files of the package")
    parser.add_argument("--fresh", help=argparse.SUPPRESS)
    options = parser.parse_args()
    package = options.tree.resolve() / "captioner"
    if options.fresh:
        print(json.dumps(MEASURES[options.fresh](package)))
        return
    if unknown := set(options.measures) - set(MEASURES):
        parser.error(f"{', '.join(unknown)} is not a measure; use {', '.join(MEASURES)}")
    for name in options.measures or MEASURES:
        if name == "words":
            figure, details = words(package, options.files)
        else:
            figure, details = in_fresh_process(name, package.parent)
        print(f"{name:<8} {figure:>6}  {details}", flush=True)


def in_fresh_process(measure: str, tree: Path) -> Any:
    """Take one measure of a checkout in a new process, and return its figure and its details.

    A new process imports the package of this checkout, and counts its imports from the start.
    """
    command = [sys.executable, __file__, "--fresh", measure, "--tree", str(tree)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# --- the measures: each returns a figure and its details -----------------------------------------


def calls(package: Path) -> tuple[int, str]:
    """Count calls of package functions while `captioner caption` runs.

    The bodies of modules and classes, and resumed generators, count too, because a reader who steps
    through the run enters them.
    """
    counts: Counter[str] = Counter()

    def count(frame: Any, event: str, _: Any) -> None:
        """Count a call by the file of the called function. Python calls this for every event."""
        if event == "call":
            counts[frame.f_code.co_filename] += 1

    # Only this thread counts, because other threads wait for it a varying number of times.
    sys.setprofile(count)
    from captioner.cli.main import main as run

    code = run(["caption", PHOTO])
    sys.setprofile(None)
    assert code == 0, f"captioner caption {PHOTO} failed"
    ours = {file: n for file, n in counts.items() if Path(file).is_relative_to(package)}
    schema = ours.get(str(first_of(package, SCHEMA)), 0)
    return sum(ours.values()), f"in {len(ours)} files; {schema} in the schema of options"


def words(package: Path, files: list[str] | None = None) -> tuple[int, str]:
    """Count the words in the files of `READERS_PATH`, or in ``files`` of the package."""
    paths = [first_of(package, names) for names in READERS_PATH]
    paths = [package / file for file in files] if files else paths
    counts = {path.stem: len(path.read_text(encoding="utf-8").split()) for path in paths}
    return sum(counts.values()), ", ".join(f"{stem} {n}" for stem, n in counts.items())


def options(_: Path) -> tuple[int, str]:
    """Count distinct options: options with dashes, and training settings.

    If all fields of a section of training settings are also options of other commands, both come
    from one dataclass and are counted once.
    """
    spellings = [names for command in commands() for names in options_of(command)]
    dashed = {main_name(names) for names in spellings}
    assert "model" in dashed, "found no options; do the commands still use argparse?"
    settings = training_settings()
    sections: dict[str, set[str]] = {}
    for setting in settings:
        section, dot, name = setting.rpartition(".")
        if dot:
            sections.setdefault(section, set()).add(name)
    shared = [section for section, names in sections.items() if names <= dashed]
    again = {setting for setting in settings if setting.rpartition(".")[0] in shared}
    distinct = (dashed | set(settings)) - again
    spelled = len({name for names in spellings for name in names})
    return len(distinct), f"{spelled} spellings with dashes, {len(settings)} training settings"


def unused(package: Path) -> tuple[int, str]:
    """Count the training settings that no config, script or page mentions."""
    tree = package.parent
    settings = [name for name in training_settings() if not name.startswith("search.")]
    recipes = [*tree.glob("configs/*.yaml"), *tree.glob("scripts/**/*")]
    pages = [*tree.glob("docs/*.md"), tree / "README.md"]
    in_recipes = set(named_settings(recipes, settings))
    named = in_recipes | set(named_settings(pages, settings))
    missing = [name for name in settings if name not in named]
    no_recipe = len(set(settings) - in_recipes)
    details = f"of {len(settings)} ({no_recipe} in no config or script): {', '.join(missing)}"
    return len(missing), details


def lists(package: Path) -> tuple[int, str]:
    """Count the literal collections that repeat names of options.

    A collection counts if at least 3 of its strings, and more than half of them, are fields of the
    same dataclass of options.
    """
    sources = {path: ast.parse(path.read_bytes()) for path in sorted(package.rglob("*.py"))}
    declared = option_names(sources.values())
    found: dict[str, list[str]] = {"search options": [], "other options": []}
    for path, source in sources.items():
        for line, strings in collections_of_strings(source):
            most = max((len(strings & fields) for fields in declared.values()), default=0)
            if most >= 3 and most > len(strings) / 2:
                of_search = len(strings & declared["SearchOptions"]) == most
                group = found["search options" if of_search else "other options"]
                group.append(f"{path.relative_to(package)}:{line}")
    details = [f"{len(places)} of {kind}: {', '.join(places)}" for kind, places in found.items()]
    return sum(map(len, found.values())), "; ".join(details)


MEASURES: dict[str, Callable[..., tuple[int, str]]] = {
    "calls": calls,
    "words": words,
    "options": options,
    "unused": unused,
    "lists": lists,
}


# --- options of the commands ---------------------------------------------------------------------


def first_of(package: Path, names: tuple[str, ...]) -> Path:
    """Return the first of these files that exists in the package, or the last one otherwise."""
    paths = [package / name for name in names]
    return next((path for path in paths if path.exists()), paths[-1])


def printed(argv: list[str]) -> str:
    """Run a command of the package and return its standard output."""
    from captioner.cli.main import main as run

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        run(argv)
    return out.getvalue()


def commands() -> list[str]:
    """Return the names of all commands, read from the output of `captioner --help`."""
    return re.findall(r"^  captioner (\w+(?: \w+)?)  +\w", printed(["--help"]), re.MULTILINE)


def main_name(spellings: Sequence[str]) -> str:
    """Return the name of an option, which is its first long spelling without dashes."""
    name = next((one for one in spellings if one.startswith("--")), spellings[0])
    return name.lstrip("-").replace("-", "_")


def options_of(command: str) -> Iterator[Sequence[str]]:
    """Yield the spellings of each option that a command accepts, such as ``-o`` and ``--output``.

    They are read from the argument parsers that the command creates to print its help.
    """
    parsers: list[argparse.ArgumentParser] = []
    original = argparse.ArgumentParser.__init__

    def recording(self: argparse.ArgumentParser, *args: Any, **settings: Any) -> None:
        """Create a parser, and remember it."""
        parsers.append(self)
        original(self, *args, **settings)

    argparse.ArgumentParser.__init__ = recording  # type: ignore[method-assign]
    try:
        printed([*command.split(), "--help"])
    finally:
        argparse.ArgumentParser.__init__ = original  # type: ignore[method-assign]
    for parser in parsers:
        for action in parser._actions:
            if action.option_strings:
                yield action.option_strings


# --- settings of training ------------------------------------------------------------------------


def training_settings() -> list[str]:
    """Return the names of all settings of a training run, such as ``training.lr``."""
    for module in TRAIN_CONFIG:
        with contextlib.suppress(ImportError, AttributeError):
            return list(settings_of(importlib.import_module(module).TrainConfig))
    raise SystemExit(f"found no TrainConfig in {' or '.join(TRAIN_CONFIG)}")


def settings_of(kind: Any, section: str = "") -> Iterator[str]:
    """Yield the names of all settings in a dataclass and in its sections."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from settings_of(hints[field.name], f"{field.name}.")
        else:
            yield f"{section}{field.name}"


def named_settings(paths: Iterable[Path], settings: list[str]) -> Iterator[str]:
    """Yield the settings that these files mention, as ``training.lr`` or in a block of YAML."""
    import yaml

    for path in paths:
        if not path.is_file() or path.suffix not in ("", ".md", ".py", ".sh", ".yaml"):
            continue
        text = path.read_text(encoding="utf-8")
        blocks = [text] if path.suffix == ".yaml" else re.findall(r"```yaml\n(.*?)```", text, re.S)
        for block in blocks:
            yield from flat(yaml.safe_load(block))
        for name in settings:
            spelled = re.escape(name).replace("_", "[-_]")  # command lines use dashes
            if re.search(rf"(?<![\w.]){spelled}\b", text):
                yield name


def flat(settings: Any, prefix: str = "") -> Iterator[str]:
    """Yield the names in nested dictionaries, such as ``training`` and ``training.lr``."""
    for name, value in settings.items() if isinstance(settings, dict) else ():
        yield f"{prefix}{name}"
        yield from flat(value, f"{prefix}{name}.")


# --- names of options in the code ----------------------------------------------------------------


def option_names(sources: Iterable[ast.Module]) -> dict[str, set[str]]:
    """Return the field names of each dataclass of options, including fields of its base classes."""
    classes = {
        node.name: node
        for source in sources
        for node in ast.walk(source)
        if isinstance(node, ast.ClassDef)
    }

    def fields(name: str) -> set[str]:
        """Return the field names of a class and its base classes."""
        if name not in classes:
            return set()
        own = {
            entry.target.id
            for entry in classes[name].body
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
        }
        return own.union(*(fields(b.id) for b in classes[name].bases if isinstance(b, ast.Name)))

    return {name: fields(name) for name in classes if name.endswith(("Options", "Config"))}


def collections_of_strings(source: ast.Module) -> Iterator[tuple[int, set[str]]]:
    """Yield the line and the strings of each literal tuple, list, set and dictionary.

    If a collection is unpacked into an outer collection, such as ``*("a", "b")``, it counts as part
    of the outer collection. An annotation such as ``Literal["a", "b"]`` does not count.
    """
    inner: set[int] = set()

    def strings(node: ast.AST | None) -> Iterator[str]:
        """Yield the strings that an entry adds to its collection."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Starred):
            yield from unpacked(node.value)

    def unpacked(node: ast.AST) -> Iterator[str]:
        """Yield the strings of a collection, and mark the collection as seen."""
        inner.add(id(node))
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            for entry in node.elts:
                yield from strings(entry)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                yield from unpacked(value) if key is None else strings(key)

    for node in ast.walk(source):  # outer nodes come before inner ones
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
            inner.add(id(node.slice))
        if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict) and id(node) not in inner:
            yield node.lineno, set(unpacked(node))


if __name__ == "__main__":
    main()
