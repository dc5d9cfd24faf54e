"""Compare attention over text with a vector of fixed length: numbers in words to digits.

    python scripts/studies/text_attention.py --out docs [--steps 2500]

    six thousand two hundred eight  ->  6 2 0 8

Examples are generated, so their number and length are unlimited. Two models train on the same
examples in the same order and differ in one setting: one attends over the source, the other gets
a single vector for the source at every step. Test numbers are never trained on. Writes to --out:
text_accuracy.png (accuracy by input length), text_alignment.png (attention of the first model for
each digit) and text_attention.json (results and mistakes). Trained models are kept in --work and
reused.
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from tqdm import tqdm

from captioner.files import atomic_write
from captioner.inference.stepper import DecoderStepper
from captioner.model.attention import Memory
from captioner.model.build import SCORERS, WITHOUT_SCORER, build_decoder
from captioner.model.losses import Losses, caption_losses
from captioner.options import DecoderConfig, SearchOptions, TrainingConfig
from captioner.search.search import Hypothesis, search
from captioner.text.vocabulary import END, PAD, START, Vocabulary
from captioner.training.optim import lr_factor

# fmt: off
ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SCALES = [
    "thousand", "million", "billion", "trillion", "quadrillion", "quintillion", "sextillion",
]
# fmt: on
MOST_DIGITS = 3 * (len(SCALES) + 1)
MOST_WORDS = 4 * (len(SCALES) + 1) + len(SCALES)  # e.g. three hundred forty five, and a scale

SOURCE = Vocabulary([*ONES, *TENS, "hundred", *SCALES])
TARGET = Vocabulary(list("0123456789"))


def spell(number: int) -> list[str]:
    """Spell a number in words, e.g. ``six thousand two hundred eight``.

    Args:
        number: From 0 to 10 ** MOST_DIGITS - 1.
    """
    if number == 0:
        return ["zero"]
    words: list[str] = []
    for scale in reversed(range(len(SCALES) + 1)):
        group = number // 1000**scale % 1000
        if group:
            words += _group(group) + ([SCALES[scale - 1]] if scale else [])
    return words


def _group(number: int) -> list[str]:
    """1 to 999 in words."""
    words = [ONES[number // 100], "hundred"] if number >= 100 else []
    rest = number % 100
    if rest >= 20:
        words.append(TENS[rest // 10 - 2])
        rest %= 10
    return words + ([ONES[rest]] if rest else [])


def is_for_test(number: int) -> bool:
    """Whether a number is in the test set: one in ten, chosen by checksum."""
    return zlib.crc32(str(number).encode()) % 10 == 0


def random_number(generator: random.Random, *, test: bool) -> int:
    """Sample a number of 1 to MOST_DIGITS digits, uniformly over lengths."""
    while True:
        digits = generator.randint(1, MOST_DIGITS)
        number = generator.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
        if is_for_test(number) == test:
            return number


def batch_of(numbers: list[int]) -> tuple[Tensor, Tensor]:
    """Source (B, L) and target (B, 1, T + 1) tokens."""
    sources = [SOURCE.encode(spell(number)) for number in numbers]
    targets = [[START, *TARGET.encode(str(number)), END] for number in numbers]
    return _padded(sources), _padded(targets).unsqueeze(1)


def _padded(rows: list[list[int]]) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=PAD)


class TextModel(nn.Module):
    """A bidirectional LSTM and one of our decoders, whose regions are words.

        a_i = [forward h_i; backward h_i],   summary = [forward h_L; backward h_1]

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), section 3.2. Deviation: LSTMs instead of GRUs.
    """

    def __init__(self, config: DecoderConfig, embed_dim: int = 64, hidden_dim: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(SOURCE), embed_dim)
        self.lstm = nn.LSTM(embed_dim, hidden_dim, batch_first=True, bidirectional=True)
        self.decoder = build_decoder(config, 2 * hidden_dim, len(TARGET), MOST_WORDS)

    def memory(self, source: Tensor) -> Memory:
        """Encode sources, words and then padding, (B, L), for the decoder."""
        mask = source != PAD
        packed = pack_padded_sequence(
            self.embedding(source), mask.sum(dim=1).cpu(), batch_first=True, enforce_sorted=False
        )
        states, (last, _) = self.lstm(packed)
        features, _ = pad_packed_sequence(states, batch_first=True, total_length=source.shape[1])
        summary = torch.cat([last[0], last[1]], dim=-1).unsqueeze(1)
        return self.decoder.memory(features, mask, summary)

    def forward(self, source: Tensor, target: Tensor) -> Losses:
        """Losses of teacher-forced targets (B, R, T + 1), see ``caption_losses``."""
        return caption_losses(self.decoder, self.memory(source), target)


def build(attention: str, seed: int = 0) -> TextModel:
    """Build a model; models differ only in ``attention``."""
    torch.manual_seed(seed)
    config = DecoderConfig(
        embed_dim=64,
        hidden_dim=128,  # the size of the annotations, so that dot needs no projection
        attention_dim=64,
        dropout=0.1,
        attention=attention,
    )
    return TextModel(config)


def train(attention: str, steps: int, batch_size: int = 64) -> TextModel:
    """Train a model on random numbers."""
    model = build(attention).train()
    config = TrainingConfig(lr=2e-3, attention_penalty=0.0, clip_norm=1.0, warmup_steps=100)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=config.weight_decay)
    generator = random.Random(0)
    for step in tqdm(range(steps), desc=attention, unit="step", dynamic_ncols=True):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * lr_factor(step, config.warmup_steps, steps)
        numbers = [random_number(generator, test=False) for _ in range(batch_size)]
        losses = model(*batch_of(numbers))
        (losses.objective(config) / losses.words).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


@torch.inference_mode()
def read(model: TextModel, numbers: list[int]) -> list[Hypothesis]:
    """Decode the words of the numbers by greedy search."""
    model.eval()
    options = SearchOptions(beam_size=1, max_length=MOST_DIGITS + 2)
    found = []
    for at in range(0, len(numbers), 100):
        source, _ = batch_of(numbers[at : at + 100])
        stepper = DecoderStepper(model.decoder, model.memory(source))
        found += [best[0] for best in search(stepper, options)]
    return found


def test_numbers(count: int) -> list[int]:
    """Sample distinct test numbers."""
    generator = random.Random(1)
    numbers: dict[int, None] = {}
    while len(numbers) < count:
        numbers[random_number(generator, test=True)] = None
    return list(numbers)


def accuracy_by_length(model: TextModel, numbers: list[int], width: int = 5) -> dict[str, Any]:
    """Fraction of numbers decoded correctly, in bins of the number of source words."""
    right: dict[int, list[bool]] = defaultdict(list)
    mistakes = []
    for number, found in zip(numbers, read(model, numbers), strict=True):
        output = "".join(TARGET.decode(found.tokens))
        right[(len(spell(number)) - 1) // width].append(output == str(number))
        if output != str(number):
            mistakes.append([str(number), output])
    bins = sorted(right)
    return {
        "words": [f"{width * b + 1}-{width * (b + 1)}" for b in bins],
        "numbers": [len(right[b]) for b in bins],
        "accuracy": [sum(right[b]) / len(right[b]) for b in bins],
        "overall": sum(map(sum, right.values())) / len(numbers),
        "mistakes": mistakes[:10],
    }


def draw(results: dict[str, dict[str, Any]], model: TextModel, number: int, out: Path) -> None:
    """Plot accuracy by input length, and a model's attention of each digit over the words."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, result in results.items():
        axes.plot(result["words"], [100 * a for a in result["accuracy"]], "o-", label=name)
    axes.set(xlabel="input length, words", ylabel="numbers decoded correctly, %", ylim=(-3, 103))
    axes.grid(alpha=0.3)
    axes.legend(title="decoder.attention")
    figure.savefig(out / "text_accuracy.png", dpi=110)
    (found,) = read(model, [number])
    words, digits = spell(number), TARGET.decode(found.tokens)
    size = 0.34 * len(words) + 1.2, 0.28 * len(digits) + 1.6
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    image = axes.imshow(found.alphas, cmap="gray", vmin=0, vmax=1, aspect="auto")  # (T, L)
    axes.set_xticks(range(len(words)), words, rotation=60, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(digits)), digits)
    axes.xaxis.tick_top()
    axes.set_ylabel("output digit")
    figure.colorbar(image, label="alpha", fraction=0.03, pad=0.01)
    figure.savefig(out / "text_alignment.png", dpi=110)
    plt.close("all")


