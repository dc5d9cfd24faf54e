"""The LSTM decoder: attend, gate, remember, speak.

One step, given the previous word y and the previous state (h, c):

    alpha  = softmax(score(h, keys))         attention, asked by the previous hidden state
    z      = sum_i alpha_i a_i               context
    beta   = sigmoid(w_beta h + b_beta)      gate: how much of the context is let in
    h, c   = LSTM([E y; beta z], h, c)
    logits = L_o tanh(E y + L_h h + L_z beta z)    deep output

Source: Xu et al. 2015 (arXiv:1502.03044), equations 1-10 and section 4.2.1.
Deviation: a tanh before L_o (as in the authors' released code), dropout on the embedding and on
the readout.

Notation: B photos, R captions (or beams) a photo, T steps, V vocabulary, L regions, D feature
size, N hidden size, E embedding size, A attention size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from captioner.config import DecoderConfig
from captioner.models.attention import AdditiveScorer, attend, widen


class Memory(NamedTuple):
    """What depends on the photo alone: made once, shared by all its captions and beams."""

    features: Tensor
    """(B, L, D)."""
    keys: Tensor
    """(B, L, A), the features projected for the scorer."""

    def select(self, rows: Tensor) -> Memory:
        """The photos at these row numbers, (B',)."""
        return Memory(self.features[rows], self.keys[rows])


class State(NamedTuple):
    """What one word hands to the next."""

    hidden: Tensor
    """(B, R, N)."""
    cell: Tensor
    """(B, R, N)."""


class Step(NamedTuple):
    """What one step gives."""

    state: State
    context: Tensor
    """(B, R, D), already gated."""
    alphas: Tensor
    """(B, R, L), rows sum to 1."""
    gate: Tensor
    """(B, R, 1), 0..1."""


class AttentionDecoder(nn.Module):
    """Word by word, with attention over a grid of features."""

    def __init__(self, config: DecoderConfig, feature_dim: int, vocabulary_size: int) -> None:
        super().__init__()
        embed_dim, hidden_dim = config.embed_dim, config.hidden_dim
        self.embedding = nn.Embedding(vocabulary_size, embed_dim)
        self.init_hidden = nn.Linear(feature_dim, hidden_dim)
        self.init_cell = nn.Linear(feature_dim, hidden_dim)
        self.scorer = AdditiveScorer(feature_dim, hidden_dim, config.attention_dim)
        self.gate = nn.Linear(hidden_dim, 1)
        # The LSTM's input is split in its word and context halves: the word half needs no state,
        # so training computes it for all steps in one product.
        self.word_gates = nn.Linear(embed_dim, 4 * hidden_dim)
        self.context_gates = nn.Linear(feature_dim, 4 * hidden_dim, bias=False)
        self.hidden_gates = nn.Linear(hidden_dim, 4 * hidden_dim, bias=False)
        self.hidden_output = nn.Linear(hidden_dim, embed_dim)
        self.context_output = nn.Linear(feature_dim, embed_dim, bias=False)
        self.word_output = nn.Linear(embed_dim, vocabulary_size)
        self.dropout = nn.Dropout(config.dropout)
        self._initialize(hidden_dim)

    def _initialize(self, hidden_dim: int) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.embedding.weight, std=0.5)
        for gates in self.hidden_gates.weight.chunk(4):
            nn.init.orthogonal_(gates)
        with torch.no_grad():  # forget gate: remember at first (Jozefowicz et al. 2015)
            self.word_gates.bias[hidden_dim : 2 * hidden_dim] = 1.0

    @torch.no_grad()
    def expect_words(self, counts: Tensor) -> None:
        """Start from the words' frequencies, so that training need not spend its first steps on it.

        Args:
            counts: How often each token is a target in the training captions, (V,).
        """
        share = (counts + 1) / (counts + 1).sum()  # + 1: a token never seen is rare, not impossible
        self.word_output.bias.copy_(share.log())

    def memory(self, features: Tensor) -> Memory:
        """Project the features for the scorer, once a photo.

        Args:
            features: (B, L, D).
        """
        return Memory(features, self.scorer.keys(features))

    def start(self, memory: Memory, captions: int = 1) -> State:
        """Hidden state and cell from the mean feature, (B, captions, N) each."""
        mean = memory.features.mean(dim=1, keepdim=True)  # (B, 1, D)
        hidden = torch.tanh(widen(self.init_hidden(mean)))
        cell = torch.tanh(widen(self.init_cell(mean)))
        return State(hidden.expand(-1, captions, -1), cell.expand(-1, captions, -1))

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens of any shape (...,) to (..., E)."""
        embedded: Tensor = self.dropout(self.embedding(tokens))
        return embedded

    def step(self, word_gates: Tensor, state: State, memory: Memory) -> Step:
        """One word further. Training, search and everything later call this function.

        Args:
            word_gates: The previous word's half of the LSTM's input, (B, R, 4N).
            state: From the step before, (B, R, N) each.
            memory: The photos, (B, L, ...).
        """
        scores = self.scorer(state.hidden, memory.keys)
        context, alphas = attend(scores, memory.features)
        gate = torch.sigmoid(widen(self.gate(state.hidden)))  # (B, R, 1)
        context = gate.to(context.dtype) * context
        gates = word_gates + self.context_gates(context) + self.hidden_gates(state.hidden)
        take, forget, update, show = widen(gates).chunk(4, dim=-1)
        cell = torch.sigmoid(forget) * state.cell + torch.sigmoid(take) * torch.tanh(update)
        hidden = torch.sigmoid(show) * torch.tanh(cell)
        return Step(State(hidden, cell), context, alphas, gate)

    def readout(self, embedded: Tensor, hidden: Tensor, context: Tensor) -> Tensor:
        """Deep output.

        Args:
            embedded: The previous word, (..., E).
            hidden: The new hidden state, (..., N).
            context: The gated context, (..., D).

        Returns:
            Logits over the vocabulary, (..., V).
        """
        mixed = embedded + self.hidden_output(hidden) + self.context_output(context)
        logits: Tensor = self.word_output(self.dropout(torch.tanh(mixed)))
        return logits

    def forward(self, features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Teacher forcing: every step is given the true previous word.

        Args:
            features: (B, L, D).
            tokens: Words from the start token on, (B, R, T).

        Returns:
            embedded (B, R, T, E), hidden (B, R, T, N), context (B, R, T, D) for ``readout``, which
            is left to the caller so that it runs on the real words only; alphas (B, R, T, L).
        """
        _, captions, steps = tokens.shape
        memory = self.memory(features)
        embedded = self.embed(tokens)  # (B, R, T, E)
        # All steps in one product. unbind, not indexing: its backward stacks once, where indexing
        # would add a mostly empty (B, R, T, 4N) tensor for every step.
        word_gates = self.word_gates(embedded).unbind(2)  # T of (B, R, 4N)
        state = self.start(memory, captions)
        hidden, context, alphas = [], [], []
        for t in range(steps):
            step = self.step(word_gates[t], state, memory)
            state = step.state
            hidden.append(state.hidden)
            context.append(step.context)
            alphas.append(step.alphas)
        return embedded, torch.stack(hidden, 2), torch.stack(context, 2), torch.stack(alphas, 2)
