"""Training losses for captions.

    cross-entropy   - sum_t log p(y_t | y_1 ... y_{t-1}, photo)
    penalty         sum_i (n / L - sum_t alpha_ti)^2
    total           cross-entropy + lambda penalty

A caption has n words y_t, and the end token counts as the last word. The losses are summed over a
batch. Training divides the total by the number of words, so lambda weighs the penalty per word.

``hard_attention`` has two more losses for its choice of regions. ``reading`` has the loss of the
reading network, which predicts the content words of a photo.

Notation: B photos, R captions per photo, T steps of the longest caption.
L regions, V vocabulary size, W words of all captions.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import cross_entropy

from captioner.hardware import upload
from captioner.model.attention import Memory, widen
from captioner.model.decoder import Decoder
from captioner.model.hard_attention import HardAttention, HardLosses, hard_losses
from captioner.options import TrainingConfig
from captioner.text.vocabulary import PAD


class Losses(NamedTuple):
    """Losses summed over a batch, so that processes with more words count more in their mean."""

    cross_entropy: Tensor
    """Sum over words (nats)."""
    attention_penalty: Tensor
    """Sum over captions."""
    hard: HardLosses | None = None
    """Sums over words, or None for soft attention."""
    reading: Tensor | None = None
    """Sum over photos (see ``reading_loss``), or None if the network is not trained."""

    def total(self, config: TrainingConfig) -> Tensor:
        """Return the weighted sum that training minimizes."""
        total = self.cross_entropy + config.attention_penalty * self.attention_penalty
        if self.hard is not None:
            total = total + self.hard.total(config)
        if self.reading is not None:
            total = total + config.reading * self.reading
        return total


def caption_losses(
    decoder: Decoder, memory: Memory, tokens: Tensor, label_smoothing: float = 0.0
) -> Losses:
    """Compute the losses of captions. Each word is predicted from the true words before it.

    Args:
        decoder: In training mode, hard attention samples regions and updates its baseline.
        memory: The memory of the photos, (B, ...).
        tokens: Start token, words, end token and padding, (B, R, T + 1). A row of padding marks a
            missing caption. Keep them on the CPU, even if the model is on a GPU. Otherwise every
            batch waits for the GPU to count its words.
        label_smoothing: Share of the target distribution that is spread over the vocabulary.
    """
    scored = score_words(decoder, memory, tokens)
    loss = cross_entropy(
        scored.logits, scored.targets, reduction="sum", label_smoothing=label_smoothing
    )
    return with_attention_losses(decoder, scored, loss)


class ScoredWords(NamedTuple):
    """The logits of the W words of captions, in the order of the flattened tokens."""

    logits: Tensor
    """Logits, (W, V), float32."""
    targets: Tensor
    """The true words, (W,)."""
    places: Tensor
    """Index of each word in the flattened (B, R, T), (W,)."""
    mask: Tensor
    """True at real words, (B, R, T)."""
    alphas: Tensor
    """Attention weights, (B, R, T, L). They are meaningless at padding."""
    chosen: Tensor | None
    """Regions that hard attention chose, (B, R, T), or None for soft attention."""

    def nats(self) -> Tensor:
        """Return the cross-entropy of each word (nats), (B, R, T). It is 0 at padding."""
        nats = cross_entropy(self.logits, self.targets, reduction="none")
        whole = nats.new_zeros(self.mask.numel()).index_copy(0, self.places, nats)
        return whole.view(self.mask.shape)

    def of_rows(self, values: Tensor) -> Tensor:
        """Repeat the value of each caption for its words: (B, R) to (W,)."""
        values = upload(values, self.places.device)
        return values.unsqueeze(2).expand(self.mask.shape).flatten()[self.places]


def score_words(decoder: Decoder, memory: Memory, tokens: Tensor) -> ScoredWords:
    """Compute the logits of every word after the true words before it (teacher forcing).

    For the arguments, see ``caption_losses``.
    """
    tokens, device = tokens.cpu(), memory.summary.device
    targets = tokens[..., 1:]
    mask = targets != PAD
    unrolled = decoder(memory, tokens[..., :-1])
    # The readout runs on the real words only. index_select, not part[places]: the backward pass of
    # fancy indexing is slower. Values and gradients are the same.
    places = upload(mask.flatten().nonzero().squeeze(1), device)  # (W,)
    parts = (unrolled.embedded, *unrolled.outputs)
    logits = decoder.readout(*(part.flatten(0, 2).index_select(0, places) for part in parts))
    return ScoredWords(
        logits=widen(logits),
        targets=upload(targets[mask], device),
        places=places,
        mask=upload(mask, device),
        alphas=unrolled.alphas,
        chosen=unrolled.chosen,
    )


def with_attention_losses(decoder: Decoder, scored: ScoredWords, loss: Tensor) -> Losses:
    """Combine the loss of the words, a scalar, with the losses of attention."""
    penalty = attention_penalty(scored.alphas, scored.mask)
    attention = decoder.attention
    if scored.chosen is None or not isinstance(attention, HardAttention):
        return Losses(loss, penalty)
    log_probs = -scored.nats().detach()
    hard = hard_losses(attention, scored.alphas, scored.chosen, log_probs, scored.mask)
    return Losses(loss, penalty, hard)


def attention_penalty(alphas: Tensor, mask: Tensor) -> Tensor:
    """Compute the doubly stochastic penalty, which favours equal total attention to all regions.

        sum over captions, sum over regions i of (n / L - sum_t alpha_ti) ** 2

    n is the number of words of each caption.

    Source: Xu et al. 2015 (arXiv:1502.03044), equation 14, without the factor lambda.
    Deviation: The paper's target is 1, but n words cannot reach it on more than n regions. They can
    reach n / L. Because the alphas of a caption sum to n, both penalties differ by a constant only
    and have the same gradient. (L also counts masked regions, which adds one more constant.)

    Args:
        alphas: Attention weights, (B, R, T, L).
        mask: True at real words, (B, R, T).

    Returns:
        The sum over captions, a scalar.
    """
    alphas = widen(alphas) * mask.unsqueeze(-1)
    totals = alphas.sum(dim=2)  # (B, R, L)
    target = mask.sum(dim=2, keepdim=True) / alphas.shape[-1]  # (B, R, 1)
    return (target - totals).square().sum()
