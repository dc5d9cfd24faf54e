"""Measure the cost of confidence: processor time of captioning with it relative to without.

    python scripts/measure_confidence_cost.py [--rounds 20]

Captions the example photos alternately with and without, in one process with one thread, and checks
that the captions are equal. Prints the median ratio and its quartiles.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from pathlib import Path

import torch

from captioner.data.images import open_image
from captioner.inference.captioner import Captioner
from captioner.inference.folder import SHIPPED_MODEL, load_model

EXAMPLES = Path(__file__).parents[1] / "assets" / "examples"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    stored = load_model(SHIPPED_MODEL)
    models = [
        Captioner(one, device="cpu", precision="fp32")
        for one in (stored, dataclasses.replace(stored, calibrator=None))
    ]
    photos = [models[0].prepare(open_image(path)) for path in sorted(EXAMPLES.glob("*.jpg"))]
    seconds: list[list[float]] = [[], []]
    for number in range(rounds + 1):
        texts = []
        for model, times in zip(models, seconds, strict=True):
            start = time.process_time()
            found = model.caption_batch(photos, model.options())
            if number:  # the first round warms up
                times.append(time.process_time() - start)
            texts.append([captions[0].text for captions in found])
        assert texts[0] == texts[1]
    ratios = [one / other for one, other in zip(*seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{middle:.3f} ({low:.3f} to {high:.3f}), {len(photos)} photos, {rounds} rounds")


if __name__ == "__main__":
    main()
