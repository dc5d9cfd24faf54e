"""Score the shipped model and captioning models from the Hugging Face hub on the same photos.

    pip install transformers '.[torch]'
    python scripts/studies/hub_captioners.py --annotations captions_val.json --images photos/ \
        --out peers [--style coco] [--model Salesforce/blip-image-captioning-base ...]

A model is a folder or a name on the hub. transformers must be able to load the model for the task
image-text-to-text. The model must also work without a prompt, as BLIP, GIT and ViT-GPT2 do. The
captions by each model are written to a COCO results file in --out. If the command is repeated,
existing files are reused. ``captioner.evaluate`` scores the captions, and the script prints a
Markdown table with a row per model. To test whether two systems differ significantly, run
``captioner evaluate --results A --compare B`` on their results files.

Read the models' cards before you compare them. Many models were trained on Karpathy's split of
COCO. Its training photos include 30,504 photos from val2014.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image
from tqdm import tqdm

import captioner
from captioner.data.coco import read_dataset
from captioner.data.example import Example
from captioner.data.images import open_image
from captioner.errors import CaptionerError, ImageError
from captioner.files import atomic_write
from captioner.inference.card import score_table

MODELS = (
    "Salesforce/blip-image-captioning-base",
    "microsoft/git-base-coco",
    "nlpconnect/vit-gpt2-image-captioning",
)
METRICS = ("Bleu_1", "Bleu_4", "ROUGE_L", "CIDEr")
BATCH = 16

Write = Callable[[Sequence[Image.Image]], list[str]]
"""A function that returns a caption for each photo of a batch."""


def ours(style: str | None) -> Write:
    """Return a function that captions photos with the shipped model in float32.

    ``style`` is the style of the captions, or None for the default style.
    """
    model = captioner.load(precision="fp32")
    search = {} if style is None else {"style": style}
    return lambda photos: [caption.text for caption in model.caption(list(photos), **search)]


def peer(name: str) -> Write:
    """Return a function that captions photos with a model from the hub, with three beams."""
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    processor, tokenizer = (
        part.from_pretrained(name) for part in (AutoImageProcessor, AutoTokenizer)
    )
    model = AutoModelForImageTextToText.from_pretrained(name).to(device).eval()

    def write(photos: Sequence[Image.Image]) -> list[str]:
        """Caption a batch of photos with at most 30 tokens each."""
        pixels = processor(images=list(photos), return_tensors="pt").pixel_values.to(device)
        with torch.inference_mode():
            tokens = model.generate(pixel_values=pixels, num_beams=3, max_new_tokens=30)
        return [text.strip() for text in tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    return write


def results(write: Write, images: Sequence[Example]) -> list[dict[str, object]]:
    """Caption the photos and return the content of a COCO results file.

    Photos that cannot be read are reported and left out.
    """
    found: list[dict[str, object]] = []
    for start in tqdm(range(0, len(images), BATCH), unit="batch"):
        photos = {}
        for image in images[start : start + BATCH]:
            try:
                photos[image.image_id] = open_image(image.path)
            except ImageError as problem:
                print(problem, file=sys.stderr)
        texts = write(list(photos.values())) if photos else []
        found += [
            {"image_id": image_id, "caption": text}
            for image_id, text in zip(photos, texts, strict=True)
        ]
    return found


def main() -> None:
    """Write the results files and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--annotations", required=True, help="COCO captions file")
    parser.add_argument("--images", required=True, help="folder with the photos")
    parser.add_argument(
        "--out", type=Path, required=True, help="write the results files to this folder"
    )
    parser.add_argument(
        "--model", nargs="+", default=MODELS, help="models to compare: names on the hub, or folders"
    )
    parser.add_argument("--style", help="style of the shipped model's captions")
    given = parser.parse_args()
    images = read_dataset([given.annotations], [given.images])
    given.out.mkdir(parents=True, exist_ok=True)
    reports = {}
    for name in ("captioner", *given.model):
        path = given.out / f"{name.strip('/').replace('/', '--')}.json"
        if not path.exists():
            print(name, file=sys.stderr)
            write = ours(given.style) if name == "captioner" else peer(name)
            atomic_write(path, json.dumps(results(write, images)))
        reports[name] = captioner.evaluate(annotations=given.annotations, results=path)
    print(score_table(reports, METRICS))


if __name__ == "__main__":
    try:
        main()
    except CaptionerError as problem:
        sys.exit(f"{Path(__file__).name}: {problem}")
