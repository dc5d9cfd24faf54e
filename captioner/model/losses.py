"""Training losses, computed from a memory and target captions; for photos and texts alike.

    cross-entropy   - sum_t log p(y_t | y_1 ... y_{t-1}, photo)
    penalty         sum_i (T / L - sum_t alpha_ti)^2

``hard_losses`` trains hard attention, ``photo_words`` the encoder, ``sampled_losses`` with words
that the model has sampled itself.

Notation: B photos, R captions per photo, T steps, L regions, V vocabulary, W words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from captioner.hardware import upload
from captioner.model.attention import HardAttention, Memory, widen
from captioner.model.decoder import Decoder
from captioner.model.hard_losses import map_entropy, score_function
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
    words: Tensor
    """Number of target words, end tokens included."""
    photo_words: Tensor
    """See ``photo_words``; 0 without."""

    def objective(self, config: TrainingConfig) -> Tensor:
        """The weighted total to minimize, summed over the batch."""
        return (
            self.cross_entropy
            + config.attention_penalty * self.attention_penalty
            + config.hard_reward * self.score_function
            - config.hard_entropy * self.entropy
            + config.photo_words * self.photo_words
        )


def caption_losses(
    decoder: Decoder,
    memory: Memory,
    tokens: Tensor,
    label_smoothing: float = 0.0,
    *,
    inputs: Tensor | None = None,
    targets: Tensor | None = None,
) -> Losses:
    """Cross-entropy of teacher-forced captions, and the attention losses.

    Args:
        decoder: In training mode hard attention samples regions and updates its baseline.
        memory: The photos, (B, ...).
        tokens: (B, R, T + 1): start token, words, end token, padding. A row of padding marks a
            missing caption. Keep them on the CPU whatever the device: shapes are computed from
            them without a synchronization.
        label_smoothing: Share of the target distribution spread evenly over the vocabulary.
        inputs: Decoder inputs, (B, R, T), on the CPU or the device; None: the true words. See
            ``scheduled_inputs``.
        targets: Probabilities to learn, (W + padding, V), one row for each of
            ``score_words``; None: the true words.
    """
    scored = score_words(decoder, memory, tokens, inputs)
    if targets is None:
        cross_entropy = nn.functional.cross_entropy(
            scored.logits,
            scored.targets,
            reduction="sum",
            ignore_index=PAD,
            label_smoothing=label_smoothing,
        )
    else:
        nats = nn.functional.cross_entropy(scored.logits, targets, reduction="none")
        cross_entropy = nats.masked_fill(scored.targets == PAD, 0.0).sum()
    return with_attention_losses(decoder, scored, cross_entropy)


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
        """Cross-entropy of each row, 0 in the padding rows, (W + padding,)."""
        return nn.functional.cross_entropy(
            self.logits, self.targets, reduction="none", ignore_index=PAD
        )

    def of_rows(self, values: Tensor) -> Tensor:
        """The value of each row's caption, (W + padding,), of (B, R), on the CPU or the device."""
        values = upload(values, self.places.device)
        return values.unsqueeze(2).expand(self.mask.shape).flatten()[self.places]

    def of_positions(self, rows: Tensor) -> Tensor:
        """Values of the words, (W + padding,), as (B, R, T), 0 elsewhere."""
        whole = rows.new_zeros(self.mask.numel())
        return whole.index_copy(0, self.places[: self.words], rows[: self.words]).view(
            self.mask.shape
        )


def score_words(
    decoder: Decoder, memory: Memory, tokens: Tensor, inputs: Tensor | None = None
) -> ScoredWords:
    """Teacher forcing: the logits of every word of the captions given the words before it.

    Args:
        decoder: In the mode to run in.
        memory: The photos, (B, ...).
        tokens: See ``caption_losses``.
        inputs: See ``caption_losses``.
    """
    tokens, device = tokens.cpu(), memory.summary.device
    targets = tokens[..., 1:]
    mask = targets != PAD
    unrolled = decoder(memory, tokens[..., :-1] if inputs is None else inputs, mask)
    # Readout and cross-entropy run on the real words only, rounded up to a multiple of 128:
    # oneDNN caches a kernel for every number of rows that it sees.
    places = mask.flatten().nonzero().squeeze(1)  # (W,)
    words = len(places)
    places = nn.functional.pad(places, (0, -words % 128))
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


def with_attention_losses(decoder: Decoder, scored: ScoredWords, cross_entropy: Tensor) -> Losses:
    """The cross-entropy with the losses of the attention; updates hard attention's baseline."""
    mask, alphas = scored.mask, scored.alphas
    penalty = attention_penalty(alphas, mask)
    zero = torch.zeros_like(penalty)
    words = upload(torch.tensor(scored.words), cross_entropy.device)
    losses = Losses(cross_entropy, penalty, zero, zero, words, zero)
    if not isinstance(decoder.attention, HardAttention):
        return losses
    assert scored.chosen is not None
    with torch.no_grad():
        log_probs = scored.of_positions(-scored.nats())
    surrogate = score_function(alphas, scored.chosen, log_probs, mask, decoder.attention.baseline)
    if decoder.training and scored.words:
        decoder.attention.observe(log_probs.sum() / scored.words)
    return losses._replace(score_function=surrogate, entropy=(map_entropy(alphas) * mask).sum())


def attention_penalty(alphas: Tensor, mask: Tensor) -> Tensor:
    """Doubly stochastic penalty: encourages equal total attention to every region.

        sum over captions, sum over regions i of (T / L - sum_t alpha_ti) ** 2

    Source: Xu et al. 2015 (arXiv:1502.03044), equation 14, without the factor lambda.
    Deviation: the paper's target is 1, which T words cannot reach on more than T regions; T / L is
    reachable. As the alphas of a caption sum to T, the two penalties differ by a constant and have
    the same gradient. (L counts masked regions too, which again adds a constant.)

    Args:
        alphas: (B, R, T, L).
        mask: (B, R, T), True at real words.

    Returns:
        The sum over captions, a scalar.
    """
    alphas = widen(alphas) * mask.unsqueeze(-1)
    totals = alphas.sum(dim=2)  # (B, R, L)
    target = mask.sum(dim=2, keepdim=True) / alphas.shape[-1]  # (B, R, 1)
    return (target - totals).square().sum()


@torch.inference_mode()
def photo_nats(decoder: Decoder, memory: Memory, tokens: Tensor) -> Tensor:
    """Cross-entropy of the teacher-forced captions of each photo, summed over their words.

    Args:
        decoder: In evaluation mode.
        memory: The photos, (B, ...).
        tokens: See ``caption_losses``.

    Returns:
        (B,), nats, on the CPU.
    """
    scored = score_words(decoder, memory, tokens)
    return scored.of_positions(scored.nats()).sum(dim=(1, 2)).cpu()
