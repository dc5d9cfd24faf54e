"""The teacher of a run: the model that it starts from, or an ensemble, changed as a search would.

A search with guidance runs the decoder twice per word, an ensemble every model. A model that has
learned their probabilities needs one run of one model.

Notation: B photos, R captions per photo, T steps, W words, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from captioner.data.batches import EncodedImage
from captioner.hardware import upload
from captioner.model.attention import Memory
from captioner.model.captioner import CaptionModel
from captioner.model.losses import ScoredWords, score_words
from captioner.options import DistillationConfig
from captioner.search.arrays import mean_probability
from captioner.search.rules import guide
from captioner.search.words import check_whole_words, rarities
from captioner.text.vocabulary import NEVER_GENERATED, Vocabulary


class Teacher:
    """Probabilities of the next word after every word of given captions, by one or more models.

    Source: Hinton et al. 2015 (arXiv:1503.02531), distillation, also of an ensemble; Meng et al.
    2023 (arXiv:2210.03142), of a guided model.
    Deviation: implausible words stay just below the plausible ones; the further penalty of the
    search is not applied.
    """

    def __init__(
        self,
        config: DistillationConfig,
        models: Sequence[CaptionModel],
        vocabulary: Vocabulary,
        photos: Sequence[EncodedImage],
    ) -> None:
        """Prepare the teacher; the models, other than the trained one, share its vocabulary."""
        self.models = [model.eval() for model in models]
        self.options = {
            photo.image.image_id: config.of_file(photo.image.source) for photo in photos
        }
        favours = any(config.rare_words)
        if favours:
            check_whole_words(vocabulary, "distillation.rare_words")
        self.device = next(models[0].parameters()).device
        rarity = rarities(len(vocabulary)) if favours else [0.0]
        self.rarity = upload(torch.tensor(rarity), self.device)
        self.never = upload(torch.tensor(NEVER_GENERATED), self.device)

    @torch.no_grad()
    def targets(self, images: Tensor, tokens: Tensor, image_ids: Sequence[int]) -> Tensor:
        """Probabilities to learn, (W + padding, V); see ``caption_losses``.

        From pixels or cached features (B, ...), tokens (B, R, T + 1) and the photos' ids (B,).
        """
        scored, log_probs = self._score([_memory(model, images) for model in self.models], tokens)
        given = torch.tensor([self.options.get(image_id, (0.0, 0.0)) for image_id in image_ids])
        guidance, rare_words = (
            scored.of_rows(of_photo[:, None].expand(tokens.shape[:2]))[:, None]
            for of_photo in given.unbind(1)
        )
        if given[:, 0].any():
            rows = torch.zeros(len(images), dtype=torch.long, device=self.device)
            _, unseen = self._score([blank.select(rows) for blank in self.blanks], tokens)
            guided = guide(log_probs, unseen, guidance, penalty=0.0)
            log_probs = torch.where(guidance > 0, guided, log_probs)
        return (log_probs + rare_words * self.rarity).softmax(dim=-1)

    @cached_property
    def blanks(self) -> list[Memory]:
        """One blank photo for each model; computed in the precision of the run."""
        return [
            _memory(model, upload(torch.from_numpy(model.preprocessing.blank()[None]), self.device))
            for model in self.models
        ]

    def _score(self, memories: Sequence[Memory], tokens: Tensor) -> tuple[ScoredWords, Tensor]:
        """Scores of one model, and the log-probabilities of all as a search has them."""
        log_probs = []
        for model, memory in zip(self.models, memories, strict=True):
            scored = score_words(model.decoder, memory, tokens)
            log_probs.append(scored.logits.log_softmax(-1).index_fill(1, self.never, -torch.inf))
        mean: Tensor = mean_probability(log_probs)
        return scored, mean


def _memory(model: CaptionModel, images: Tensor) -> Memory:
    return model.decoder.memory(model.to_features(images))
