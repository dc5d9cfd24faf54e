"""Compare attention over words with a single summary vector, on translating numbers to digits.

    python scripts/studies/text_attention.py --out docs [--steps 2500]

    six thousand two hundred eight  ->  6 2 0 8

Two models are trained on the same generated examples, and differ in one setting. The first model
attends to the source words. The second model uses a single vector for the whole source, the same at
every step. Numbers for testing are not used for training.

The script prints the accuracy by input length, and writes two figures to --out. text_accuracy.png
shows the accuracy, and text_alignment.png shows the attention of the first model for each digit.

Notation: B numbers, L source words of the longest number, T steps (its digits and the end token).
"""

from __future__ import annotations

import argparse
import random
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from tqdm import tqdm

from captioner.inference.torch_engine import DecoderStepper
from captioner.model.attention import Memory
from captioner.model.build import build_decoder
from captioner.model.losses import caption_losses
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
"""Maximum number of digits of a number. Each scale adds three digits."""
MOST_WORDS = 4 * (len(SCALES) + 1) + len(SCALES)
"""Maximum number of words of a number. Three digits need at most four words ("three hundred forty
five") and the word for their scale ("thousand")."""
BATCH = 64
BIN = 5
"""Range of input lengths, in words, that a point of the figure covers."""
TESTS = 3000
"""Number of test examples."""
SOURCE = Vocabulary([*ONES, *TENS, "hundred", *SCALES])
TARGET = Vocabulary(list("0123456789"))


