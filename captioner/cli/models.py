"""``captioner info``, ``export`` and ``push``: what a model is, as ONNX graphs, on the hub."""

from __future__ import annotations

import dataclasses
import json
import shlex
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from captioner.cli.arguments import command
from captioner.cli.main import OK
from captioner.cli.outputs import require_parent
from captioner.data.folders import find_images
from captioner.errors import ConfigError
from captioner.messages import printable
from captioner.option_fields import ModelName, Shown, changed
from captioner.options import CardOptions, SearchOptions

# --- info ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InfoOptions:
    """Show a model's architecture, preprocessing, search options, training data and scores."""

    model: ModelName | None = None
    """Model or run folder, or hf:user/name[@revision] of the Hugging Face hub (default: the shipped
    model)."""
    card: bool = False
    """Print the model card too."""
    format: Literal["text", "json"] = "text"
    """text: the main facts; json: all of them."""


@command("info", "[--model MODEL] [--card] [--format text|json]", InfoOptions)
def info(options: InfoOptions, _: Any) -> int:
    """Print the facts, and the model card on request."""
    from captioner.inference.card import readable
    from captioner.inference.folder import CARD, SHIPPED_MODEL, config_errors, find_model

    folder = find_model(options.model or SHIPPED_MODEL)
    facts = _facts(folder)
    if options.format == "json":
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return OK
    with config_errors(folder):
        summary = _summary(facts)
    for name, value in summary.items():
        if value:
            print(f"{name:<12}{printable(value)}")
    card = folder / CARD
    if options.card and card.is_file():
        print("\n" + readable(card.read_text(encoding="utf-8", errors="replace")))
    return OK


def _facts(folder: Path) -> dict[str, Any]:
    """What is known of a model, whether it is exported or not."""
    from captioner.extras import is_installed
    from captioner.inference.folder import EXPORTED, GRAPHS, WEIGHTS, load_model

    stored = load_model(folder)
    config, vocabulary = stored.config, stored.vocabulary
    sizes = [(folder / n).stat().st_size for n in (*GRAPHS, WEIGHTS) if (folder / n).is_file()]
    facts: dict[str, Any] = {"folder": str(folder), "size_mb": round(sum(sizes) / 1e6, 1)}
    if stored.has_graphs:
        facts["exported"] = {name: config[EXPORTED][name] for name in ("opset", "precision")}
    facts |= {"encoder": config["encoder"]["name"], "grid": config["encoder"]["grid"]}
    if stored.has_weights and is_installed("torch"):
        parts = {"encoder": stored.model.encoder, "decoder": stored.model.decoder}
        facts["parameters"] = {
            name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()
        }
    calibrator = stored.calibrator
    return {
        **facts,
        "preprocessing": config["preprocessing"],
        "decoder": dataclasses.asdict(stored.decoder),
        "search": dataclasses.asdict(stored.search),
        "vocabulary": len(vocabulary.words),
        "tokenizer": vocabulary.tokenizer,
        "styles": list(vocabulary.styles),
        **stored.info,
        "confidence": "not calibrated" if calibrator is None else dict(calibrator.report),
    }


def _summary(facts: dict[str, Any]) -> dict[str, str]:
    """The main facts in words; empty: not known."""
    decoder, grid, graphs = facts["decoder"], facts["grid"], facts.get("exported")
    search, data = SearchOptions(**facts["search"]), facts.get("data")
    own = [f"{name} {getattr(search, name)}" for name in changed(search)]
    sizes = [f"{part} {count:,}" for part, count in facts.get("parameters", {}).items()]
    measured = facts.get("scores", {}) | {"validation": facts.get("training", {})}
    scores = [
        f"{photos} CIDEr {100 * found['CIDEr']:.1f}, BLEU-4 {100 * found['Bleu_4']:.1f}"
        for photos, found in measured.items()
        if "CIDEr" in found
    ]
    confidence = facts["confidence"]
    return {
        "folder": f"{facts['folder']}, {facts['size_mb']} MB",
        "graphs": f"{graphs['precision']}, opset {graphs['opset']}" if graphs else "",
        "encoder": f"{facts['encoder']}, {grid[0]} x {grid[1]} regions at "
        f"{facts['preprocessing']['image_size']} pixels",
        "decoder": f"{decoder['attention']} attention ({decoder['selection']}), "
        f"{decoder['hidden_dim']} hidden units, {decoder['order']} order",
        "parameters": ", ".join(sizes),
        "vocabulary": f"{facts['vocabulary']:,} {facts['tokenizer']}",
        "styles": ", ".join(facts["styles"]),
        "search": ", ".join(own),
        "data": data if isinstance(data, str) else "",
        "scores": "; ".join(scores),
        "confidence": confidence if isinstance(confidence, str) else "calibrated",
    }


