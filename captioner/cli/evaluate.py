"""``captioner evaluate``: captions against references."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from captioner.cli.main import OK
from captioner.cli.options import (
    Parser,
    add_model_options,
    add_search_options,
    new_parser,
    refuse_overwrite,
    search_changes,
)
from captioner.errors import ConfigError, DataError


def parser() -> Parser:
    """Options of ``evaluate``."""
    new = new_parser(
        "evaluate",
        "Score captions against references: BLEU-1 to 4, ROUGE-L, CIDEr. Either a model captions "
        "the photos now, or a COCO results file of any system is read.",
        "--annotations CAPTIONS.json (--images FOLDER [--model DIR] | --results RESULTS.json) "
        "[-o REPORT.json]",
    )
    new.add_argument("--annotations", required=True, help="COCO captions file with the references")
    new.add_argument("--images", help="folder of the photos: the model captions them")
    new.add_argument("--results", help="COCO results file: [{image_id, caption}, ...]")
    new.add_argument("-o", "--output", help="write the report as JSON, with every image's scores")
    new.add_argument("--force", action="store_true", help="replace the report")
    add_search_options(new)
    add_model_options(new)
    return new


def main(argv: Sequence[str]) -> int:
    """Score and report."""
    options = parser().parse(argv)
    if (options.images is None) == (options.results is None):
        raise ConfigError("give either --images (a model captions them) or --results (a file)")
    target = Path(options.output) if options.output else None
    if target is not None:
        refuse_overwrite(target, options.force)

    from captioner.data.coco import read_captions
    from captioner.evaluation.metrics import SIGNATURE, score
    from captioner.files import atomic_write

    if options.results is not None:
        _, references = read_captions([options.annotations])
        captions = _read_results(Path(options.results))
        unknown = sorted(captions.keys() - references.keys())
        if unknown:
            raise DataError(
                f"{options.results}: image {unknown[0]} (and {len(unknown) - 1} more) is not in "
                f"{options.annotations}; give the annotations that the results belong to"
            )
        about: dict[str, Any] = {"results": options.results}
    else:
        references, captions, about = _caption(options)
    scores = score(captions, references)
    about |= {"annotations": options.annotations, "images": len(captions)}
    missing = sum(1 for i, texts in references.items() if texts and i not in captions)
    if missing:
        about["images_without_caption"] = missing
    for name, value in about.items():
        print(f"{name:<22} {value}")
    for name, value in scores.corpus.items():
        print(f"{name:<22} {100 * value:.2f}")
    if target is not None:
        report = {
            "metrics": scores.corpus,
            "signature": SIGNATURE,
            **about,
            "per_image": [
                {"image_id": i, "caption": captions[i], **scores.images[i]}
                for i in sorted(captions)
            ],
        }
        atomic_write(target, json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return OK


def _caption(options: Any) -> tuple[dict[int, list[str]], dict[int, str], dict[str, Any]]:
    """Caption the annotated photos with a model."""
    import dataclasses

    from tqdm import tqdm

    from captioner.api import load
    from captioner.data.coco import read_dataset

    images = read_dataset([options.annotations], [options.images])
    model = load(*options.model, device=options.device, precision=options.precision)
    search = model.options(**search_changes(options))
    captions = {}
    results = model.stream((i.path for i in images), search, batch_size=options.batch_size)
    bar = tqdm(results, total=len(images), unit="photo", disable=None, dynamic_ncols=True)
    for image, result in zip(images, bar, strict=True):
        if result.error is not None:
            raise result.error
        captions[image.image_id] = result.captions[0].text
    about = {
        "model": options.model or "the model that ships",
        "search": ", ".join(f"{k} {v}" for k, v in dataclasses.asdict(search).items()),
    }
    return {image.image_id: list(image.captions) for image in images}, captions, about


def _read_results(path: Path) -> dict[int, str]:
    """A COCO results file."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        captions = {int(entry["image_id"]): str(entry["caption"]) for entry in entries}
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; give a COCO results file") from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path} is not a COCO results file ({error}); give a list of image_id and caption"
        ) from error
    if len(captions) != len(entries):
        raise DataError(f"{path} holds more than one caption of an image; give one an image")
    return captions
