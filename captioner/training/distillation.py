"""The teacher of a run: the model that it starts from, changed as a search with guidance would.

A search with guidance runs the decoder twice per word. A model that has learned the changed
probabilities needs it once.

Notation: B photos, R captions per photo, T steps, W words, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from captioner.config import DistillationConfig, SearchOptions
from captioner.data.batches import EncodedImage
from captioner.decoding.guidance import guide
from captioner.decoding.words import encode_search_words
from captioner.hardware import upload
from captioner.models.attention import Memory
from captioner.models.captioner import CaptionModel
from captioner.models.losses import ScoredCaptions, score_longest_first
from captioner.vocabulary import NEVER_GENERATED, Vocabulary


class Teacher:
    """Probabilities of the next word after every word of given captions, by the initial model.

    Source: Hinton et al. 2015 (arXiv:1503.02531), distillation; Meng et al. 2023
    (arXiv:2210.03142), of a guided model.
    Deviation: implausible words keep their place below the plausible ones, and are not pushed
    further down as in the search.
    """

    def __init__(
        self,
        config: DistillationConfig,
        model: CaptionModel,
        vocabulary: Vocabulary,
        photos: Sequence[EncodedImage],
    ) -> None:
        """Prepare the teacher.

        Args:
            config: Guidance and preference for rare words of each captions file.
            model: It is copied.
            vocabulary: The model's.
            photos: The training photos.

        Raises:
            ConfigError: The vocabulary has no rare words, as it is one of pieces.
        """
        self.model = copy.deepcopy(model).eval()
        self.options = {
            photo.image.image_id: config.of_file(photo.image.source) for photo in photos
        }
        favours = float(any(rare_words for _, rare_words in self.options.values()))
        rarity = encode_search_words(SearchOptions(rare_words=favours), vocabulary).rarity
        device = next(model.parameters()).device
        self.rarity = upload(torch.tensor(rarity or [0.0]), device)
        self.never = upload(torch.tensor(NEVER_GENERATED), device)

    @torch.no_grad()
    def targets(self, images: Tensor, tokens: Tensor, image_ids: Sequence[int]) -> Tensor:
        """Probabilities to learn, see ``caption_losses``: (W + padding, V).

        Args:
            images: Pixels or cached features of the photos, (B, ...).
            tokens: (B, R, T + 1), on the CPU; see ``caption_losses``.
            image_ids: (B,).
        """
        decoder = self.model.decoder
        order, scored = score_longest_first(decoder, self._memory(images), tokens)
        log_probs = self._log_probs(scored)
        given = torch.tensor([self.options.get(image_id, (0.0, 0.0)) for image_id in image_ids])
        guidance, rare_words = (
            scored.of_rows(order.sort_captions(of_photo[:, None].expand(tokens.shape[:2])))[:, None]
            for of_photo in given.unbind(1)
        )
        if given[:, 0].any():
            rows = torch.zeros(len(images), dtype=torch.long, device=images.device)
            _, unseen = score_longest_first(decoder, self.blank.select(rows), tokens)
            guided = guide(log_probs, self._log_probs(unseen), guidance, penalty=0.0)
            log_probs = torch.where(guidance > 0, guided, log_probs)
        return (log_probs + rare_words * self.rarity).softmax(dim=-1)

    @cached_property
    def blank(self) -> Memory:
        """One blank photo; computed in the precision of the run."""
        pixels = torch.from_numpy(self.model.preprocessing.blank()[None])
        return self._memory(upload(pixels, self.never.device))

    def _memory(self, images: Tensor) -> Memory:
        return self.model.decoder.memory(self.model.to_features(images))

    def _log_probs(self, scored: ScoredCaptions) -> Tensor:
        return scored.logits.index_fill(1, self.never, -torch.inf).log_softmax(dim=-1)
