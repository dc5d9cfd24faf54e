"""Run a training step of two published captioning programs, from checkouts of their code.

    git clone https://github.com/sgrvinod/a-PyTorch-Tutorial-to-Image-Captioning
    git clone https://github.com/ruotianluo/ImageCaptioning.pytorch

Each step does what the program's training loop does with an encoded batch: forward pass, loss,
backward pass, gradient clipping, Adam, and any other work of every step. The code of the programs
is not changed. Parts that a step does not need (data loading, BLEU, other models) are not imported.
"""

from __future__ import annotations

import importlib
import runpy
import sys
import types
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from captioner.text.vocabulary import END, PAD

DROPOUT = 0.5
"""The default dropout of both programs."""


def sgrvinod_step(
    checkout: Path, sizes: list[int], features: Tensor, tokens: Tensor
) -> Callable[[], None]:
    """Return a function that runs a training step of sgrvinod's tutorial (``train.py``).

    The tutorial loads pairs of a photo and a caption. A photo with R captions is therefore
    processed R times, each time with its own copy of the features.

    Args:
        checkout: Folder of the repository.
        sizes: Number of regions L, feature size D, size of all layers, vocabulary size V.
        features: Features of the photos, (B, L, D).
        tokens: Start token, words, end token and padding, (B, R, T + 1).
    """
    module = runpy.run_path(str(checkout / "models.py"))
    _, size, layers, words = sizes
    decoder = module["DecoderWithAttention"](layers, layers, layers, words, size, DROPOUT)
    decoder = decoder.to(features.device).train()
    optimizer = torch.optim.Adam(decoder.parameters(), lr=4e-4)
    criterion = nn.CrossEntropyLoss()
    pairs = features.repeat_interleave(tokens.shape[1], 0)
    captions = tokens.flatten(0, 1).to(features.device)
    lengths = (captions != PAD).sum(dim=1, keepdim=True)

    def step() -> None:
        """Run one step, including the accuracy and the loss that the tutorial records."""
        scores, ordered, decoded, alphas, _ = decoder(pairs, captions, lengths)
        scores = pack_padded_sequence(scores, decoded, batch_first=True).data
        targets = pack_padded_sequence(ordered[:, 1:], decoded, batch_first=True).data
        loss = criterion(scores, targets) + ((1.0 - alphas.sum(dim=1)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in decoder.parameters():  # clip_gradient
            parameter.grad.clamp_(-5.0, 5.0)
        optimizer.step()
        found = scores.topk(5, 1, True, True).indices.eq(targets.view(-1, 1))  # accuracy
        found.float().sum().item(), loss.item()

    return step


def att2in2_step(
    checkout: Path, sizes: list[int], features: Tensor, tokens: Tensor
) -> Callable[[], None]:
    """Return a function that runs a training step of Att2in2 (``tools/train.py``).

    Att2in2 is a model of ruotianluo's ImageCaptioning.pytorch. Its words are numbered from 1, and 0
    starts, ends and pads a caption. For the arguments, see `sgrvinod_step`.
    """
    models = _att_models(checkout)
    _, size, layers, words = sizes
    model = models.Att2in2Model(
        Namespace(
            vocab_size=words - 1, input_encoding_size=layers, rnn_size=layers, num_layers=1,
            drop_prob_lm=DROPOUT, max_length=tokens.shape[2], fc_feat_size=size,
            att_feat_size=size, att_hid_size=layers, vocab={},
        )
    )  # fmt: skip
    model = model.to(features.device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-4)
    labels = tokens.masked_fill((tokens == END) | (tokens == PAD), 0).to(features.device)
    labels[..., 0] = 0
    mask = (tokens[..., 1:] != PAD).to(features)
    means = features.mean(dim=1)
    everywhere = features.new_ones(features.shape[:2])

    def step() -> None:
        """Run one step, including the loss that the program records."""
        optimizer.zero_grad()
        outputs = model(means, features, labels[..., :-1], everywhere)
        targets = labels[..., 1:].flatten(0, 1)[:, : outputs.shape[1]]
        kept = mask.flatten(0, 1)
        # A copy of LanguageModelCriterion, because its module also imports the scorers of COCO.
        loss = (-outputs.gather(2, targets.unsqueeze(2)).squeeze(2) * kept).sum() / kept.sum()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        loss.item()

    return step


def _att_models(checkout: Path) -> types.ModuleType:
    """Import ``captioning.models.AttModel`` without the other models, which need more packages.

    Empty packages replace the program's packages, because importing those would import all models.
    """
    for name in ("captioning", "captioning.models", "captioning.utils"):
        package = types.ModuleType(name)
        package.__path__ = [str(checkout / name.replace(".", "/"))]
        sys.modules[name] = package
    return importlib.import_module("captioning.models.AttModel")
