"""Benchmark a training step of the decoder against a textbook implementation.

    python scripts/benchmark_training.py [--sizes 196 2048 512 9490] [--photos 32] [--captions 5]
                                         [--compile] [--projection] [--project]
                                         [--sgrvinod FOLDER] [--att2in2 FOLDER]

The textbook step follows common tutorials: each caption has its own copy of the features, captions
are sorted by length, and each word projects all regions again, runs the LSTM on word and context
through one matrix, and scores the vocabulary, in float32. Our step shares the photo among its
captions. Both start from stored features (frozen encoder), end with an optimizer step and use the
same weights; the script checks that loss and gradients agree. Caption lengths are those of COCO
(3,431 captions of train2017), batched by length as in training.

``--sgrvinod`` and ``--att2in2`` take checkouts of two published programs (see peers.py) and compare
our step with theirs, on the same features and captions, instead of the textbook. ``--projection``
also measures our step with a projection of the features to the size of the layers, the shape of
Att2in2. Dropout is 0.5 in all of them.

The lower bound on the time is the larger of two: the matrix products of our step at the speed of
one large product, and its unavoidable memory traffic (features, weights, gradients, moments) at the
speed of one large copy. Both speeds are measured in the same run.

``--profile`` only prints the share of each of our steps in matrix products and in the additive
score (torch.profiler, median of three steps).

``--padding CAPTIONS.json ...`` only measures the share of an epoch's work that is padding, with
random batches and with batches of similar lengths.

``--project`` adds an estimate of the time of configs/coco_resnet101.yaml on this machine, from
these steps and from the speed of the encoder at 448 pixels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import torch
from measuring import Report, add_arguments, clock, in_child, measure, median, ratio
from peers import DROPOUT, att2in2_step, sgrvinod_step
from synthetic_captions import LENGTHS
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from captioner.data.batches import EncodedImage, EpochSampler, pad_captions
from captioner.data.coco import CaptionedImage, read_captions
from captioner.data.sources import PhotoSource, open_source
from captioner.hardware import (
    Precision,
    autocast,
    float32_precision,
    keep_freed_memory,
    peak_memory,
    pick_precision,
    product_type,
)
from captioner.model.build import build_decoder
from captioner.model.decoder import BahdanauDecoder
from captioner.model.encoder import build_encoder
from captioner.model.kernels import compile_scores
from captioner.model.kernels.additive import Switch
from captioner.model.kernels.packing import Layout
from captioner.model.losses import caption_losses
from captioner.model.preprocessing import Preprocessing
from captioner.options import DataConfig, DecoderConfig, TrainConfig, TrainingConfig
from captioner.text.tokenizer import tokenize
from captioner.text.vocabulary import END, PAD, START

PENALTY = 0.02
PEERS = {"sgrvinod": sgrvinod_step, "att2in2": att2in2_step}
BUCKET = 64
"""Batches that are sorted by caption length together, as ``data.bucket_batches``."""

COCO = {"photos": 113_287, "validation": 5_000, "epochs": 20, "image_size": 448}
"""Karpathy's split and configs/coco_resnet101.yaml."""


