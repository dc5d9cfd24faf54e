"""Caption images unlike the training photos, and print the confidence.

    pip install scikit-image
    python scripts/other_kinds.py [--model FOLDER]

Documents, screens, textures, noise, medical images, and a few photos for comparison: from
scikit-image and assets/. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import numpy as np
from PIL import Image

import captioner

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Caption the images and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="model folder (default: the shipped model)")
    given = parser.parse_args()
    model = captioner.load(*([given.model] if given.model else []), precision="fp32")
    print("| image | caption | confidence |\n|---|---|---|")
    for name, image in images().items():
        caption = model.caption(image)
        shown = "" if caption.confidence is None else f"{caption.confidence:.2f}"
        print(f"| {name} | {caption.text} | {shown} |")


def images() -> dict[str, Image.Image]:
    """The images by name."""
    spec = importlib.util.find_spec("skimage")
    if spec is None or spec.origin is None:
        raise SystemExit("scikit-image is missing; run: pip install scikit-image")
    skimage = Path(spec.origin).parent / "data"
    examples = ROOT / "assets" / "examples"
    files = {
        "photo of a cat": examples / "chelsea.jpg",
        "photo of a cup of coffee": examples / "coffee.jpg",
        "photo of a rocket in the sky": examples / "rocket.jpg",
        "old photo, man with a camera": examples / "photographer.jpg",
        "page of a book": skimage / "page.png",
        "screenshot of a web page": ROOT / "assets" / "page.png",
        "silhouette of a horse": skimage / "horse.png",
        "chessboard pattern": skimage / "chessboard_GRAY.png",
        "the moon": skimage / "moon.png",
        "retina": skimage / "retina.jpg",
    }
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    opened = {name: Image.open(path) for name, path in files.items()}
    return {**opened, "noise": Image.fromarray(noise)}


if __name__ == "__main__":
    main()
