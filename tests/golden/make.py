"""Write the golden files, and recompute what they hold for test_golden.py.

    python tests/golden/make.py

They are what the shipped model finds in the example photos, in float32 on the CPU, and what the
commands write about them and ``inputs/``. Run this only if results are meant to change.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in the tests; before torch is imported

import captioner
from captioner.cli.main import main

HERE = Path(__file__).parent
FORMATS = HERE / "formats"
PHOTOS = sorted((HERE.parents[1] / "assets" / "examples").glob("*.jpg"))
FP32 = ("--device", "cpu", "--precision", "fp32")
SEARCHES: dict[str, dict[str, Any]] = {
    "default": {},
    "flickr8k": {"style": "flickr8k"},
    "greedy": {"beam_size": 1},
    "three": {"num_captions": 3},
    "groups": {"beam_size": 6, "beam_groups": 3, "num_captions": 3},
    "sampling": {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 7, "num_captions": 2},
    "rare_words": {"rare_words": 0.2},
    "candidates": {"beam_size": 10, "candidates": 10},
    "samples": {"temperature": 0.85, "candidates": 16, "rare_words": 0.4},
    "forced": {"forced_words": ["dog", "grass"]},
    "banned": {"banned_words": ["man", "a"]},
    "min_length": {"min_length": 14, "block_ngrams": 2},
    "max_length": {"max_length": 5, "guard_endings": True, "block_repeats": False},
}
METHODS = ("attention", "attention_gate", "gradient_input", "grad_cam", "occlusion")
GIVEN = "a cat sleeps on the floor"
"""A caption to explain."""
COMMANDS = {  # what a command prints, or the file of this name if it writes one
    "info.txt": "info",
    "caption.txt": "caption chelsea.jpg photographer.jpg --min-confidence 0.4",
    "caption.json": "caption chelsea.jpg photographer.jpg --num-captions 2 -o caption.json",
    "caption.jsonl": "caption chelsea.jpg photographer.jpg --num-captions 2 -o caption.jsonl",
    "caption.csv": "caption chelsea.jpg photographer.jpg --min-confidence 0.4 -o caption.csv",
    "coco.json": "caption . --annotations references.json --format coco -o coco.json",
    "rocket.txt": "caption rocket.jpg --sidecar txt",
    "rocket.xmp": "caption rocket.jpg --sidecar xmp",
    "embedded.sha256": "caption rocket.jpg --embed .. --style flickr8k",
    "words.txt": "attend chelsea.jpg -o maps.npz --words",
    "results.json": "evaluate --annotations many.json --results these.json --compare those.json "
    "--frequencies references.json --train-annotations references.json -o results.json",
    "images.json": "evaluate --annotations references.json --images . --instances instances.json "
    "-o images.json",
    "faithfulness.json": "evaluate --annotations references.json --images . --faithfulness "
    "--level grid --max-words 2 --steps 3 -o faithfulness.json",
    "calibrate.json": "calibrate --model model --annotations crops.json --images crops "
    "-o calibrate.json",
}


def load() -> captioner.Captioner:
    return captioner.load(device="cpu", precision="fp32")


def search(model: captioner.Captioner, name: str) -> dict[str, list[captioner.Caption]]:
    """Captions of the photos, which are one batch."""
    found = model.captions(PHOTOS, **SEARCHES[name])
    return {path.stem: some for path, some in zip(PHOTOS, found, strict=True)}


def explain(model: captioner.Captioner, method: str) -> captioner.Caption:
    return model.explain(PHOTOS[1], GIVEN, method=method)


def describe(caption: captioner.Caption) -> dict[str, Any]:
    """All of a caption but its maps."""
    return {
        "text": caption.text,
        "words": list(caption.words),
        "log_prob": round(caption.log_prob, 6),
        "log_probs": np.round(caption.log_probs.astype(float), 6).tolist(),
        "gates": np.round(caption.gates.astype(float), 6).tolist(),
        "confidence": None if caption.confidence is None else round(caption.confidence, 6),
    }


def command(name: str, folder: Path) -> str:
    """What a command writes in a new folder, which gets the photos and inputs."""
    folder = Path(shutil.copytree(HERE / "inputs", folder / "photos"))
    for path in PHOTOS:
        shutil.copy(path, folder)
    if name == "calibrate.json":
        _prepare_calibration(folder)
    words = [*COMMANDS[name].split(), *[GIVEN] * (name == "words.txt")]
    printed = run(folder, *words, *FP32 * (name not in ("info.txt", "results.json")))
    if name == "embedded.sha256":
        return hashlib.sha256((folder.parent / "rocket.jpg").read_bytes()).hexdigest() + "\n"
    content = (folder / name).read_bytes().decode() if (folder / name).exists() else printed
    if name == "info.txt":  # without the place of the model
        content = re.sub(r"^folder .*\n", "", content)
    return re.sub(r"(captioner|pycocoevalcap) \d[\w.]*", r"\1", content)  # versions


def _prepare_calibration(folder: Path) -> None:
    """120 parts of the photos, and the model without its confidence."""
    (folder / "crops").mkdir()
    for path in PHOTOS:
        with Image.open(path) as image:
            for n in range(20):
                left, top = image.width * (n % 5) // 20, image.height * (n // 5) // 20
                box = (left, top, left + image.width * 3 // 4, top + image.height * 3 // 4)
                image.crop(box).resize((160, 160)).save(folder / "crops" / f"{path.stem}{n}.png")
    shipped = Path(captioner.__file__).parent / "pretrained"
    shutil.copytree(shipped, folder / "model", ignore=shutil.ignore_patterns("confidence*"))


def run(folder: Path, *words: str) -> str:
    """What a command prints; in this process, which is faster."""
    before, printed = Path.cwd(), io.StringIO()
    try:
        os.chdir(folder)
        with contextlib.redirect_stdout(printed):
            code = main([*words])
    finally:
        os.chdir(before)
    if code:
        raise RuntimeError(f"captioner {' '.join(words)} ended with {code}")
    return printed.getvalue()


def served() -> str:
    """What ``captioner serve`` answers to a form, JSON, the bytes of a photo and batches."""
    cat, man = (PHOTOS[n].read_bytes() for n in (1, 4))
    options = {"num_captions": "2", "attention": "true", "min_confidence": "0.4"}
    words = {"words": GIVEN, "attention": "true", "method": "grad_cam"}
    coded = {"image": base64.b64encode(man).decode(), "style": "flickr8k", "alternatives": 2}
    batch = [("images", (f"{n}.jpg", x)) for n, x in enumerate([man, b"none", cat])]
    lines = {"Accept": "application/x-ndjson"}
    parts = [sys.executable, "-m", "captioner", "serve", "--port", "0", *FP32]
    with subprocess.Popen(parts, stderr=subprocess.PIPE, text=True) as process:
        said = (re.search(r"serving on (http\S+)", line) for line in process.stderr)
        address = next(found[1] for found in said if found)
        with httpx.Client(base_url=f"{address}/v1", timeout=120, trust_env=False) as client:
            answers = [
                client.post("/captions", files={"image": cat}, data=options),
                client.post("/captions", json=coded),
                client.post("/captions", content=cat, params=words),
                client.post("/batch", files=batch),
                client.post("/batch", files=batch, headers=lines),
            ]
        process.terminate()
        process.communicate()
    return "".join(f"{answer.status_code} {answer.text}\n" for answer in answers)


def write_all() -> None:
    model = load()
    found = {name: search(model, name) for name in SEARCHES}
    found["explained"] = {method: [explain(model, method)] for method in METHODS}
    captions = {
        name: {key: [describe(one) for one in some] for key, some in group.items()}
        for name, group in found.items()
    }
    (HERE / "captions.json").write_text(json.dumps(captions, indent=0) + "\n")
    maps = {
        f"{name}/{key}": np.rint(4096 * some[-1].alphas).astype(np.uint16)
        for name, group in found.items()
        for key, some in group.items()
    }
    np.savez_compressed(HERE / "alphas.npz", **maps)
    FORMATS.mkdir(exist_ok=True)
    for name in COMMANDS:
        with tempfile.TemporaryDirectory() as folder:
            (FORMATS / name).write_bytes(command(name, Path(folder)).encode())
    (FORMATS / "served.txt").write_text(served())


if __name__ == "__main__":
    write_all()
