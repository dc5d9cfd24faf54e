"""Measure a training step of the decoder against the textbook's, with the same weights.

    python scripts/benchmark_training.py [--sizes 196 2048 512 9490] [--photos 32] [--captions 5]
                                         [--compile] [--project]

The textbook's step is the one that tutorials teach: every caption is an item with features of its
own, sorted by length; at every word all regions are projected anew, the score is taken whole, the
LSTM reads word and context through one matrix, and the vocabulary is scored; float32 throughout.
Ours shares the photo among its captions. Both start from stored features (frozen encoder), end with
an optimizer step, and are given the same weights: the script checks that loss and gradients agree.
Captions have the lengths of COCO's (3,431 captions of 2017's training photos), in a batch as
training makes it, of photos with captions of like lengths.

The floor is the longer of two times: the products that our step needs, at the speed of one large
product, and the bytes that it cannot but move (features, weights, their gradients and moments), at
the speed of one large copy; both speeds are measured in the same run.

``--padding CAPTIONS.json ...`` measures nothing but what share of an epoch's work is padding, with
batches drawn at random and with those of like lengths.

``--project`` adds what configs/coco_resnet101.yaml would take on this machine, from these steps and
from the encoder's speed at 448 pixels.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from captioner.config import DataConfig, DecoderConfig, TrainConfig, TrainingConfig
from captioner.data.batches import EncodedImage, EpochSampler, pad_captions, sample_captions
from captioner.data.coco import CaptionedImage, read_captions
from captioner.data.preprocessing import Preprocessing
from captioner.data.sources import PhotoSource, open_source
from captioner.hardware import autocast, keep_freed_memory, peak_memory, pick_precision
from captioner.models.decoder import BahdanauDecoder, build_decoder
from captioner.models.encoder import build_encoder
from captioner.models.losses import caption_losses, longest_first
from captioner.models.packing import PackedLayout
from captioner.tokenizer import tokenize
from captioner.vocabulary import END, PAD, START

# How many of COCO's captions have so many tokens, without start and end.
LENGTHS = {7: 29, 8: 563, 9: 754, 10: 721, 11: 518, 12: 367, 13: 185, 14: 106, 15: 60, 16: 41,
           17: 33, 18: 10, 19: 12, 20: 5, 21: 7, 22: 6, 23: 3, 24: 3, 25: 4, 26: 1}  # fmt: skip
PENALTY = 0.02
BUCKET = 64
"""Batches whose photos are sorted by their captions' lengths, as ``data.bucket_batches``."""

COCO = {"photos": 113_287, "validation": 5_000, "epochs": 20, "image_size": 448}
"""Karpathy's split and configs/coco_resnet101.yaml."""


