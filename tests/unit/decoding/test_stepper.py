"""The real decoder, shown to the search: what it says is what teacher forcing says."""

from __future__ import annotations

import pytest
import torch

from captioner.config import DecoderConfig, SearchOptions
from captioner.decoding.search import search
from captioner.decoding.stepper import DecoderStepper
from captioner.models.decoder import Decoder, build_decoder
from captioner.vocabulary import END, PAD, START, UNKNOWN

B, L, D, V = 3, 4, 8, 12
OPTIONS = SearchOptions(beam_size=4, num_captions=3, max_length=5)


@pytest.fixture
def decoder(tiny_config: DecoderConfig) -> Decoder:
    new = build_decoder(tiny_config, D, V, L).eval()
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.normal_()
        # Training would never leave it so, but the search must not say these whatever the weights.
        new.word_output.bias[[PAD, START, UNKNOWN]] += 3
        new.word_output.bias[END] += 2  # some sentences end, others are cut
    return new


@pytest.fixture
def features() -> torch.Tensor:
    return torch.randn(B, L, D)


def stepper_for(decoder: Decoder, features: torch.Tensor) -> DecoderStepper:
    return DecoderStepper(decoder, decoder.memory(features))


def test_what_is_said_is_what_teacher_forcing_gives(decoder, features) -> None:
    ended = 0
    for photo, hypotheses in enumerate(search(stepper_for(decoder, features), OPTIONS)):
        assert len(hypotheses) == 3
        for found in hypotheses:
            words = [*found.tokens, END] if found.ended else found.tokens
            inputs = torch.tensor([START, *words[:-1]]).reshape(1, 1, -1)
            with torch.no_grad():
                unrolled = decoder(decoder.memory(features[photo : photo + 1]), inputs)
                logits = decoder.readout(unrolled.embedded, *unrolled.outputs)
                log_probs = logits.log_softmax(-1)[0, 0]
            said = log_probs[torch.arange(len(words)), torch.tensor(words)]
            length = len(found.tokens)
            ended += found.ended
            torch.testing.assert_close(found.token_log_probs, said[:length])
            torch.testing.assert_close(found.alphas, unrolled.alphas[0, 0, :length])
            assert found.log_prob == pytest.approx(said.sum().item(), rel=1e-4)
            assert ((found.gates > 0) & (found.gates < 1)).all()
    assert 0 < ended < 9  # both kinds were compared


def test_the_unknown_word_padding_and_the_start_are_never_said(decoder, features) -> None:
    options = SearchOptions(beam_size=200, num_captions=200, max_length=3)

    said = {
        token
        for hypotheses in search(stepper_for(decoder, features), options)
        for found in hypotheses
        for token in found.tokens
    }

    assert said == set(range(4, V))  # every word, and no special token


@torch.no_grad()
def test_a_step_forbids_three_tokens_and_leaves_the_others_as_they_are(decoder, features) -> None:
    stepper = stepper_for(decoder, features)

    advance = stepper.advance(torch.full((B, 1), START))

    forbidden = advance.log_probs.isneginf()
    assert forbidden.sum(dim=-1).tolist() == [[3]] * B
    assert forbidden[..., [PAD, START, UNKNOWN]].all()
    assert advance.alphas.shape == (B, 1, L)
    assert advance.gates.shape == (B, 1)


def test_photos_are_never_copied_for_their_beams(decoder, features) -> None:
    keys, projections = [], []
    scorer = decoder.attention.scorer
    scorer.register_forward_pre_hook(lambda _, args: keys.append(args[1].shape[0]))
    scorer.key.register_forward_hook(lambda _, args, out: projections.append(out.shape))

    stepper = stepper_for(decoder, features)
    search(stepper, OPTIONS)

    assert projections == [(B, L, 7)]  # projected once, for all steps and beams
    assert keys[0] == B
    assert keys == sorted(keys, reverse=True)
    assert stepper.memory.keys.shape[0] == stepper.memory.values.shape[0] == keys[-1]


def test_a_batch_is_its_photos_one_by_one(decoder, features) -> None:
    together = search(stepper_for(decoder, features), OPTIONS)

    for photo in range(B):
        (alone,) = search(stepper_for(decoder, features[photo : photo + 1]), OPTIONS)
        for one, other in zip(alone, together[photo], strict=True):
            assert one.tokens == other.tokens
            torch.testing.assert_close(one.alphas, other.alphas)
            assert one.log_prob == pytest.approx(other.log_prob, rel=1e-5)


@torch.no_grad()
def test_reorder_and_keep_move_the_state_with_its_photo(decoder, features) -> None:
    stepper = stepper_for(decoder, features)
    stepper.advance(torch.full((B, 1), START))
    stepper.reorder(torch.zeros(B, 2, dtype=torch.long))
    stepper.advance(torch.tensor([[4, 5], [6, 7], [8, 9]]))
    before = stepper.state.hidden.clone()

    stepper.reorder(torch.tensor([[1, 0], [1, 1], [0, 1]]))
    swapped = stepper.state.hidden
    stepper.keep(torch.tensor([2, 0]))

    assert torch.equal(swapped, torch.stack([before[0][[1, 0]], before[1][[1, 1]], before[2]]))
    assert torch.equal(stepper.state.hidden, swapped[[2, 0]])
    assert torch.equal(stepper.memory.values, features[[2, 0]])
    assert stepper.batch_size == 2
