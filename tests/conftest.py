"""Small things that many tests share; nothing here is downloaded and nothing takes long."""

from __future__ import annotations

import os

# Two tests run at a time, and some start processes: on two cores more threads only wait for each
# other. Before torch is imported, and for the processes too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from captioner.config import DecoderConfig, SearchOptions
from captioner.data.preprocessing import Preprocessing
from captioner.model_folder import StoredModel
from captioner.models.captioner import CaptionModel
from captioner.models.encoder import Encoder
from captioner.vocabulary import Vocabulary

# Waiting for the disk guards against a loss of power, which no test has.
os.fsync = lambda descriptor: None
torch.set_num_threads(1)  # the tests' tensors are so small that threads only cost time
# The same examples on every run and every machine; a slow machine is no failure.
settings.register_profile("captioner", deadline=None, derandomize=True, database=None)
settings.register_profile("quick", settings.get_profile("captioner"), max_examples=20)
settings.load_profile("captioner")

WORDS = ("a", "dog", "runs", "on", "grass", "the", "man", "'s", "hat")


@pytest.fixture(autouse=True)
def _seed() -> None:
    # torch.manual_seed seeds accelerators too, and where there is none notes the whole stack for
    # later: milliseconds, before each of thousands of tests.
    torch.default_generator.manual_seed(0)


@pytest.fixture
def vocabulary() -> Vocabulary:
    return Vocabulary(WORDS)


@pytest.fixture
def tiny_config() -> DecoderConfig:
    """Sizes that all differ, so that a swapped axis cannot pass."""
    return DecoderConfig(embed_dim=5, hidden_dim=6, attention_dim=7, dropout=0.0)


@pytest.fixture
def tiny_model(vocabulary: Vocabulary, tiny_config: DecoderConfig) -> CaptionModel:
    """A whole model with random weights in eval mode: 64 pixels, a grid of 2 x 2, D = 96."""
    preprocessing = Preprocessing(image_size=64)
    encoder = Encoder("timm/test_resnet")
    return CaptionModel(encoder, tiny_config, preprocessing, len(vocabulary)).eval()


@pytest.fixture
def stored_model(
    tiny_model: CaptionModel, tiny_config: DecoderConfig, vocabulary: Vocabulary
) -> StoredModel:
    """The tiny model with all that a model folder holds."""
    search = SearchOptions(beam_size=2, max_length=4)
    return StoredModel(tiny_model, tiny_config, vocabulary, search, {"dataset": "none"})
