"""Benchmark captioning relative to the bare encoder, its upper bound.

    python scripts/benchmarks/captioning.py FOLDER_OF_PHOTOS [--beam-size 3] [--precision bf16]

Each round encodes the same prepared batches, captions them, and captions the files they came from.
Peak memory is measured for the first quarter of the photos and for all, each in its own process.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import torch
from measuring import clock, in_child, measure, median, memory, parser, print_table, ratio

from captioner.data.folders import find_images
from captioner.data.images import open_image
from captioner.hardware import Precision, autocast, keep_freed_memory
from captioner.inference.captioner import load

BATCH = 32


def main() -> None:
    """Run the measurements and print them."""
    given = parser(__doc__, rounds=5)
    given.add_argument("folder", type=Path)
    given.add_argument("--model", default="shipped")
    given.add_argument("--beam-size", type=int)
    given.add_argument("--precision", choices=get_args(Precision), default="auto")
    given.add_argument("--photos", type=int, default=320)
    given.add_argument("--only-memory", action="store_true", help="in this process")
    options = given.parse_args()
    keep_freed_memory()  # as the command line does
    photos = find_images([options.folder])[: options.photos]
    model = load(options.model, precision=options.precision)
    if options.only_memory:
        for _ in model.stream(photos):
            pass
        print(memory())
        return
    changes = {"beam_size": options.beam_size} if options.beam_size else {}
    search = model.options(**changes)
    prepared = [model.prepare(open_image(photo)) for photo in photos]
    batches = [prepared[i : i + BATCH] for i in range(0, len(prepared), BATCH)]

    @torch.inference_mode()
    def encode() -> None:
        for batch in batches:
            pixels = torch.from_numpy(np.stack([p.pixels[0] for p in batch]))
            with autocast(model.precision, model.device):
                model.model.encode(pixels.to(model.device))

    def caption() -> None:
        for batch in batches:
            model.caption_batch(batch, search)

    def files() -> None:
        for _ in model.stream(photos, batch_size=BATCH, **changes):
            pass

    encoder = "bare encoder, prepared batches"
    jobs = {encoder: encode, "captions, prepared batches": caption, "captions from files": files}
    times = measure(jobs, options.rounds, clock=clock(options))
    print(f"{len(photos)} photos, batches of {BATCH}, {model.precision}, {search}\n")
    rows: dict[str, dict[str, float | str | None]] = {
        name: {
            "photos/s": len(photos) / median(seconds),
            "of the encoder": ratio(times, name, encoder),
        }
        for name, seconds in times.items()
    }
    shared = ["--precision", options.precision, "--model", options.model]
    for number in (max(1, len(photos) // 4), len(photos)):
        peak = in_child(__file__, options.folder, "--only-memory", "--photos", number, *shared)
        rows[f"{number} photos, a process of its own"] = {"peak memory (MB)": peak}
    print_table("job", rows)


if __name__ == "__main__":
    main()
