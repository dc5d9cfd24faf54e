"""Measure the cost of confidence: processor time of captioning with it relative to without.

    python scripts/benchmarks/confidence_cost.py [--rounds 20]

Captions the example photos alternately with and without, in one process with one thread, and checks
that the captions are equal. Prints the median ratio and its quartiles.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from measuring import measure, parser, ratios

from captioner.data.images import open_image
from captioner.inference.captioner import Captioner
from captioner.inference.folder import SHIPPED_MODEL, load_model

EXAMPLES = Path(__file__).parents[2] / "assets" / "examples"


def main() -> None:
    """Measure and print."""
    rounds = parser(__doc__, rounds=20).parse_args().rounds
    torch.set_num_threads(1)
    stored = load_model(SHIPPED_MODEL)
    without = dataclasses.replace(stored, calibrator=None)
    models = {
        name: Captioner(one, device="cpu", precision="fp32")
        for name, one in (("with", stored), ("without", without))
    }
    photos = [models["with"].prepare(open_image(path)) for path in sorted(EXAMPLES.glob("*.jpg"))]
    texts: dict[str, list[str]] = {}

    def caption(name: str) -> None:
        found = models[name].caption_batch(photos, models[name].options())
        texts[name] = [captions[0].text for captions in found]

    jobs = {name: partial(caption, name) for name in models}
    times = measure(jobs, rounds, clock=time.process_time)
    assert texts["with"] == texts["without"]
    low, middle, high = statistics.quantiles(ratios(times, "without", "with"), n=4)
    print(f"{middle:.3f} ({low:.3f} to {high:.3f}), {len(photos)} photos, {rounds} rounds")


if __name__ == "__main__":
    main()
