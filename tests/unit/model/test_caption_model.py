"""The training losses: values by hand, padding, and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from toy_encoder import PatchEncoder

from captioner.model.captioner import CaptionModel
from captioner.model.loss_variants import photo_words_loss
from captioner.model.losses import Losses, caption_losses
from captioner.model.preprocessing import Preprocessing
from captioner.options import DecoderConfig
from captioner.text.vocabulary import END, PAD, START

V, L, D = 8, 4, 3
# Two photos; the second has one caption fewer.
CAPTIONS = torch.tensor(
    [
        [[START, 5, 6, 7, END], [START, 4, END, PAD, PAD]],
        [[START, 6, 6, END, PAD], [PAD, PAD, PAD, PAD, PAD]],
    ]
)
WORDS = 4 + 2 + 3


@pytest.fixture
def model() -> CaptionModel:
    config = DecoderConfig(embed_dim=2, hidden_dim=4, attention_dim=5, dropout=0.0)
    return CaptionModel(PatchEncoder(D), config, Preprocessing(image_size=32), V)


@pytest.fixture
def features() -> Tensor:
    return torch.randn(2, L, D)


def losses_of(
    model: CaptionModel, features: Tensor, tokens: Tensor, smoothing: float = 0.0
) -> Losses:
    return caption_losses(model.decoder, model.decoder.memory(features), tokens, smoothing)


def assert_same(one: Losses, other: Losses) -> None:
    for name in Losses._fields:
        torch.testing.assert_close(getattr(one, name), getattr(other, name), msg=name)


def words_by_hand(model: CaptionModel, features: Tensor) -> list[tuple[Tensor, int]]:
    """Log-probabilities and target for every real word, one caption at a time."""
    predictions = []
    for photo, captions in enumerate(CAPTIONS.tolist()):
        for padded in captions:
            caption = [token for token in padded if token != PAD]
            if not caption:
                continue
            inputs = torch.tensor(caption[:-1]).reshape(1, 1, -1)
            memory = model.decoder.memory(features[photo : photo + 1])
            unrolled = model.decoder(memory, inputs)
            logits = model.decoder.readout(unrolled.embedded, *unrolled.outputs)
            log_probs = logits.log_softmax(-1)[0, 0]
            predictions += list(zip(log_probs, caption[1:], strict=True))
    return predictions


def test_loss_ignores_padding(model, features) -> None:
    losses = losses_of(model, features, CAPTIONS)

    predictions = words_by_hand(model, features)
    assert len(predictions) == WORDS
    expected = -sum(log_probs[word].item() for log_probs, word in predictions)
    assert losses.cross_entropy.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("order", ["bahdanau", "luong"])
def test_photos_predict_their_words_from_the_mean_feature(order, features) -> None:
    config = DecoderConfig(embed_dim=2, hidden_dim=4, attention_dim=5, dropout=0.0, order=order)
    model = CaptionModel(PatchEncoder(D), config, Preprocessing(image_size=32), V)
    tokens = torch.tensor([4, 6, 7])  # 5 is no content word
    present = torch.tensor([[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]])

    loss = photo_words_loss(model.decoder, model.decoder.memory(features), tokens, present)

    decoder, mean = model.decoder, features[0].mean(dim=0)
    context = decoder.context_output
    bias = 0 if context.bias is None else context.bias
    output = torch.tanh(context.weight @ mean + bias)
    logits = decoder.word_output.weight @ output + decoder.word_output.bias
    probabilities = logits.exp().tolist()
    total = sum(probabilities[token] for token in (4, 6, 7))
    expected = -sum(math.log(probabilities[token] / total) for token in (6, 7))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_label_smoothing_mixes_in_the_uniform_distribution(model, features) -> None:
    losses = losses_of(model, features, CAPTIONS, 0.2)

    expected = -sum(
        0.8 * log_probs[word].item() + 0.2 * log_probs.mean().item()
        for log_probs, word in words_by_hand(model, features)
    )
    assert losses.cross_entropy.item() == pytest.approx(expected, rel=1e-5)
    assert_same(losses_of(model, features, CAPTIONS), losses_of(model, features, CAPTIONS, 0.0))


def test_losses_of_an_all_padding_batch_are_zero(model, features) -> None:
    losses = losses_of(model, features, torch.full((2, 1, 4), PAD))

    assert [part.item() for part in losses] == [0.0] * 5
    (losses.cross_entropy + losses.attention_penalty).backward()
    for parameter in model.decoder.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


def test_pixels_and_cached_features_give_the_same_features(model) -> None:
    pixels = torch.randint(256, (2, 32, 32, 3), dtype=torch.uint8)
    features = model.encode(pixels)

    assert features.shape == (2, L, D)
    assert torch.equal(model.to_features(pixels), features)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        seen = model.to_features(features.to(dtype))
        assert torch.equal(seen, features.to(dtype).float())
        with torch.autocast("cpu", torch.bfloat16):
            assert model.to_features(features.to(dtype)).dtype == torch.bfloat16
