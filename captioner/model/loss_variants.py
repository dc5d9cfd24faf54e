"""Self-critical training, scheduled sampling, and the words of a photo from its mean feature.

Notation: B photos, R captions per photo, T steps, C content words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from captioner.hardware import upload
from captioner.model.attention import Memory, sample_index, widen
from captioner.model.decoder import Decoder
from captioner.model.losses import Losses, score_words, with_attention_losses
from captioner.text.vocabulary import NEVER_GENERATED, PAD

Advantages: TypeAlias = Callable[[], Tensor]
"""Returns the advantage of each caption, (B, R), on the CPU. Called when the forward pass has been
queued, so that a GPU runs it while the rewards are computed."""


def policy_gradient_loss(
    decoder: Decoder, memory: Memory, tokens: Tensor, advantages: Advantages
) -> Losses:
    """Surrogate loss for captions sampled from the model: its gradient is the policy gradient.

        - sum over captions of advantage * log p(caption)

    It replaces ``Losses.cross_entropy``. As in sampling, dropout is off and tokens that are never
    generated have probability 0; attention still trains in the decoder's mode. ``tokens`` are the
    sampled captions, (B, R, T + 1), as for ``caption_losses``.
    """
    training = decoder.dropout.training
    decoder.dropout.eval()
    scored = score_words(decoder, memory, tokens)
    decoder.dropout.train(training)
    never = upload(torch.tensor(NEVER_GENERATED), scored.logits.device)
    nats = nn.functional.cross_entropy(
        scored.logits.index_fill(1, never, torch.finfo(scored.logits.dtype).min),
        scored.targets,
        reduction="none",
        ignore_index=PAD,
    )
    weighted = nats * scored.of_rows(advantages())
    return with_attention_losses(decoder, scored, weighted.sum())


@torch.no_grad()
def scheduled_inputs(decoder: Decoder, memory: Memory, tokens: Tensor, share: float) -> Tensor:
    """Scheduled sampling: true captions with some words replaced by the model's own samples.

    With probability ``share`` an input word is sampled from the model's distribution given the
    inputs before it. No gradient passes through the samples. Tokens are (B, R, T + 1), on the CPU;
    the inputs (B, R, T), on the device.

    Source: Bengio et al. 2015 (arXiv:1506.03099). Deviation: words are sampled in a separate pass
    without dropout, so that the training pass can still process all words in one product.
    """
    training, device = decoder.training, memory.summary.device
    decoder.eval()
    inputs = upload(tokens[..., :-1].clone(), device)
    replaced = (torch.rand(inputs.shape, device=device) < share) & (inputs != PAD)
    never = upload(torch.tensor(NEVER_GENERATED), device)
    state = decoder.start(memory, inputs.shape[1])
    for t in range(inputs.shape[2] - 1):
        embedded = decoder.embed(inputs[..., t])
        step = decoder.step(decoder.word_gates(embedded), state, memory)
        state = step.state
        logits = widen(decoder.readout(embedded, *step.outputs))
        sampled = sample_index(logits.index_fill(2, never, -torch.inf).softmax(dim=-1))
        inputs[..., t + 1] = torch.where(replaced[..., t + 1], sampled, inputs[..., t + 1])
    decoder.train(training)
    return inputs


def photo_words_loss(decoder: Decoder, memory: Memory, tokens: Tensor, present: Tensor) -> Tensor:
    """Predict the words of a photo from its mean feature alone, with the decoder's own readout.

        - sum over photos, sum over the photo's words w of log softmax(readout_photo)_w

    A scalar, nats, from the content words (C,) and the photos' own, 1 in (B, C), on the CPU; the
    softmax is over content words. It trains the encoder to see what the captions name, wherever it
    is in the photo, and adds no weights.

    Source: the word detectors of Fang et al. 2015 (arXiv:1411.4952), section 3, and the attributes
    of Wu et al. 2016 (arXiv:1506.01144). Deviation: one softmax over the mean feature instead of a
    detector per region and word. Not for attention ``fixed_at_start``.
    """
    logits = widen(decoder.readout_photo(memory))
    tokens, present = (upload(part, logits.device) for part in (tokens, present))
    return -(logits.index_select(1, tokens).log_softmax(dim=1) * present).sum()
