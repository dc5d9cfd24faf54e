"""The contents of a model folder in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captioner.errors import ConfigError
from captioner.extras import require_extra
from captioner.inference.config_file import config_errors
from captioner.inference.names import EXPORTED, WEIGHTS
from captioner.options import DecoderConfig, SearchOptions
from captioner.text.vocabulary import Vocabulary

if TYPE_CHECKING:  # the network is imported with torch
    from captioner.inference.confidence import Calibrator
    from captioner.inference.reading import ReadingWords
    from captioner.model.caption_model import CaptionModel
    from captioner.search.grammar import Grammar


@dataclass
class StoredModel:
    """The contents of a model folder."""

    network: CaptionModel | None
    """The network in float32 and eval mode on the CPU, or None if not read yet or only exported."""
    decoder: DecoderConfig
    vocabulary: Vocabulary
    search: SearchOptions = field(default_factory=SearchOptions)
    """The model's default search options."""
    info: dict[str, Any] = field(default_factory=dict)
    """Training data and scores, for people to read."""
    frequencies: bytes | None = None
    """Contents of the document frequency file, or None (see ``captioner.evaluation``)."""
    calibrator: Calibrator | None = None
    """The model that estimates the confidence of captions, or None if it was not calibrated."""
    reading: ReadingWords | None = None
    """The words that the reading of a photo has rows for, or None without a reading."""
    grammar: Grammar | None = None
    """Rules for endings and agreement of captions, or None if only the decoder decides."""
    folder: Path | None = None
    """The folder that the model was read from, or None for a new model."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The folder's config, as it was read."""

    @property
    def has_graphs(self) -> bool:
        """True if the folder contains the exported network."""
        return EXPORTED in self.config

    @property
    def has_weights(self) -> bool:
        """True if the model has weights, not only graphs."""
        if self.network is not None or self.folder is None:
            return True
        return (self.folder / WEIGHTS).is_file()

    def require_weights(self, use: str = "this") -> None:
        """Check that the model can run in torch.

        Raises:
            ConfigError: The model has only graphs, or torch is not installed.
        """
        if not self.has_weights:
            raise ConfigError(
                f"{self.folder} is exported; {use} needs the model folder that it was exported from"
            )
        if self.network is None:
            require_extra("torch", use)

    @property
    def model(self) -> CaptionModel:
        """The network. It is read when it is first needed.

        Raises:
            ConfigError: As in `require_weights`.
            ModelError: The weights are damaged.
        """
        self.require_weights()
        if self.network is None:
            from captioner.inference.weights import read_network

            assert self.folder is not None
            with config_errors(self.folder):
                self.network = read_network(
                    self.folder / WEIGHTS, self.config, self.decoder, self.vocabulary, self.reading
                )
        return self.network