# --- export --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Export a model to ONNX.

    captioner caption, attend, serve and evaluate run the folder with ONNX Runtime, without torch;
    other programs can run it too (docs/export.md). With --web: as a static site that captions
    photos in the browser (docs/browser.md).
    """

    model: Annotated[str, Shown("MODEL", positional=True)] | None = None
    """Model or run folder (default: the shipped model); with --web also an exported folder."""
    output: Annotated[str, Shown("FOLDER", ("-o", "--output"))]
    """Folder to write."""
    force: bool = False
    """Replace an existing folder."""
    int8: bool = False
    """Write 8-bit graphs: a quarter of the size of float32 ones and faster; captions differ
    slightly; needs --calibration."""
    calibration: list[Annotated[str, Shown("PHOTOS")]] = field(default_factory=list)
    """A few hundred photos (files or folders) to choose the ranges of --int8 with, similar to those
    you will caption, but none that you evaluate on; repeat for several."""
    web: bool = False
    """Write a static site that captions photos in the browser; combine with --int8 for a site small
    enough for phones."""
    weights: bool = False
    """Keep the weights beside the graphs: on a CPU the folder then runs the graphs by default, and
    GPUs, other precisions and training use the weights."""
    onnxruntime_web: Annotated[str, Shown("SOURCE")] | None = None
    """Tarball or folder of the npm package onnxruntime-web for --web, without a network (default:
    downloaded once)."""


@command("export", "[MODEL] -o FOLDER [--int8 --calibration PHOTOS] [--web]", ExportOptions)
def export(options: ExportOptions, _: Any) -> int:
    """Export, check against the model, and print what was written."""
    output = Path(options.output)
    require_parent(output)
    if output.exists() and not options.force:
        raise ConfigError(f"{output} exists; give --force to replace it, or another name")
    photos = find_images(options.calibration, recursive=True)
    if options.int8 != bool(photos):
        raise ConfigError(
            "--int8 and --calibration go together; give a few hundred photos of your own: "
            "--int8 --calibration FOLDER"
        )
    if options.onnxruntime_web is not None and not options.web:
        raise ConfigError("--onnxruntime-web is for --web; give both, or neither")

    from captioner.inference.folder import EXPORTED, SHIPPED_MODEL, WEIGHTS, find_model, read_config

    model = find_model(options.model or SHIPPED_MODEL)
    config = read_config(model)  # a wrong folder fails before torch is imported
    if not options.web:
        for name, size in _export(model, output, photos, weights=options.weights).items():
            print(f"{output / name}  {size:.1f} MB")
        return OK
    if photos and not (model / WEIGHTS).is_file():
        raise ConfigError(
            f"{model} is exported already; give the model folder it was exported from with --int8, "
            "or leave out --int8 and --calibration"
        )
    from captioner.inference.folder import load_model
    from captioner.serving.site.onnxruntime_web import runtime_files
    from captioner.serving.site.writer import check_search, write_site

    check_search(load_model(model))
    runtime = runtime_files(options.onnxruntime_web)  # before minutes of work
    with tempfile.TemporaryDirectory() as temporary:
        graphs = model
        if photos or EXPORTED not in config:
            graphs = Path(temporary) / "exported"
            _export(model, graphs, photos)
        site = write_site(graphs, output, runtime)
    print(f"{output}  {site.files} files; the first visit loads {site.first_load:.1f} MB")
    print(f"the GPU, if the reader chooses it: {site.gpu:.1f} MB more")
    print(f"to try it: python -m http.server --directory {shlex.quote(str(output))}")
    return OK


def _export(
    model: Path, output: Path, photos: list[Path], *, weights: bool = False
) -> dict[str, float]:
    """Export, print how the graphs compare with the model, and return the sizes (MB)."""
    from captioner.inference.export import export as write

    written = write(model, output, photos, weights=weights)
    print(f"float32: log-probabilities differ from torch's by at most {written.difference:.1g}")
    if written.equal is not None:
        equal, count = written.equal
        print(f"int8: the same caption as float32 for {equal} of {count} calibration photos")
    return dict(written.sizes)


# --- push ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PushOptions(CardOptions):
    """Upload a model with its card to the Hugging Face hub.

    No photos or paths are uploaded; the model holds words and n-gram counts of the training
    captions. Log in first (hf auth login), or set HF_TOKEN.
    """

    model: Annotated[str, Shown(positional=True)]
    """Model or run folder, or: shipped."""
    target: Annotated[str, Shown(positional=True)]
    """Repository, created if necessary: hf:user/name[@branch]."""
    dry_run: bool = False
    """Print the files and the card, and connect to nothing."""
    private: bool = False
    """Let only yourself see a new repository (default: your account's setting)."""
    message: str = "Upload a captioner model"
    """Message of the commit."""


@command("push", "MODEL|RUN hf:user/name [--private] [--dry-run] [options]", PushOptions)
def push(options: PushOptions, _: Any) -> int:
    """Upload, or list what would be uploaded."""
    from captioner.inference import hub
    from captioner.inference.card import files_to_push
    from captioner.inference.folder import CARD, find_model

    if hub.is_hub_name(options.model):
        raise ConfigError(f"{options.model} is on the hub already; give a model or run folder")
    if not hub.is_hub_name(options.target):
        raise ConfigError(f"the target is {options.target!r}; give hf:user/name")
    target, folder = hub.parse(options.target), find_model(options.model)
    files = files_to_push(folder, target.repo, options)
    if not options.dry_run:
        private = options.private or None
        print(hub.push(files, target, commit_message=options.message, private=private))
        return OK
    contents = {n: c if isinstance(c, bytes) else c.read_bytes() for n, c in files.items()}
    kind = "private " if options.private else ""
    print(f"would upload to the {kind}repository {target} ({options.message}):")
    for name, content in contents.items():
        print(f"  {len(content):>11,} bytes  {name}")
    print(f"\n{CARD}:\n\n{contents[CARD].decode()}", end="")
    return OK