def spell(number: int) -> list[str]:
    """Spell a number below 10 ** MOST_DIGITS in words."""
    words: list[str] = []
    for scale in reversed(range(len(SCALES) + 1)):
        group = number // 1000**scale % 1000
        hundreds, rest = divmod(group, 100)
        words += [ONES[hundreds], "hundred"] if hundreds else []
        if rest >= 20:
            words.append(TENS[rest // 10 - 2])
            rest %= 10
        words += [ONES[rest]] if rest else []
        words += [SCALES[scale - 1]] if group and scale else []
    return words or ["zero"]


def random_number(generator: random.Random, *, test: bool) -> int:
    """Sample a number with 1 to MOST_DIGITS digits. All lengths are equally likely.

    With ``test``, sample from the tenth of all numbers that is used only for tests.
    """
    while True:
        digits = generator.randint(1, MOST_DIGITS)
        number = generator.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
        if (zlib.crc32(str(number).encode()) % 10 == 0) == test:
            return number


def batch_of(numbers: list[int]) -> tuple[Tensor, Tensor]:
    """Return numbers as tokens.

    Returns:
        The words of each number, padded, (B, L).
        The start token, the digits and the end token of each number, padded, (B, 1, T + 1). The
        second dimension is the number of captions per photo, here always 1.
    """
    sources = [torch.tensor(SOURCE.encode(spell(number))) for number in numbers]
    targets = [torch.tensor([START, *TARGET.encode(str(number)), END]) for number in numbers]
    padded = [pad_sequence(rows, True, PAD) for rows in (sources, targets)]
    return padded[0], padded[1].unsqueeze(1)


class TextModel(nn.Module):
    """A translation model: a bidirectional LSTM and captioner's decoder, with words as regions.

        a_i = [forward h_i; backward h_i],   summary = [forward h_L; backward h_1]

    The features a_i of source word i join the states h_i of both directions of the LSTM. The
    summary joins the last state of each direction. It takes the place of a photo's mean feature.

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), section 3.2. Deviation: LSTMs instead of GRUs.
    """

    def __init__(self, attention: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = DecoderConfig(
            embed_dim=64, hidden_dim=128, attention_dim=64, dropout=0.1, attention=attention
        )
        self.embedding = nn.Embedding(len(SOURCE), 64)
        self.lstm = nn.LSTM(64, 64, batch_first=True, bidirectional=True)
        self.decoder = build_decoder(config, 2 * 64, len(TARGET), MOST_WORDS)

    def memory(self, source: Tensor) -> Memory:
        """Encode the source tokens, (B, L), and return the decoder's inputs for them."""
        mask = source != PAD
        packed = pack_padded_sequence(
            self.embedding(source), mask.sum(dim=1).cpu(), batch_first=True, enforce_sorted=False
        )
        states, (last, _) = self.lstm(packed)
        features, _ = pad_packed_sequence(states, batch_first=True, total_length=source.shape[1])
        summary = torch.cat([last[0], last[1]], dim=-1).unsqueeze(1)
        return self.decoder.memory(features, mask, summary)


def train(attention: str, steps: int) -> TextModel:
    """Train a model on random numbers, and return it.

    ``attention`` is a value of ``decoder.attention``. ``fixed`` is the single summary vector.
    """
    model = TextModel(attention).train()
    config = TrainingConfig(lr=2e-3, attention_penalty=0.0, clip_norm=1.0, warmup_steps=100)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=config.weight_decay)
    generator = random.Random(0)
    for step in tqdm(range(steps), desc=attention, unit="step", dynamic_ncols=True):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * lr_factor(step, config.warmup_steps, steps)
        numbers = [random_number(generator, test=False) for _ in range(BATCH)]
        source, target = batch_of(numbers)
        losses = caption_losses(model.decoder, model.memory(source), target)
        (losses.total(config) / (target[..., 1:] != PAD).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model.eval()


@torch.inference_mode()
def read(model: TextModel, numbers: list[int]) -> list[Hypothesis]:
    """Translate numbers from words to digits by greedy search."""
    options = SearchOptions(beam_size=1, max_length=MOST_DIGITS + 2)
    found = []
    for at in range(0, len(numbers), 100):
        source, _ = batch_of(numbers[at : at + 100])
        stepper = DecoderStepper(model.decoder, model.memory(source))
        found += [best[0] for best in search(stepper, options)]
    return found


def main() -> None:
    """Train both models, then evaluate and plot them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="write the figures to this folder")
    parser.add_argument(
        "--steps", type=int, default=2500, help="number of training steps of each model"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    generator = random.Random(1)
    tests: dict[int, None] = {}
    while len(tests) < TESTS:
        tests[random_number(generator, test=True)] = None
    models = {name: train(name, options.steps) for name in ("additive", "fixed")}
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, model in models.items():
        right: dict[int, list[bool]] = defaultdict(list)
        for number, found in zip(tests, read(model, list(tests)), strict=True):
            output = "".join(TARGET.decode(found.tokens))
            right[(len(spell(number)) - 1) // BIN].append(output == str(number))
        accuracy = {
            f"{BIN * b + 1}-{BIN * (b + 1)}": 100 * np.mean(right[b]) for b in sorted(right)
        }
        print(f"{name}: {sum(map(sum, right.values())):,} of {len(tests):,} are correct")
        print(", ".join(f"{words} words: {share:.1f}%" for words, share in accuracy.items()))
        axes.plot(accuracy.keys(), accuracy.values(), "o-", label=name)
    axes.set(xlabel="input length, words", ylabel="numbers decoded correctly, %", ylim=(-3, 103))
    axes.grid(alpha=0.3)
    axes.legend(title="decoder.attention")
    figure.savefig(options.out / "text_accuracy.png", dpi=110)

    example = min(tests, key=lambda number: abs(len(spell(number)) - 16))
    [found] = read(models["additive"], [example])
    words, digits = spell(example), TARGET.decode(found.tokens)
    size = 0.34 * len(words) + 1.2, 0.28 * len(digits) + 1.6
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    image = axes.imshow(found.alphas, cmap="gray", vmin=0, vmax=1, aspect="auto")  # (T, L)
    axes.set_xticks(range(len(words)), words, rotation=60, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(digits)), digits)
    axes.xaxis.tick_top()
    axes.set_ylabel("output digit")
    figure.colorbar(image, label="alpha", fraction=0.03, pad=0.01)
    figure.savefig(options.out / "text_alignment.png", dpi=110)


if __name__ == "__main__":
    main()