class Textbook(nn.Module):
    """The decoder of the tutorials with the weights of one of ours.

    Computes the same loss as ``caption_losses`` with a ``BahdanauDecoder``.
    """

    def __init__(self, decoder: BahdanauDecoder) -> None:
        super().__init__()
        self.decoder = decoder
        embed, size = decoder.embedding.embedding_dim, decoder.feature_dim
        self.lstm = nn.LSTMCell(embed + size, decoder.hidden_gates.in_features)
        with torch.no_grad():
            self.lstm.weight_ih[:, :embed] = decoder.word_gates.weight
            self.lstm.weight_ih[:, embed:] = decoder.context_gates.weight
            self.lstm.weight_hh.copy_(decoder.hidden_gates.weight)
            self.lstm.bias_ih.copy_(decoder.word_gates.bias)
            self.lstm.bias_hh.zero_()

    def trainable(self) -> list[nn.Parameter]:
        """Parameters for the optimizer; the LSTM has its own weights."""
        ours = ("word_gates", "context_gates", "hidden_gates")
        rest = [p for n, p in self.decoder.named_parameters() if not n.startswith(ours)]
        return [*self.lstm.parameters(), *rest]

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Summed loss of captions (n, T + 1) with features (n, L, D)."""
        decoder = self.decoder
        scorer = decoder.attention.scorer
        lengths = (tokens[:, 1:] != PAD).sum(dim=1)
        lengths, order = lengths.sort(descending=True)
        features, tokens = features[order], tokens[order]
        embedded = decoder.dropout(decoder.embedding(tokens[:, :-1]))
        mean = features.mean(dim=1)
        hidden = torch.tanh(decoder.init_hidden(mean))
        cell = torch.tanh(decoder.init_cell(mean))
        alphas = features.new_zeros(len(tokens), int(lengths[0]), features.shape[1])
        logits = features.new_zeros(len(tokens), int(lengths[0]), len(decoder.word_output.weight))
        for t in range(int(lengths[0])):
            n = int((lengths > t).sum())
            words, h = embedded[:n, t], hidden[:n]
            keys = scorer.key(features[:n])  # for every region and caption at every word
            scores = scorer.energy(torch.tanh(keys + scorer.query(h).unsqueeze(1))).squeeze(2)
            alpha = scores.softmax(dim=1)
            context = (features[:n] * alpha.unsqueeze(2)).sum(dim=1)
            context = torch.sigmoid(decoder.gate(h)) * context
            hidden, cell = self.lstm(torch.cat([words, context], dim=1), (h, cell[:n]))
            mixed = words + decoder.hidden_output(hidden) + decoder.context_output(context)
            logits[:n, t] = decoder.word_output(decoder.dropout(torch.tanh(mixed)))
            alphas[:n, t] = alpha
        targets = tokens[:, 1 : 1 + int(lengths[0])]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=PAD
        )
        wanted = lengths.unsqueeze(1) / features.shape[1]
        return loss + PENALTY * (wanted - alphas.sum(dim=1)).square().sum()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs=4, default=[196, 2048, 512, 9490],
                        help="regions, features, layers, words")  # fmt: skip
    parser.add_argument("--photos", type=int, default=32)
    parser.add_argument("--captions", type=int, default=5)
    add_arguments(parser, rounds=5)
    parser.add_argument("--precision", choices=get_args(Precision)[1:], nargs="+")
    parser.add_argument("--padding", nargs="+", metavar="CAPTIONS.json", help="padding only")
    parser.add_argument("--compile", action="store_true", help="measure training.compile too")
    parser.add_argument("--projection", action="store_true", help="measure projection_dim too")
    parser.add_argument("--sgrvinod", type=Path, metavar="FOLDER", help="checkout of its code")
    parser.add_argument("--att2in2", type=Path, metavar="FOLDER", help="checkout of its code")
    parser.add_argument("--profile", action="store_true", help="where the time goes only")
    parser.add_argument("--project", action="store_true", help="estimate the time for COCO")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # peak memory of one implementation
    options = parser.parse_args()
    keep_freed_memory()  # as the command line does
    if options.padding:
        padding_of_epochs(options.padding, options.photos)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precisions = options.precision or dict.fromkeys(["fp32", pick_precision("auto", device)])
    ours_named = [
        precision + projection + compiled
        for precision in precisions
        for projection in ["", " projected"][: 1 + options.projection]
        for compiled in ["", " compiled"][: 1 + options.compile]
    ]
    if options.profile:
        for name in ours_named:
            print(f"{name}: {profiled(make_job(name, options, device))}", flush=True)
        return
    peers = [name for name in PEERS if getattr(options, name)]
    bases = peers or ["textbook"]
    names = [*bases, *ours_named]
    if options.only:
        job = make_job(options.only, options, device)
        for _ in range(2):
            job()
        print(peak_memory(device) / 1e6)
        return
    print(
        f"{options.photos} photos x {options.captions} captions; L, D, A = E = N, V: "
        f"{', '.join(map(str, options.sizes))}; {device}, {torch.get_num_threads()} threads"
    )
    print(f"padding: {100 * padding(captions(options)):.1f}% of the decoder's steps")
    agreement(options, device)
    jobs = {name: make_job(name, options, device) for name in names}
    times = measure(jobs, options.rounds, clock=clock(options), wait=waiting(device))
    floors = {name: floor(name, options, device) for name in ours_named}
    count = options.photos * options.captions
    memory = {name: memory_of(name) for name in names}
    table = Report("training", "step", device.type)
    for name in names:
        seconds = median(times[name])
        figures = {
            "captions/s": count / seconds,
            **{f"times {base}": ratio(times, name, base) for base in bases},
            "peak memory (MB)": memory[name],
            "share of bound": floors[name] / seconds if name in floors else None,
        }
        table.add(name, figures, times[name])
    table.finish(options)
    if options.project:
        project(options, device, names[-1], median(times[names[-1]]), memory[names[-1]])


PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::addmv_"}
"""Operations that are matrix products."""


def profiled(job: Callable[[], None]) -> str:
    """Seconds of a step on the CPU, and the shares of products and of the additive score."""
    steps = []
    for number in range(5):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            job()
        total = products = scores = 0.0
        for event in profile.events():
            spent, outer = event.self_cpu_time_total, event
            while outer is not None and "_Scores" not in outer.name:
                outer = outer.cpu_parent
            total += spent
            scores += spent if outer is not None else 0
            products += spent if outer is None and event.name in PRODUCTS else 0
        if number >= 2:  # the first ones warm up
            steps.append((total / 1e6, products / total, scores / total))
    seconds, products, scores = sorted(steps)[1]
    return f"{seconds:.2f} s, products {products:.0%}, additive score {scores:.0%}"


def captions(options: argparse.Namespace) -> Tensor:
    """A batch of captions of random words with COCO's lengths, (B, R, T + 1)."""
    generator = torch.Generator().manual_seed(0)
    shape = (BUCKET * options.photos, options.captions)
    pool = torch.tensor([n for n, count in LENGTHS.items() for _ in range(count)])
    lengths = pool[torch.randint(len(pool), shape, generator=generator)]
    sampler = EpochSampler(lengths.tolist(), options.photos, seed=0, bucket=BUCKET)
    batches = [lengths[[index for _, index in batch]] for batch in sampler]
    lengths = sorted(batches, key=lambda batch: int(batch.sum()))[BUCKET // 2]  # the median
    shape = (options.photos, options.captions, int(lengths.max()) + 2)
    tokens = torch.randint(4, options.sizes[3], shape, generator=generator)
    positions = torch.arange(shape[2])
    tokens[..., 0] = START
    tokens[positions == lengths.unsqueeze(2) + 1] = END
    tokens[positions > lengths.unsqueeze(2) + 1] = PAD
    return tokens


def padding(*batches: Tensor) -> float:
    """Share of the decoder's steps that is padding."""
    words = steps = 0
    for batch in batches:
        real = batch[..., 1:] != PAD
        words += int(real.sum())
        steps += sum(Layout.of(real).sizes)
    return 1 - words / steps


def _tokens(words: int, max_words: int) -> list[int]:
    """Dummy tokens of a caption, with an end token unless it is truncated."""
    return [END] * (min(words, max_words) + (words <= max_words))


def padding_of_epochs(annotations: list[str], photos: int) -> None:
    """Print the share of padding in an epoch of these captions."""
    data = DataConfig()
    _, captions_of = read_captions(annotations)
    images = [
        EncodedImage(
            CaptionedImage(number, Path(), tuple(captions)),
            tuple(_tokens(len(tokenize(caption)), data.max_words) for caption in captions),
        )
        for number, captions in captions_of.items()
        if captions
    ]
    for bucket in (1, data.bucket_batches):
        config = TrainConfig(
            data=DataConfig(bucket_batches=bucket), training=TrainingConfig(batch_size=photos)
        )
        source = open_source(config, images, Preprocessing(), None)
        assert isinstance(source, PhotoSource)
        chosen = [
            [source.reader.sample(images[i], 0)[0] for _, i in batch]
            for batch in source.sampler
        ]  # fmt: skip
        share = padding(*map(pad_captions, chosen))
        print(f"bucket_batches {bucket}: {100 * share:.1f}% of the steps are padding")


def at_random(
    options: argparse.Namespace, device: torch.device, name: str = "", dropout: float = 0.0
) -> tuple[BahdanauDecoder, Tensor]:
    """A random decoder and random features of these sizes, for a step of this name."""
    torch.manual_seed(0)
    regions, size, layers, words = options.sizes
    config = DecoderConfig(
        embed_dim=layers,
        hidden_dim=layers,
        attention_dim=layers,
        projection_dim=layers if "projected" in name else 0,
        dropout=dropout,
    )
    decoder = build_decoder(config, size, words, regions)
    assert isinstance(decoder, BahdanauDecoder)
    features = torch.rand(options.photos, regions, size)
    # As CaptionModel.to_features converts stored features.
    return decoder.to(device), features.to(device, step_dtype(name))


def step_dtype(name: str) -> torch.dtype:
    """The type of the products of a step."""
    return product_type(name.partition(" ")[0]) or torch.float32


def make_job(name: str, options: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """One training step: forward, backward, clip, optimizer."""
    decoder, features = at_random(options, device, name, DROPOUT)
    tokens = captions(options)
    if name in PEERS:
        return PEERS[name](getattr(options, name), options.sizes, features, tokens)
    precision, *changes = name.split()
    if "compiled" in changes:
        compile_scores(decoder.embedding.weight)
    model = Textbook(decoder) if name == "textbook" else None
    learned = list(model.trainable() if model else decoder.parameters())
    # One item per caption, as from a loader of (photo, caption) pairs.
    apart = features.repeat_interleave(options.captions, 0) if model else features
    optimizer = torch.optim.AdamW(learned, lr=1e-4, fused=True)

    def step() -> None:
        Switch.compiled = "compiled" in changes
        if model is not None:
            loss = model(apart, tokens.flatten(0, 1).to(device))
        else:
            with autocast(precision, device):
                loss = ours(decoder, features, tokens)
        with float32_precision(precision, device):
            loss.backward()
        nn.utils.clip_grad_norm_(learned, 5.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ours(decoder: BahdanauDecoder, features: Tensor, tokens: Tensor) -> Tensor:
    """The loss as computed in training."""
    losses = caption_losses(decoder, decoder.memory(features), tokens)
    return losses.objective(TrainingConfig(attention_penalty=PENALTY))


def agreement(options: argparse.Namespace, device: torch.device) -> None:
    """Print the relative differences of loss and gradients of both in float32."""
    decoder, features = at_random(options, device)
    tokens = captions(options)
    textbook = Textbook(decoder)
    apart = features.repeat_interleave(options.captions, 0)
    theirs = textbook(apart, tokens.flatten(0, 1).to(device))
    shared = [
        decoder.attention.scorer.key.weight,
        decoder.word_output.weight,
        decoder.embedding.weight,
    ]
    wanted = torch.autograd.grad(theirs, [*shared, textbook.lstm.weight_hh])
    found = ours(decoder, features, tokens)
    given = torch.autograd.grad(found, [*shared, decoder.hidden_gates.weight])
    apart_by = max(float((a - b).norm() / a.norm()) for a, b in zip(wanted, given, strict=True))
    loss = abs(float((found / theirs).detach()) - 1)
    print(f"relative difference of loss: {loss:.1e}, of gradients: {apart_by:.1e}")


def project(
    options: argparse.Namespace, device: torch.device, name: str, step: float, memory: float
) -> None:
    """Print estimated hours and memory for the COCO recipe."""
    encoder = build_encoder("resnet101", "none").to(device, memory_format=torch.channels_last)
    size = COCO["image_size"]
    pixels = torch.randn(8, 3, size, size, device=device).to(memory_format=torch.channels_last)

    def encode() -> None:
        with torch.inference_mode(), autocast(name.split(maxsplit=1)[0], device):  # type: ignore[arg-type]
            encoder(pixels)

    seconds = median(measure({"encode": encode}, 5, wait=waiting(device))["encode"]) / len(pixels)
    photos = COCO["photos"] + COCO["validation"]
    row = options.sizes[0] * options.sizes[1] * 2
    steps = COCO["epochs"] * -(-COCO["photos"] // options.photos)
    hours = steps * step / 3600
    print(
        f"\nCOCO, {name}: encoder {1 / seconds:.1f} photos/s, {photos * seconds / 3600:.1f} h for "
        f"all {photos:,}; their features in 16 bits {photos * row / 1e9:.0f} GB\n"
        f"{steps:,} steps of {options.photos} photos in {COCO['epochs']} epochs: {hours:.1f} h and "
        f"{memory / 1e3:.1f} GB from features, "
        f"{hours + steps * options.photos * seconds / 3600:.0f} h from photos"
    )


def floor(name: str, options: argparse.Namespace, device: torch.device) -> float:
    """Lower bound of a step in seconds, from operations or from memory traffic."""
    decoder, features = at_random(options, device, name)
    dtype = step_dtype(name)
    with FlopCounterMode(display=False) as counter:
        ours(decoder, features.float(), captions(options)).backward()
    weights = sum(p.numel() for p in decoder.parameters())
    # Features are read in the forward pass and for the gradient of the keys; a weight is read
    # twice, its gradient written and read, and AdamW reads and writes it and two moments.
    moved = 2 * features.numel() * features.element_size() + weights * 4 * 10
    operations = counter.get_total_flops() / large_product(dtype, device)
    print(
        f"{name}: {counter.get_total_flops() / 1e9:.0f} GFLOP in products: {operations:.2f} s; "
        f"{moved / 1e9:.1f} GB: {moved / large_copy(device):.2f} s"
    )
    return max(operations, moved / large_copy(device))


def large_product(dtype: torch.dtype, device: torch.device) -> float:
    """Operations per second of one large matrix product, best of several runs."""
    left = torch.randn(2048, 2048, dtype=dtype, device=device)
    return 2 * 2048**3 / best(lambda: left @ left, device)


def large_copy(device: torch.device) -> float:
    """Bytes per second, read and written, of one large copy, best of several runs."""
    source = torch.zeros(64 << 20, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / best(lambda: target.copy_(source), device)


def best(job: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of several runs."""
    return min(measure({"job": job}, 12, wait=waiting(device))["job"])


def waiting(device: torch.device) -> Callable[[], object]:
    """A function that waits for a device."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def memory_of(name: str) -> float:
    """Peak memory of two steps in a separate process, including imports, in MB."""
    return float(in_child(__file__, *sys.argv[1:], "--only", name))


if __name__ == "__main__":
    main()
