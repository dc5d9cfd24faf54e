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
from torch.nn.functional import cross_entropy, pad

from captioner.hardware import upload
from captioner.model.attention import HardAttention, Memory, widen
from captioner.model.decoder import Decoder
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
        ignore_index=PAD,
        label_smoothing=label_smoothing,
    )
    return with_attention_losses(decoder, scored, loss)


class ScoredWords(NamedTuple):
    """Logits of the words of given captions: W real words, then a few rows of padding.

    The rows and their order depend on the tokens alone.
    """

    logits: Tensor
    """(W + padding, V), float32."""
    targets: Tensor
    """(W + padding,), PAD in the padding rows."""
    places: Tensor
    """Index of each row in the flattened (B, R, T), (W + padding,)."""
    words: int
    """W."""
    mask: Tensor
    """(B, R, T), True at real words."""
    alphas: Tensor
    """(B, R, T, L); undefined where there is no word."""
    chosen: Tensor | None
    """(B, R, T), regions of hard attention."""

    def nats(self) -> Tensor:
        """Cross-entropy of the words, (B, R, T), 0 elsewhere."""
        nats = cross_entropy(self.logits, self.targets, reduction="none")[: self.words]
        whole = nats.new_zeros(self.mask.numel()).index_copy(0, self.places[: self.words], nats)
        return whole.view(self.mask.shape)

    def of_rows(self, values: Tensor) -> Tensor:
        """The value of each row's caption, (W + padding,), of (B, R), on the CPU or the device."""
        values = upload(values, self.places.device)
        return values.unsqueeze(2).expand(self.mask.shape).flatten()[self.places]


def score_words(decoder: Decoder, memory: Memory, tokens: Tensor) -> ScoredWords:
    """Teacher forcing: the logits of every word of the captions given the words before it.

    See ``caption_losses`` for the arguments.
    """
    tokens, device = tokens.cpu(), memory.summary.device
    targets = tokens[..., 1:]
    mask = targets != PAD
    unrolled = decoder(memory, tokens[..., :-1], mask)
    # Readout and cross-entropy run on the real words only, rounded up to a multiple of 128:
    # oneDNN caches a kernel for every number of rows that it sees.
    places = mask.flatten().nonzero().squeeze(1)  # (W,)
    words = len(places)
    places = pad(places, (0, -words % 128))
    row_targets = targets.flatten()[places]
    row_targets[words:] = PAD
    places = upload(places, device)
    given = (unrolled.embedded, *unrolled.outputs)
    # Not part[places], whose gradient takes longer.
    logits = decoder.readout(*(part.flatten(0, 2).index_select(0, places) for part in given))
    return ScoredWords(
        widen(logits),
        upload(row_targets, device),
        places,
        words,
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
    if decoder.training and scored.words:
        attention.observe(log_probs.sum() / scored.words)
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


def score_function(
    alphas: Tensor, chosen: Tensor, log_probs: Tensor, mask: Tensor, baseline: Tensor
) -> Tensor:
    """Surrogate whose gradient is the score-function (REINFORCE) estimate for sampled regions.

        - sum_t (R_t - b_t) log alpha_t[s_t],   R_t = sum over u >= t of log p(y_u)

    R_t and b_t are constants. Added to cross-entropy, it makes the expected gradient that of the
    cross-entropy's expectation over all choices of regions. Label smoothing and the attention
    penalty are not part of the reward.

    Source: Xu et al. 2015 (arXiv:1502.03044), section 4.1, without the factor lambda_r.
    Deviation: a choice is credited only for words from its own position on, as it cannot change
    earlier ones, and the baseline counts those words, b_t = b * (words left). Both keep the
    expectation and reduce the variance. One sample per caption.

    Args:
        alphas: (B, R, T, L).
        chosen: Sampled regions, (B, R, T).
        log_probs: Of the true words, nats, (B, R, T).
        mask: (B, R, T), True at real words.
        baseline: Mean log-probability of a word in earlier batches, nats, a scalar.

    Returns:
        The sum over words, a scalar.
    """
    advantage = (log_probs.detach() - baseline) * mask
    to_go = advantage.flip(2).cumsum(2).flip(2)  # (B, R, T)
    # Mask padding before the logarithm: 0 times the log of a vanished alpha would be NaN.
    taken = alphas.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).masked_fill(~mask, 1.0)
    return -(to_go * taken.log()).sum()


def map_entropy(alphas: Tensor) -> Tensor:
    """Entropy of attention maps (..., L) in nats: 0 for one region, ln L for a uniform map."""
    # Clamp: where alpha is 0 the gradient of its logarithm would be NaN.
    floor = torch.finfo(alphas.dtype).tiny
    return -(alphas * alphas.clamp(min=floor).log()).sum(dim=-1)