def main() -> None:
    """Train the missing models, then evaluate and plot them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--work", type=Path, default="runs/text", help="folder for the models")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--tests", type=int, default=3000, help="number of test examples")
    parser.add_argument(
        "--attention",
        nargs="+",
        default=["additive", "fixed"],
        choices=[*SCORERS, *WITHOUT_SCORER],
        help="models; the alignment of the first is plotted",
    )
    options = parser.parse_args()
    for folder in (options.out, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    numbers = test_numbers(options.tests)
    models = {}
    for attention in options.attention:
        kept = options.work / f"{attention}_{options.steps}.safetensors"
        if kept.exists():
            models[attention] = build(attention)
            models[attention].load_state_dict(load_file(kept))
        else:
            models[attention] = train(attention, options.steps)
            atomic_write(kept, save(models[attention].state_dict()))
    results = {name: accuracy_by_length(model, numbers) for name, model in models.items()}
    for name, result in results.items():
        print(f"{name}: {100 * result['overall']:.1f}% correct")
    atomic_write(options.out / "text_attention.json", json.dumps(results, indent=1) + "\n")
    example = min(numbers, key=lambda number: abs(len(spell(number)) - 16))
    draw(results, models[options.attention[0]], example, options.out)


if __name__ == "__main__":
    main()
