"""Two alternative decoders: one attends after the LSTM, and the other one does not attend.

At step t, y is the previous word. The values h', c' and f' come from the previous step:

    LuongDecoder     run the LSTM, then attend with the new hidden state
        h, c     = LSTM([E y; f'], h', c')      with input feeding, otherwise without f'
        z, alpha = attend(h)
        f        = tanh(W_z z + W_h h)          attentional vector, (N)
        logits   = L_o f

    PlainDecoder     the photo sets only the initial state (attention ``fixed_at_start``)
        h, c     = LSTM(E y, h', c')
        logits   = L_o tanh(E y + L_h h)

The other symbols and the letters in shapes are defined in ``decoder``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from captioner.model.attention import Memory, widen
from captioner.model.decoder import Decoder, State, Step
from captioner.options import DecoderConfig


class LuongDecoder(Decoder):
    """Decoder that runs the LSTM, then attends with the new hidden state.

    Source: Luong et al. 2015 (arXiv:1508.04025), equations 5 and 6, and input feeding in section
    3.3.
    Deviation: One LSTM layer replaces the paper's stack of layers. The initial state is computed
    from the photo's summary (``Memory.summary``). L_o has a bias. Dropout is applied to the
    embedding and before L_o.
    """

    def readout_dim(self, config: DecoderConfig) -> int:
        """Return the size of the attentional vector, N."""
        return config.hidden_dim

    def add_layers(self, config: DecoderConfig) -> None:
        """Create the layers W_z and W_h and, with input feeding, the LSTM's block for f'."""
        hidden_dim, gates = config.hidden_dim, self.GATES * config.hidden_dim
        self.fed_gates = nn.Linear(hidden_dim, gates, bias=False) if config.input_feeding else None
        self.hidden_output = nn.Linear(hidden_dim, hidden_dim, bias=False)  # W_h
        self.context_output = nn.Linear(self.feature_dim, hidden_dim, bias=False)  # W_z

    def start(self, memory: Memory, captions: int = 1) -> State:
        """Compute the initial state. With input feeding, the first f' contains zeros."""
        state = super().start(memory, captions)
        return (
            state if self.fed_gates is None else state._replace(fed=torch.zeros_like(state.hidden))
        )

    def step(self, word_inputs: Tensor, state: State, memory: Memory) -> Step:
        """Advance every caption by one word (see ``Decoder.step``).

        The only output is the attentional vector, (B, R, N).
        """
        if self.fed_gates is not None:
            word_inputs = word_inputs + self.fed_gates(state.fed)
        state = self.recur(word_inputs, state)
        attended = self.attention(state.hidden, memory)
        mixed = self.context_output(attended.context) + self.hidden_output(state.hidden)
        attentional = torch.tanh(widen(mixed))  # (B, R, N)
        if self.fed_gates is not None:
            state = state._replace(fed=attentional)
        beta = torch.ones_like(attentional[..., :1])  # no context gate, so always open
        return Step(state, (attentional,), attended.alphas, beta, attended.chosen)

    def readout(self, embedded: Tensor, *outputs: Tensor) -> Tensor:
        """Compute the logits L_o f, (..., V), from the attentional vector f, (..., N), alone."""
        del embedded
        logits: Tensor = self.word_output(self.dropout(outputs[0]))
        return logits


class PlainDecoder(Decoder):
    """Decoder that sees the photo only in its initial state, and no context afterwards.

    Source: Sutskever et al. 2014 (arXiv:1409.3215) for text, Vinyals et al. 2015
    (arXiv:1411.4555) for photos.
    Deviation: The photo sets the initial state. In Vinyals et al., it is the first input. The
    logits are computed as in `BahdanauDecoder`, but without the context.
    """

    def add_layers(self, config: DecoderConfig) -> None:
        """Create the layer L_h, which maps the hidden state to the size of an embedding."""
        self.hidden_output = nn.Linear(config.hidden_dim, config.embed_dim)

    def step(self, word_inputs: Tensor, state: State, memory: Memory) -> Step:
        """Advance every caption by one word (see ``Decoder.step``).

        The only output is the hidden state, (B, R, N). Beta is 0, because no context reaches the
        word. The attention is `FixedVector`, so the alphas are uniform.
        """
        alphas = self.attention(state.hidden, memory).alphas
        state = self.recur(word_inputs, state)
        beta = torch.zeros_like(state.hidden[..., :1])
        return Step(state, (state.hidden,), alphas, beta)

    def readout(self, embedded: Tensor, *outputs: Tensor) -> Tensor:
        """Compute the logits L_o tanh(E y + L_h h), (..., V).

        Args:
            embedded: Embedding of the previous word, E y, (..., E).
            outputs: Only the hidden state h, (..., N).
        """
        mixed = torch.tanh(embedded + self.hidden_output(outputs[0]))
        logits: Tensor = self.word_output(self.dropout(mixed))
        return logits
