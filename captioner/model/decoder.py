"""The LSTM decoder, which generates a caption word by word and looks at the photo before each word.

At step t, y is the previous word, and (h', c') is the previous state of the LSTM:

    z, alpha = attend(h')                             context and attention weights
    beta     = sigmoid(w_beta h' + b_beta)            context gate, one number
    h, c     = LSTM([E y; beta z], h', c')            hidden state and cell state
    logits   = L_o tanh(E y + L_h h + L_z beta z)     scores of the next word ("deep output")

With the context gate, the decoder can rely less on the photo for words such as "of". E y is the
embedding of the word y. The matrices E, L_o, L_h and L_z are named as in Xu et al. 2015.

``step`` computes the first three lines. Training, search, explanation and export all call it.
``readout`` computes the last line. It is separate, so that training can apply it once to all words.
``decoder_variants`` has decoders with a different order of these lines. ``build.build_decoder``
builds the decoder that a config describes.

The word *gate* has two meanings. The layer ``gate`` computes beta, one number per word. The layers
``word_gates`` (U_y, b), ``context_gates`` (U_z) and ``hidden_gates`` (U_h) are three blocks of the
LSTM's weight matrix. Their outputs, (..., 4N), are called gate inputs.

Notation: B photos, R captions (or beams) per photo, T steps, L regions, V vocabulary size.
D feature size (after the projection, if the decoder has one), N hidden size, E embedding size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from captioner.hardware import upload
from captioner.model.attention import Attention, Memory, masked_mean, widen
from captioner.options import DecoderConfig


class State(NamedTuple):
    """The recurrent state between two steps."""

    hidden: Tensor
    """Hidden state h, (B, R, N)."""
    cell: Tensor
    """Cell state c, (B, R, N)."""
    fed: Tensor | None = None
    """Attentional vector of `LuongDecoder`, (B, R, N), or None without input feeding."""

    def select(self, index: Any) -> State:
        """Return the state with ``index`` applied to every tensor, as in ``tensor[index]``."""
        return State(*(None if part is None else part[index] for part in self))  # type: ignore[arg-type]


class Step(NamedTuple):
    """The result of one step."""

    state: State
    """The state after the step."""
    outputs: tuple[Tensor, ...]
    """The inputs that ``readout`` needs in addition to the embedding, each (B, R, ...)."""
    alphas: Tensor
    """Attention weights, (B, R, L). They sum to 1 for each caption."""
    beta: Tensor
    """Context gate between 0 and 1, (B, R, 1)."""
    chosen: Tensor | None = None
    """Index of the region that hard attention chose, (B, R), or None for soft attention."""


class Unrolled(NamedTuple):
    """The results of all steps of teacher forcing."""

    embedded: Tensor
    """Embeddings of the previous words, (B, R, T, E)."""
    outputs: tuple[Tensor, ...]
    """The inputs that ``readout`` needs in addition to the embedding, each (B, R, T, ...)."""
    alphas: Tensor
    """Attention weights, (B, R, T, L)."""
    betas: Tensor
    """Context gates, (B, R, T)."""
    chosen: Tensor | None = None
    """Regions that hard attention chose, (B, R, T), or None for soft attention."""


class Decoder(nn.Module):
    """Base class for decoders. Subclasses implement ``add_layers``, ``step`` and ``readout``."""

    GATES = 4
    """Number of blocks of N gate inputs. An LSTM has 4: the gates i, f and o and the candidate g. A
    GRU has 3."""

    def __init__(
        self,
        config: DecoderConfig,
        attention: Attention,
        feature_dim: int,
        vocabulary_size: int,
        styles: int = 0,
    ) -> None:
        """Create the layers.

        To build the attention as well, call ``build.build_decoder`` instead.

        Args:
            config: The settings of the decoder.
            attention: The attention mechanism.
            feature_dim: Size of the encoder's features, before any projection.
            vocabulary_size: Number of words and special tokens, V.
            styles: Number of caption styles. Each style has its own start token after the V tokens.
        """
        super().__init__()
        embed_dim, hidden_dim = config.embed_dim, config.hidden_dim
        self.feature_dim = config.projection_dim or feature_dim
        self.projection = (
            nn.Linear(feature_dim, self.feature_dim) if config.projection_dim else None
        )
        self.attention = attention
        self.embedding = nn.Embedding(vocabulary_size + styles, embed_dim)
        self.init_hidden = nn.Linear(self.feature_dim, hidden_dim)
        self.init_cell = nn.Linear(self.feature_dim, hidden_dim)
        # The LSTM's matrix is split into blocks for the word, the hidden state and (in a subclass)
        # the context. The word's block does not need the state, so training applies it to the words
        # of all steps at once.
        self.word_gates = nn.Linear(embed_dim, self.GATES * hidden_dim)  # U_y, b
        self.hidden_gates = nn.Linear(hidden_dim, self.GATES * hidden_dim, bias=False)  # U_h
        self.gate_norms, self.cell_norm = None, None
        if config.layer_norm:
            self.gate_norms = nn.ModuleList(nn.LayerNorm(hidden_dim) for _ in range(self.GATES))
            self.cell_norm = nn.LayerNorm(hidden_dim)
        self.word_output = nn.Linear(self.readout_dim(config), vocabulary_size)  # L_o
        self.dropout = nn.Dropout(config.dropout)
        self.add_layers(config)

    def readout_dim(self, config: DecoderConfig) -> int:
        """Return the input size of the output layer L_o. Subclasses may return another size."""
        return config.embed_dim

    def add_layers(self, config: DecoderConfig) -> None:
        """Create the layers that only this decoder has. The constructor calls it last."""
        raise NotImplementedError

    def memory(
        self, features: Tensor, mask: Tensor | None = None, summary: Tensor | None = None
    ) -> Memory:
        """Compute once per photo everything that depends on the photo alone.

        Args:
            features: Features of the regions, (B, L, D).
            mask: True at real regions, (B, L), with at least one real region per photo. It is for
                your own features, which may be padded to the same L. Grids of the encoder do not
                need it.
            summary: The photo as one vector, (B, 1, D). Default: the mean of the real regions.
        """
        if summary is None:
            summary = masked_mean(features, mask)
        if self.projection is not None:  # the same layer for every region and for the summary
            features = self.projection(features) if self.attention.reads_regions else features
            summary = self.projection(summary)
        return self.attention.memory(features, summary, mask)

    def start(self, memory: Memory, captions: int = 1) -> State:
        """Compute the initial state of this many captions per photo from ``memory.summary``.

        Each tensor of the state has the shape (B, captions, N).
        """
        hidden = torch.tanh(widen(self.init_hidden(memory.summary)))
        cell = torch.tanh(widen(self.init_cell(memory.summary)))
        return State(hidden.expand(-1, captions, -1), cell.expand(-1, captions, -1))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings, (..., E), of tokens of any shape, (...), after dropout."""
        return self.dropout(self.embedding(tokens))  # type: ignore[no-any-return]

    def words(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings and the gate inputs of words.

        Args:
            tokens: Token ids of any shape, (...).

        Returns:
            The embeddings E y, (..., E), and the gate inputs U_y E y + b, (..., 4N).
        """
        embedded = self.embed(tokens)
        return embedded, self.word_gates(embedded)

    def recur(self, inputs: Tensor, state: State) -> State:
        """Update the LSTM's state: compute h and c from the previous state h' and c'.

            i, f, g, o = inputs + U_h h',   inputs = U_y E y + b + U_z beta z
            c = sigmoid(f) c' + sigmoid(i) tanh(g)
            h = sigmoid(o) tanh(c)

        i, f and o belong to the input, forget and output gates, and g is the candidate for the cell
        state. The layers are named in the docstring of the module.

        Source: Hochreiter and Schmidhuber 1997 with forget gates. Layer norm: Ba et al. 2016
        (arXiv:1607.06450), equations 20 to 22.
        Deviation: Layer norm is applied to the sum of each gate's inputs, not to each input.

        Args:
            inputs: Gate inputs from the word and the context, (B, R, 4N).
            state: The state after the previous step. Each tensor is (B, R, N).
        """
        gates = widen(inputs + self.hidden_gates(state.hidden)).chunk(4, dim=-1)
        if self.gate_norms is not None:
            gates = tuple(norm(gate) for norm, gate in zip(self.gate_norms, gates, strict=True))
        i, f, g, o = gates
        cell = torch.sigmoid(f) * state.cell + torch.sigmoid(i) * torch.tanh(g)
        normed = cell if self.cell_norm is None else self.cell_norm(cell)
        return State(torch.sigmoid(o) * torch.tanh(normed), cell)

    def step(self, word_inputs: Tensor, state: State, memory: Memory) -> Step:
        """Advance every caption by one word.

        Args:
            word_inputs: Gate inputs of the previous word, (B, R, 4N), from ``words``.
            state: The state after the previous step.
            memory: The memory of the photos, (B, ...).

        Returns:
            The new state, the inputs of ``readout``, the attention weights and the context gate.
        """
        raise NotImplementedError

    def readout(self, embedded: Tensor, *outputs: Tensor) -> Tensor:
        """Compute the logits of the next word, (..., V).

        Args:
            embedded: Embedding of the previous word, (..., E).
            outputs: ``Step.outputs`` or ``Unrolled.outputs``, each (..., size).
        """
        raise NotImplementedError

    def forward(self, memory: Memory, tokens: Tensor) -> Unrolled:
        """Run all steps with the true previous words (teacher forcing).

        Args:
            memory: The memory of the photos, (B, ...).
            tokens: Start token and words, (B, R, T). Captions with fewer than T - 1 words continue
                with the end token and padding.

        Returns:
            The results of all steps. At the end token and at padding, they are finite but
            meaningless.
        """
        tokens = upload(tokens, memory.summary.device)
        embedded, word_inputs = self.words(tokens)  # (B, R, T, E) and (B, R, T, 4N)
        state, steps = self.start(memory, tokens.shape[1]), []
        for inputs in word_inputs.unbind(dim=2):
            step = self.step(inputs, state, memory)
            steps.append(step)
            state = step.state
        outputs = zip(*(step.outputs for step in steps), strict=True)
        chosen = [step.chosen for step in steps if step.chosen is not None]
        return Unrolled(
            embedded,
            tuple(torch.stack(parts, dim=2) for parts in outputs),
            torch.stack([step.alphas for step in steps], dim=2),
            torch.stack([step.beta for step in steps], dim=2).squeeze(-1),
            torch.stack(chosen, dim=2) if chosen else None,
        )


class BahdanauDecoder(Decoder):
    """Decoder that attends with the previous state, then runs the LSTM on the word and the context.

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), appendix A.2. Xu et al. 2015 (arXiv:1502.03044),
    equations 1 to 7, and section 4.2.1 for the context gate.
    Deviation: An LSTM replaces the GRU of Bahdanau et al., as in Xu et al. A tanh precedes L_o, as
    in the released code of Xu et al. Dropout is applied to the embedding and before L_o.
    """

    def add_layers(self, config: DecoderConfig) -> None:
        """Create the layer of the context gate and the layers U_z, L_h and L_z."""
        embed_dim, hidden_dim = config.embed_dim, config.hidden_dim
        self.gate = nn.Linear(hidden_dim, 1)  # w_beta, b_beta: the context gate
        self.context_gates = nn.Linear(self.feature_dim, self.GATES * hidden_dim, bias=False)  # U_z
        self.hidden_output = nn.Linear(hidden_dim, embed_dim)  # L_h
        self.context_output = nn.Linear(self.feature_dim, embed_dim, bias=False)  # L_z

    def step(self, word_inputs: Tensor, state: State, memory: Memory) -> Step:
        """Advance every caption by one word (see ``Decoder.step``).

        The outputs are the hidden state h, (B, R, N), and the gated context beta z, (B, R, D).
        """
        attended = self.attention(state.hidden, memory)
        beta = torch.sigmoid(widen(self.gate(state.hidden)))  # (B, R, 1)
        context = beta.to(attended.context.dtype) * attended.context
        state = self.recur(word_inputs + self.context_gates(context), state)
        return Step(state, (state.hidden, context), attended.alphas, beta, attended.chosen)

    def readout(self, embedded: Tensor, *outputs: Tensor) -> Tensor:
        """Compute the logits L_o tanh(E y + L_h h + L_z beta z), (..., V)."""
        hidden, context = outputs
        mixed = embedded + self.hidden_output(hidden) + self.context_output(context)
        logits: Tensor = self.word_output(self.dropout(torch.tanh(mixed)))
        return logits
