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
    """The contents of a model folder in memory: network, vocabulary, options and other data."""

    network: CaptionModel | None
    """The network in float32 and eval mode on the CPU. None if it was not read yet, or if the
    folder has only exported graphs."""
    decoder: DecoderConfig
    vocabulary: Vocabulary
    search: SearchOptions = field(default_factory=SearchOptions)
    """The model's default search options."""
    info: dict[str, Any] = field(default_factory=dict)
    """Training data and scores, for information only."""
    frequencies: bytes | None = None
    """Content of the file with document frequencies, which CIDEr needs, or None if it does not
    exist."""
    calibrator: Calibrator | None = None
    """The model that estimates the confidence of captions, or None if it was not fitted."""
    reading: ReadingWords | None = None
    """The words that the model can recognize in a photo without writing a caption (its reading), or
    None if it was trained without a reading."""
    grammar: Grammar | None = None
    """Rules for the endings of captions and for agreement between words, or None without such
    rules."""
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

    def require_weights(self, use: str = "this operation") -> None:
        """Check that the model can run in torch.

        Args:
            use: The operation that needs the weights, as the subject of the error message.

        Raises:
            ConfigError: The model has only graphs, or torch is not installed.
        """
        if not self.has_weights:
            raise ConfigError(
                f"{use} needs weights, but {self.folder} is an exported model without weights; use "
                "the model folder that it was exported from"
            )
        if self.network is None:
            require_extra("torch", use)

    @property
    def model(self) -> CaptionModel:
        """The network, which is read from the folder on first use.

        Raises:
            ConfigError: The model has only graphs, or torch is not installed.
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