class Textbook(nn.Module):
    """The decoder of the tutorials, over the weights of one of ours.

    The same function as ``BahdanauDecoder`` under ``caption_losses``, computed the plain way.
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

    def learned(self) -> list[nn.Parameter]:
        """What an optimizer of this model holds: the LSTM's weights are its own."""
        ours = ("word_gates", "context_gates", "hidden_gates")
        rest = [p for n, p in self.decoder.named_parameters() if not n.startswith(ours)]
        return [*self.lstm.parameters(), *rest]

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Loss of captions (n, T + 1), each with its own features (n, L, D); the sum."""
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
            keys = scorer.key(features[:n])  # every region of every caption, at every word
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=["fp32", "bf16"], nargs="+")
    parser.add_argument("--padding", nargs="+", metavar="CAPTIONS.json", help="and nothing else")
    parser.add_argument("--compile", action="store_true", help="measure training.compile too")
    parser.add_argument("--project", action="store_true", help="the whole of COCO")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # one formulation's peak memory
    options = parser.parse_args()
    keep_freed_memory()  # as the command line does
    if options.padding:
        padding_of_epochs(options.padding, options.photos)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [
        "textbook",
        *(options.precision or dict.fromkeys(["fp32", pick_precision("auto", device)])),
    ]
    if options.compile:
        names += [f"{name} compiled" for name in names[1:]]
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
    print(f"padding: {100 * padding(captions(options)):.1f}% of what the steps run on")
    agreement(options, device)
    jobs = {name: make_job(name, options, device) for name in names}
    times = measure(jobs, options.rounds, device)
    floors = {name: floor(name, options, device) for name in names[1:]}
    count = options.photos * options.captions
    print(
        "\n| step | captions/s | times the textbook | peak memory (MB) | share of it | of floor |"
    )
    print("|---|---|---|---|---|---|")
    memory = {name: memory_of(name) for name in names}
    for name in names:
        seconds = statistics.median(times[name])
        ratio = statistics.median(
            a / b for a, b in zip(times["textbook"], times[name], strict=True)
        )
        share = f"{100 * floors[name] / seconds:.0f}%" if name in floors else ""
        print(
            f"| {name} | {count / seconds:.0f} | {ratio:.1f} | {memory[name]:.0f} | "
            f"{memory[name] / memory['textbook']:.2f} | {share} |"
        )
    if options.project:
        project(options, device, names[-1], statistics.median(times[names[-1]]), memory[names[-1]])


def captions(options: argparse.Namespace) -> Tensor:
    """Captions of COCO's lengths and random words, (B, R, T + 1); a batch of a bucketed epoch."""
    generator = torch.Generator().manual_seed(0)
    shape = (BUCKET * options.photos, options.captions)
    pool = torch.tensor([n for n, count in LENGTHS.items() for _ in range(count)])
    lengths = pool[torch.randint(len(pool), shape, generator=generator)]
    sampler = EpochSampler(lengths.tolist(), options.photos, seed=0, bucket=BUCKET)
    batches = [lengths[[index for _, index in batch]] for batch in sampler]
    lengths = sorted(batches, key=lambda batch: int(batch.sum()))[BUCKET // 2]  # the median
    shape = (options.photos, options.captions, int(lengths.max()) + 2)
    tokens = torch.randint(4, options.sizes[3], shape, generator=generator)
    places = torch.arange(shape[2])
    tokens[..., 0] = START
    tokens[places == lengths.unsqueeze(2) + 1] = END
    tokens[places > lengths.unsqueeze(2) + 1] = PAD
    return tokens


def padding(*batches: Tensor) -> float:
    """Share of what the decoder's steps run on that is no word."""
    words = places = 0
    for batch in batches:
        tokens = longest_first(batch).sort_captions(batch)
        real = tokens[..., 1:] != PAD
        words += int(real.sum())
        places += sum(PackedLayout.of(tokens[..., :-1].masked_fill(~real, PAD)).sizes)
    return 1 - words / places


def _told(words: int, most: int) -> list[int]:
    """Tokens of a caption: its end follows unless it is cut."""
    return [END] * (min(words, most) + (words <= most))


def padding_of_epochs(annotations: list[str], photos: int) -> None:
    """Print it for an epoch of these captions, in batches of so many photos."""
    data = DataConfig()
    _, told = read_captions(annotations)
    spoken = [
        EncodedImage(
            CaptionedImage(number, Path(), tuple(captions)),
            tuple(_told(len(tokenize(caption)), data.max_words) for caption in captions),
        )
        for number, captions in told.items()
        if captions
    ]
    for bucket in (1, data.bucket_batches):
        config = TrainConfig(
            data=DataConfig(bucket_batches=bucket), training=TrainingConfig(batch_size=photos)
        )
        source = open_source(config, spoken, Preprocessing(), None)
        assert isinstance(source, PhotoSource)
        chosen = [
            [sample_captions(
                spoken[i], 0, 0, max_captions=data.max_captions, horizontal_flip=False
            )[0] for _, i in batch]
            for batch in source.sampler
        ]  # fmt: skip
        share = padding(*map(pad_captions, chosen))
        print(f"bucket_batches {bucket}: {100 * share:.1f}% of what the steps run on is padding")


def at_random(options: argparse.Namespace, device: torch.device) -> tuple[BahdanauDecoder, Tensor]:
    """A decoder and features of these sizes."""
    torch.manual_seed(0)
    regions, size, layers, words = options.sizes
    config = DecoderConfig(embed_dim=layers, hidden_dim=layers, attention_dim=layers, dropout=0.0)
    decoder = build_decoder(config, size, words, regions)
    assert isinstance(decoder, BahdanauDecoder)
    return decoder.to(device), torch.rand(options.photos, regions, size).to(device)


def make_job(name: str, options: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """One whole training step: forward, backward, clip, optimizer."""
    decoder, features = at_random(options, device)
    tokens = captions(options)
    precision, _, compiled = name.partition(" ")
    if compiled:
        decoder.compile_scores()
    model = Textbook(decoder) if name == "textbook" else None
    learned = list(model.learned() if model else decoder.parameters())
    # Every caption is an item, as a loader of (photo, caption) pairs gives it.
    apart = features.repeat_interleave(options.captions, 0) if model else features
    optimizer = torch.optim.AdamW(learned, lr=1e-4, fused=True)

    def step() -> None:
        if model is not None:
            loss = model(apart, tokens.flatten(0, 1).to(device))
        else:
            with autocast(precision, device):  # type: ignore[arg-type]
                loss = ours(decoder, features, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 5.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ours(decoder: BahdanauDecoder, features: Tensor, tokens: Tensor) -> Tensor:
    """The same loss as the textbook's, as training takes it."""
    losses = caption_losses(decoder, decoder.memory(features), tokens)
    return losses.objective(TrainingConfig(attention_penalty=PENALTY))


def agreement(options: argparse.Namespace, device: torch.device) -> None:
    """Loss and gradients of both, float32: a comparison of two different things says nothing."""
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
    """Hours and bytes of the COCO recipe."""
    encoder = build_encoder("resnet101", "none").to(device, memory_format=torch.channels_last)
    size = COCO["image_size"]
    pixels = torch.randn(8, 3, size, size, device=device).to(memory_format=torch.channels_last)

    def encode() -> None:
        with torch.inference_mode(), autocast(name.split(maxsplit=1)[0], device):  # type: ignore[arg-type]
            encoder(pixels)

    seconds = statistics.median(measure({"encode": encode}, 5, device)["encode"]) / len(pixels)
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


def measure(
    jobs: dict[str, Callable[[], None]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of every job in every round; the first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds + 1):
        for name, job in jobs.items():
            started = time.perf_counter()
            job()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - started)
    return {name: seconds[1:] for name, seconds in times.items()}


def floor(name: str, options: argparse.Namespace, device: torch.device) -> float:
    """Seconds that nobody can go below: operations at full speed, or bytes at full speed."""
    decoder, features = at_random(options, device)
    dtype = torch.bfloat16 if name.startswith("bf16") else torch.float32
    with FlopCounterMode(display=False) as counter:
        ours(decoder, features, captions(options)).backward()
    weights = sum(p.numel() for p in decoder.parameters())
    # Features are read forward and for the keys' weights backward at least; a weight is read twice,
    # its gradient written and read, AdamW reads and writes it and two moments.
    moved = 2 * features.numel() * features.element_size() + weights * 4 * 10
    operations = counter.get_total_flops() / large_product(dtype, device)
    print(
        f"{name}: {counter.get_total_flops() / 1e9:.0f} GFLOP in products: {operations:.2f} s; "
        f"{moved / 1e9:.1f} GB: {moved / large_copy(device):.2f} s"
    )
    return max(operations, moved / large_copy(device))


def large_product(dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of one large product, the best of several."""
    left = torch.randn(2048, 2048, dtype=dtype, device=device)
    return 2 * 2048**3 / best(lambda: left @ left, device)


def large_copy(device: torch.device) -> float:
    """Bytes a second, read and written, of one large copy, the best of several."""
    source = torch.zeros(64 << 20, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / best(lambda: target.copy_(source), device)


def best(job: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of several runs."""
    return min(measure({"job": job}, 12, device)["job"])  # type: ignore[dict-item]


def memory_of(name: str) -> float:
    """Peak memory of two steps in a process of their own, imports included, MB."""
    command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main()
