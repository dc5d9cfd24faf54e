"""What training minimises, from a memory and true captions: photos and texts alike.

Notation: B photos, R captions a photo, T steps, L regions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from captioner.config import TrainingConfig
from captioner.models.attention import HardAttention, Memory, widen
from captioner.models.decoder import Decoder
from captioner.vocabulary import PAD


class Losses(NamedTuple):
    """Sums over a batch, so that processes with unequal words can be weighted right."""

    cross_entropy: Tensor
    """Sum over words, nats."""
    attention_penalty: Tensor
    """Sum over captions."""
    score_function: Tensor
    """Sum over words; its gradient teaches hard attention where to look. 0 where it is soft."""
    entropy: Tensor
    """Of the maps that hard attention samples from, sum over words, nats. 0 where it is soft."""
    words: Tensor
    """Number of words, the end tokens included."""

    def objective(self, config: TrainingConfig) -> Tensor:
        """What is minimised, summed over the batch."""
        return (
            self.cross_entropy
            + config.attention_penalty * self.attention_penalty
            + config.hard_reward * self.score_function
            - config.hard_entropy * self.entropy
        )


def caption_losses(
    decoder: Decoder, memory: Memory, tokens: Tensor, label_smoothing: float = 0.0
) -> Losses:
    """Losses of teacher-forced captions.

    Args:
        decoder: In training mode hard attention samples and moves its baseline.
        memory: The photos, (B, ...).
        tokens: (B, R, T + 1), start token, words, end token, then padding; a row of padding
            alone stands for a caption that the photo does not have.
        label_smoothing: Share of the target spread evenly over the vocabulary.
    """
    memory, tokens = _longest_first(memory, tokens)
    inputs, targets = tokens[..., :-1], tokens[..., 1:]  # (B, R, T)
    mask = targets != PAD
    # The end token is no input that matters: nothing comes after it.
    unrolled = decoder(memory, inputs.masked_fill(~mask, PAD))
    # Readout and cross-entropy over the real words only, rounded up to a multiple of 128: with
    # another number of rows at every step oneDNN would keep a kernel for each of them.
    rows = mask.flatten().nonzero().squeeze(1)  # (words,)
    words = len(rows)
    rows = nn.functional.pad(rows, (0, -words % 128))
    wanted = targets.flatten()[rows].clone()
    wanted[words:] = PAD
    parts = (unrolled.embedded, *unrolled.outputs)
    logits = widen(decoder.readout(*(part.flatten(0, 2)[rows] for part in parts)))
    cross_entropy = nn.functional.cross_entropy(
        logits, wanted, reduction="sum", ignore_index=PAD, label_smoothing=label_smoothing
    )
    penalty = attention_penalty(unrolled.alphas, mask)
    nothing = torch.zeros_like(penalty)
    if not isinstance(decoder.attention, HardAttention):
        return Losses(cross_entropy, penalty, nothing, nothing, mask.sum())
    assert unrolled.chosen is not None
    with torch.no_grad():
        said = -nn.functional.cross_entropy(logits, wanted, reduction="none", ignore_index=PAD)
        log_probs = torch.zeros_like(targets, dtype=said.dtype)
        log_probs.view(-1)[rows[:words]] = said[:words]  # (B, R, T)
    surrogate = score_function(
        unrolled.alphas, unrolled.chosen, log_probs, mask, decoder.attention.baseline
    )
    spread = (map_entropy(unrolled.alphas) * mask).sum()
    if decoder.training and words:
        decoder.attention.observe(log_probs.sum() / words)
    return Losses(cross_entropy, penalty, surrogate, spread, mask.sum())


def _longest_first(memory: Memory, tokens: Tensor) -> tuple[Memory, Tensor]:
    """Photos by their longest caption and captions by their length, so that little is padding."""
    lengths = (tokens != PAD).sum(dim=-1)  # (B, R)
    captions = lengths.argsort(dim=1, descending=True, stable=True)
    tokens = tokens.take_along_dim(captions.unsqueeze(-1), dim=1)
    photos = lengths.amax(dim=1).argsort(descending=True, stable=True)
    return memory.select(photos), tokens[photos]


def attention_penalty(alphas: Tensor, mask: Tensor) -> Tensor:
    """Doubly stochastic penalty: every region should be looked at about equally over a sentence.

        sum over captions, sum over regions i of (T / L - sum_t alpha_ti) ** 2

    Source: Xu et al. 2015 (arXiv:1502.03044), equation 14, lambda left to the caller.
    Deviation: the paper's target is 1, which T words cannot reach on more than T regions. T / L is
    what they can reach; as the alphas of a sentence sum to T the two differ by a constant and the
    gradient is the paper's. (L counts masked regions too: again a constant.)

    Args:
        alphas: (B, R, T, L).
        mask: (B, R, T), True at real words.

    Returns:
        The sum.
    """
    alphas = widen(alphas) * mask.unsqueeze(-1)
    looked = alphas.sum(dim=2)  # (B, R, L)
    target = mask.sum(dim=2, keepdim=True) / alphas.shape[-1]  # (B, R, 1)
    return (target - looked).square().sum()


def score_function(
    alphas: Tensor, chosen: Tensor, log_probs: Tensor, mask: Tensor, baseline: Tensor
) -> Tensor:
    """Surrogate whose gradient is the score-function (REINFORCE) estimate for sampled regions.

        - sum_t (R_t - b_t) log alpha_t[s_t],   R_t = sum over u >= t of log p(y_u)

    with R_t and b_t constants: added to the plain cross-entropy it makes the expected gradient that
    of the expected cross-entropy over all choices of regions. (Label smoothing and the penalties on
    the maps are no part of the reward: what the regions are chosen for is the true words.)

    Source: Xu et al. 2015 (arXiv:1502.03044), section 4.1, lambda_r left to the caller.
    Deviation: a choice is paid only for the words from its own on (it cannot change earlier ones)
    and the baseline counts those words, b_t = b * (words left); both leave the expectation as it
    is and lower the variance. One sample a caption.

    Args:
        alphas: (B, R, T, L).
        chosen: Sampled regions, (B, R, T).
        log_probs: Of the true words, nats, (B, R, T).
        mask: (B, R, T), True at real words.
        baseline: Expected log-probability of a word, nats, a scalar from earlier batches.

    Returns:
        The sum over words.
    """
    advantage = (log_probs.detach() - baseline) * mask
    to_go = advantage.flip(2).cumsum(2).flip(2)  # (B, R, T)
    # Padding is masked before the logarithm: 0 times the log of a vanished alpha would be NaN.
    taken = alphas.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).masked_fill(~mask, 1.0)
    return -(to_go * taken.log()).sum()


def map_entropy(alphas: Tensor) -> Tensor:
    """Entropy of attention maps (..., L), nats: 0 on one region, ln L when even."""
    # Where alpha is 0 its logarithm would give a NaN gradient.
    floor = torch.finfo(alphas.dtype).tiny
    return -(alphas * alphas.clamp(min=floor).log()).sum(dim=-1)
