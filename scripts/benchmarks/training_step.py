"""Benchmark a training step of the decoder, alone or compared with two published programs.

    python scripts/benchmarks/training_step.py [--sizes 196 2048 512 9490] [--photos 32]
        [--captions 5] [--projection] [--sgrvinod FOLDER] [--att2in2 FOLDER]

A step starts from stored features, because the encoder is frozen, and ends with an optimizer step.
The captions consist of random words. Their lengths are taken from 3,431 captions in COCO train2017.
Batches group captions by length, as in training.

To measure the published programs too, pass checkouts of their code with ``--sgrvinod`` and
``--att2in2`` (see peers.py). All programs get the same features and captions, and use a dropout of
0.5. With ``--projection``, the step of captioner is also measured on features that are projected to
the size of the layers, as in Att2in2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import get_args

import torch
from measuring import Rows, clock, in_child, measure, parser, print_table, ratios
from peers import DROPOUT, att2in2_step, sgrvinod_step
from scale import LENGTHS
from torch import Tensor, nn

from captioner.data.sources import epoch_batches
from captioner.hardware import Precision, autocast, float32_precision, pick_precision, product_type
from captioner.memory import keep_freed_memory, peak_memory
from captioner.model.build import build_decoder
from captioner.model.losses import caption_losses
from captioner.options import DecoderConfig, TrainingConfig
from captioner.text.vocabulary import END, PAD, START

PENALTY = 0.02
"""Weight of the attention penalty in captioner's loss."""
PEERS = {"sgrvinod": sgrvinod_step, "att2in2": att2in2_step}
"""Functions that prepare a training step of a published program, by name."""
BUCKET = 64
"""Number of batches within which captions are sorted by length (see ``data.bucket_batches``)."""


def main() -> None:
    """Measure the steps and print a table."""
    given = parser(__doc__)
    given.add_argument(
        "--sizes",
        type=int,
        nargs=4,
        default=[196, 2048, 512, 9490],
        help="number of regions, size of features, size of layers, number of words",
    )
    given.add_argument("--photos", type=int, default=32, help="number of photos per batch")
    given.add_argument("--captions", type=int, default=5, help="number of captions per photo")
    given.add_argument(
        "--precision",
        choices=get_args(Precision)[1:],
        nargs="+",
        help="precisions of captioner (default: fp32, and the precision that captioner chooses)",
    )
    given.add_argument(
        "--projection", action="store_true", help="also measure captioner with projected features"
    )
    given.add_argument(
        "--sgrvinod", type=Path, metavar="FOLDER", help="checkout of sgrvinod's tutorial"
    )
    given.add_argument(
        "--att2in2", type=Path, metavar="FOLDER", help="checkout of ImageCaptioning.pytorch"
    )
    given.add_argument("--only", help="print only the peak memory of this step")
    options = given.parse_args()
    keep_freed_memory()  # as the command line does
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.only:
        job = make_job(options.only, options, device)
        for _ in range(2):
            job()
        print(peak_memory(device) / 1e6)
        return
    precisions = options.precision or dict.fromkeys(["fp32", pick_precision("auto", device)])
    ours_named = [
        precision + projection
        for precision in precisions
        for projection in ["", " projected"][: 1 + options.projection]
    ]
    bases = [name for name in PEERS if getattr(options, name)]
    print(
        f"{options.photos} photos x {options.captions} captions; L, D, A = E = N, V: "
        f"{', '.join(map(str, options.sizes))}; {device}, {torch.get_num_threads()} threads"
    )
    jobs = {name: make_job(name, options, device) for name in (*bases, *ours_named)}
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = measure(jobs, options.rounds, clock=clock(options), wait=wait)
    rows: Rows = {
        name: {
            "captions/s": options.photos * options.captions / median(seconds),
            **{f"times {base}": median(ratios(times, name, base)) for base in bases},
            "peak memory (MB)": in_child(__file__, *sys.argv[1:], "--only", name),
        }
        for name, seconds in times.items()
    }
    print_table("step", rows)


def captions(options: argparse.Namespace) -> Tensor:
    """Return a batch of captions, (B, R, T + 1), with random words and COCO's caption lengths.

    Of `BUCKET` batches that are grouped by length, the batch with the median number of words is
    returned.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (BUCKET * options.photos, options.captions)
    pool = torch.tensor([n for n, count in LENGTHS.items() for _ in range(count)])
    lengths = pool[torch.randint(len(pool), shape, generator=generator)]
    order = epoch_batches(lengths.tolist(), options.photos, seed=0, epoch=0, bucket=BUCKET)
    batches = [lengths[batch] for batch in order]
    lengths = sorted(batches, key=lambda batch: int(batch.sum()))[BUCKET // 2]  # the median
    shape = (options.photos, options.captions, int(lengths.max()) + 2)
    tokens = torch.randint(4, options.sizes[3], shape, generator=generator)
    positions = torch.arange(shape[2])
    tokens[..., 0] = START
    tokens[positions == lengths.unsqueeze(2) + 1] = END
    tokens[positions > lengths.unsqueeze(2) + 1] = PAD
    return tokens


def make_job(name: str, options: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """Return a function that runs a whole training step of one program.

    Args:
        name: Name of a peer, or a precision of captioner such as ``fp32`` or ``fp32 projected``.
        options: The arguments of the script.
        device: The device that runs the step.
    """
    torch.manual_seed(0)
    regions, size, layers, words = options.sizes
    precision = name.partition(" ")[0]
    # The same conversion of stored features as in CaptionModel.to_features.
    features = torch.rand(options.photos, regions, size)
    features = features.to(device, product_type(precision) or torch.float32)
    tokens = captions(options)
    if name in PEERS:
        return PEERS[name](getattr(options, name), options.sizes, features, tokens)
    config = DecoderConfig(
        embed_dim=layers,
        hidden_dim=layers,
        attention_dim=layers,
        projection_dim=layers if "projected" in name else 0,
        dropout=DROPOUT,
    )
    decoder = build_decoder(config, size, words, regions).to(device)
    learned = list(decoder.parameters())
    optimizer = torch.optim.AdamW(learned, lr=1e-4, fused=True)

    def step() -> None:
        """Run one step of captioner, from stored features to updated weights."""
        with autocast(precision, device):
            losses = caption_losses(decoder, decoder.memory(features), tokens)
            loss = losses.total(TrainingConfig(attention_penalty=PENALTY))
        with float32_precision(precision, device):
            loss.backward()
        nn.utils.clip_grad_norm_(learned, 5.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    main()
