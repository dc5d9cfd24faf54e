"""Training losses for captions.

    cross-entropy   - sum_t log p(y_t | y_1 ... y_{t-1}, photo)
    penalty         sum_i (n / L - sum_t alpha_ti)^2
    total           cross-entropy + lambda penalty

A caption has n words y_t, and the end token counts as the last word. alpha_ti is the attention
weight of region i for word t. The factor lambda is the setting ``training.attention_penalty``. The
losses are summed over a batch, and training divides the total by the number of words in the batch.

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
    """The losses of a batch, each a sum and not a mean.

    If several processes train together, a process with more words then counts more.
    """

    cross_entropy: Tensor
    """Cross-entropy, summed over words (nats), a scalar."""
    attention_penalty: Tensor
    """Attention penalty, summed over captions, a scalar."""
    hard: HardLosses | None = None
    """The losses of hard attention, summed over words, or None for soft attention."""
    reading: Tensor | None = None
    """Loss of the reading network, summed over photos (see ``reading_loss``), a scalar. None if
    this network is not trained."""

    def total(self, config: TrainingConfig) -> Tensor:
        """Return the sum that training minimizes, with the weights from the config."""
        total = self.cross_entropy + config.attention_penalty * self.attention_penalty
        if self.hard is not None:
            total = total + self.hard.total(config)
        if self.reading is not None:
            total = total + config.reading * self.reading
        return total


def caption_losses(
    decoder: Decoder, memory: Memory, tokens: Tensor, label_smoothing: float = 0.0
) -> Losses:
    """Compute the losses of captions, where each word is predicted from the true words before it.

    Args:
        decoder: The decoder. In training mode, hard attention samples regions and updates its
            baseline.
        memory: The memory of the photos, (B, ...).
        tokens: Start token, words, end token and padding, (B, R, T + 1). A row of padding marks a
            missing caption. Keep the tokens on the CPU, even if the model is on a GPU. Otherwise
            every batch waits for the GPU to count its words.
        label_smoothing: Share of the target probability that is spread over all words of the
            vocabulary, from 0 to 1.
    """
    scored = score_words(decoder, memory, tokens)
    loss = cross_entropy(
        scored.logits, scored.targets, reduction="sum", label_smoothing=label_smoothing
    )
    return with_attention_losses(decoder, scored, loss)


class ScoredWords(NamedTuple):
    """The logits of all W words in the captions of a batch, without padding.

    The words have the order of the flattened tokens: by photo, then by caption, then by position.
    """

    logits: Tensor
    """Logits of each word, (W, V), float32."""
    targets: Tensor
    """Token ids of the true words, (W,)."""
    places: Tensor
    """Index of each word in a flattened tensor of the shape (B, R, T), (W,)."""
    mask: Tensor
    """True at real words, (B, R, T)."""
    alphas: Tensor
    """Attention weights, (B, R, T, L). They are meaningless at padding."""
    chosen: Tensor | None
    """Regions that hard attention chose, (B, R, T), or None for soft attention."""

    def nats(self) -> Tensor:
        """Return the cross-entropy of each word (nats), (B, R, T), with 0 at padding."""
        nats = cross_entropy(self.logits, self.targets, reduction="none")
        whole = nats.new_zeros(self.mask.numel()).index_copy(0, self.places, nats)
        return whole.view(self.mask.shape)

    def of_rows(self, values: Tensor) -> Tensor:
        """Repeat the value of each caption for all of its words, from (B, R) to (W,)."""
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
    # The readout runs on the real words only. index_select has the same values and gradients as
    # part[places], but a faster backward pass.
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
    """Compute the losses of attention, and combine them with the loss of the words.

    Args:
        decoder: The decoder that computed ``scored``.
        scored: The words of the captions.
        loss: The loss of the words, a scalar, such as the cross-entropy.
    """
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

    n is the number of words in a caption. The sum over t is the total attention to region i.

    Source: Xu et al. 2015 (arXiv:1502.03044), equation 14, without the factor lambda.
    Deviation: The paper's target for the total attention is 1 instead of n / L. A caption of n
    words cannot reach 1 on more than n regions, but it can reach n / L. The attention weights of a
    caption sum to n, so both penalties differ only by a constant and have the same gradient. (L
    also counts masked regions, which adds one more constant.)

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
