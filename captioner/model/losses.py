"""Training losses, computed from a memory and target captions.

    cross-entropy   - sum_t log p(y_t | y_1 ... y_{t-1}, photo)
    penalty         sum_i (T / L - sum_t alpha_ti)^2

``training.objectives`` has the loss of words that the model has sampled, and ``reading`` the loss
of the words that a photo shows.

Notation: B photos, R captions per photo, T steps, L regions, V vocabulary, W words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from captioner.hardware import upload
from captioner.model.attention import Memory, widen
from captioner.model.decoder import Decoder
from captioner.model.hard_attention import HardAttention, map_entropy, score_function
from captioner.options import TrainingConfig
from captioner.text.vocabulary import PAD


class Losses(NamedTuple):
    """Sums over a batch, so that processes with different numbers of words average correctly."""

    cross_entropy: Tensor
    """Sum over words, nats; of ``policy_gradient_loss`` weighted by the advantages."""
    attention_penalty: Tensor
    """Sum over captions."""
    score_function: Tensor
    """Sum over words; its gradient trains hard attention. 0 for soft attention."""
    entropy: Tensor
    """Entropy of hard attention's maps, summed over words, nats. 0 for soft attention."""
    reading: Tensor
    """Sum over photos, see ``reading_loss``; 0 without."""

    def total(self, config: TrainingConfig) -> Tensor:
        """The weighted total to minimize, summed over the batch."""
        return (
            self.cross_entropy
            + config.attention_penalty * self.attention_penalty
            + config.hard_reward * self.score_function
            - config.hard_entropy * self.entropy
            + config.reading * self.reading
        )


def caption_losses(
    decoder: Decoder,
    memory: Memory,
    tokens: Tensor,
    label_smoothing: float = 0.0,
) -> Losses:
    """Cross-entropy of teacher-forced captions, and the attention losses.

    Args:
        decoder: In training mode hard attention samples regions and updates its baseline.
        memory: The photos, (B, ...).
        tokens: (B, R, T + 1): start token, words, end token, padding. A row of padding marks a
            missing caption. Keep them on the CPU whatever the device: shapes are computed from
            them without a synchronization.
        label_smoothing: Share of the target distribution spread evenly over the vocabulary.
    """
    scored = score_words(decoder, memory, tokens)
    loss = cross_entropy(
        scored.logits,
        scored.targets,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return with_attention_losses(decoder, scored, loss)


class ScoredWords(NamedTuple):
    """Logits of the W real words of given captions, whose order depends on the tokens alone."""

    logits: Tensor
    """(W, V), float32."""
    targets: Tensor
    """(W,)."""
    places: Tensor
    """Index of each word in the flattened (B, R, T), (W,)."""
    mask: Tensor
    """(B, R, T), True at real words."""
    alphas: Tensor
    """(B, R, T, L); undefined where there is no word."""
    chosen: Tensor | None
    """(B, R, T), regions of hard attention."""

    def nats(self) -> Tensor:
        """Cross-entropy of the words, (B, R, T), 0 elsewhere."""
        nats = cross_entropy(self.logits, self.targets, reduction="none")
        whole = nats.new_zeros(self.mask.numel()).index_copy(0, self.places, nats)
        return whole.view(self.mask.shape)

    def of_rows(self, values: Tensor) -> Tensor:
        """The value of each word's caption, (W,), of (B, R), on the CPU or the device."""
        values = upload(values, self.places.device)
        return values.unsqueeze(2).expand(self.mask.shape).flatten()[self.places]


def score_words(decoder: Decoder, memory: Memory, tokens: Tensor) -> ScoredWords:
    """Teacher forcing: the logits of every word of the captions given the words before it.

    See ``caption_losses`` for the arguments.
    """
    tokens, device = tokens.cpu(), memory.summary.device
    targets = tokens[..., 1:]
    mask = targets != PAD
    unrolled = decoder(memory, tokens[..., :-1])
    # Readout and cross-entropy run on the real words only.
    places = mask.flatten().nonzero().squeeze(1)  # (W,)
    words = targets.flatten()[places]
    places = upload(places, device)
    given = (unrolled.embedded, *unrolled.outputs)
    # Not part[places], whose gradient takes longer.
    logits = decoder.readout(*(part.flatten(0, 2).index_select(0, places) for part in given))
    return ScoredWords(
        widen(logits),
        upload(words, device),
        places,
        upload(mask, device),
        unrolled.alphas,
        unrolled.chosen,
    )


def with_attention_losses(decoder: Decoder, scored: ScoredWords, loss: Tensor) -> Losses:
    """The cross-entropy with the losses of the attention; updates hard attention's baseline."""
    attention, mask, alphas = decoder.attention, scored.mask, scored.alphas
    penalty = attention_penalty(alphas, mask)
    zero = torch.zeros_like(penalty)
    losses = Losses(loss, penalty, zero, zero, zero)
    if scored.chosen is None or not isinstance(attention, HardAttention):
        return losses
    with torch.no_grad():
        log_probs = -scored.nats()
    surrogate = score_function(alphas, scored.chosen, log_probs, mask, attention.baseline)
    if decoder.training:
        attention.observe(log_probs, mask)
    return losses._replace(score_function=surrogate, entropy=(map_entropy(alphas) * mask).sum())


def attention_penalty(alphas: Tensor, mask: Tensor) -> Tensor:
    """Doubly stochastic penalty: encourages equal total attention to every region.

        sum over captions, sum over regions i of (T / L - sum_t alpha_ti) ** 2

    Source: Xu et al. 2015 (arXiv:1502.03044), equation 14, without the factor lambda.
    Deviation: the paper's target is 1, which T words cannot reach on more than T regions; T / L is
    reachable. As the alphas of a caption sum to T, the two penalties differ by a constant and have
    the same gradient. (L counts masked regions too, which again adds a constant.)

    Alphas are (B, R, T, L); the mask, (B, R, T), is True at real words. The sum over captions, a
    scalar.
    """
    alphas = widen(alphas) * mask.unsqueeze(-1)
    totals = alphas.sum(dim=2)  # (B, R, L)
    target = mask.sum(dim=2, keepdim=True) / alphas.shape[-1]  # (B, R, 1)
    return (target - totals).square().sum()
