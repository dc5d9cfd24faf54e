"""LSTM decoders: Bahdanau order, Luong order, or no context.

Every decoder has one ``step``, shared by training, search and explanation, and one ``readout``.
Given the previous word y and the previous state (h, c):

    Bahdanau  attend with the previous hidden state, then run the LSTM
        z, alpha = attend(h)
        beta     = sigmoid(w_beta h + b_beta)      context gate
        h, c     = LSTM([E y; beta z], h, c)
        logits   = L_o tanh(E y + L_h h + L_z beta z)    deep output

    Luong     run the LSTM, then attend with the new hidden state
        h, c     = LSTM([E y; f], h, c)            f: previous attentional vector (input feeding)
        z, alpha = attend(h)
        f        = tanh(W_z z + W_h h)             attentional vector
        logits   = L_o f

    Plain     the photo only sets the initial state (attention ``fixed_at_start``)
        h, c     = LSTM(E y, h, c)
        logits   = L_o tanh(E y + L_h h)

Notation: B photos, R captions (or beams) per photo, T steps, V vocabulary, L regions, D feature
size, N hidden size, E embedding size, P packed positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from captioner.errors import ConfigError, first_line
from captioner.hardware import upload
from captioner.model.attention import (
    Memory,
    Sizes,
    build_attention,
    masked_mean,
    widen,
)
from captioner.model.kernels.additive import AdditiveScores, warm_up_compiled_kernels
from captioner.model.kernels.deferred import DeferredLinear, deferred_gradients
from captioner.model.kernels.dropout import Dropout
from captioner.model.kernels.packing import PackedLayout
from captioner.options import DecoderConfig


class State(NamedTuple):
    """Recurrent state between two steps."""

    hidden: Tensor
    """(B, R, N)."""
    cell: Tensor
    """(B, R, N)."""
    fed: Tensor | None = None
    """(B, R, N), the attentional vector; None without input feeding."""

    def map(self, change: Callable[[Tensor], Tensor]) -> State:
        """Apply a function to every tensor."""
        return State(*(None if part is None else change(part) for part in self))  # type: ignore[arg-type]

    def crop(self, photos: int, captions: int) -> State:
        """Keep the first ``photos`` photos and the first ``captions`` captions of each."""
        return self.map(lambda part: part[:photos, :captions])


class Step(NamedTuple):
    """Result of one step."""

    state: State
    outputs: tuple[Tensor, ...]
    """Inputs of ``readout``, (B, R, ...) each."""
    alphas: Tensor
    """(B, R, L), rows sum to 1."""
    gate: Tensor
    """(B, R, 1), context gate, 0..1."""
    chosen: Tensor | None
    """(B, R), the region chosen by hard attention."""


class Packed(NamedTuple):
    """Result of teacher forcing, in the order of a ``PackedLayout``."""

    embedded: Tensor
    """(P, E)."""
    outputs: tuple[Tensor, ...]
    """(P, ...) each."""
    alphas: Tensor
    """(P, L)."""
    gates: Tensor
    """(P,)."""
    chosen: Tensor | None
    """(P,)."""


class Unrolled(NamedTuple):
    """Result of teacher forcing, in the order of the tokens."""

    embedded: Tensor
    """(B, R, T, E)."""
    outputs: tuple[Tensor, ...]
    """(B, R, T, ...) each."""
    alphas: Tensor
    """(B, R, T, L)."""
    gates: Tensor
    """(B, R, T)."""
    chosen: Tensor | None
    """(B, R, T)."""


class WordGates:
    """The gate inputs of words, computed when a word of their block first occurs.

    Most captions need a tenth of the vocabulary. A block is always computed whole, so that a word's
    values do not depend on the words that were looked up with it or before. On other devices than
    the CPU all are computed at once, as finding those that are missing would wait for the device.
    """

    BLOCK = 64
    """Words that are computed together."""

    def __init__(self, embedding: nn.Embedding, layer: nn.Linear) -> None:
        """Allocate the table.

        Args:
            embedding: (V, E); it must not change.
            layer: Maps E to 4N; it must not change.
        """
        self.embedding, self.layer = embedding, layer
        words = len(embedding.weight)
        # Not touched until it is written, so that words that do not occur take no memory.
        with torch.inference_mode(False):  # to be written in any mode
            self.table = layer.weight.new_empty(words, layer.out_features, requires_grad=False)
        self.missing = set(range(-(-words // self.BLOCK)))
        if self.table.device.type != "cpu":
            self._compute(range(words))

    def look_up(self, tokens: Tensor) -> Tensor:
        """The gate inputs of tokens: (...,) to (..., 4N)."""
        if self.missing and self.table.device.type == "cpu":
            blocks = {token // self.BLOCK for token in tokens.flatten().tolist()}
            for block in blocks & self.missing:
                first = block * self.BLOCK
                self._compute(range(first, min(first + self.BLOCK, len(self.table))))
                self.missing.discard(block)  # last: other threads may look up too
        return nn.functional.embedding(tokens, self.table)

    @torch.no_grad()
    def _compute(self, words: range) -> None:
        rows = slice(words.start, words.stop)
        self.table[rows] = self.layer(self.embedding.weight[rows].to(self.layer.weight.dtype))


class Decoder(nn.Module):
    """Base class; subclasses implement ``add_layers``, ``step`` and ``readout``."""

    context_output: nn.Linear
    """Where the readout reads a context."""

    def __init__(
        self,
        config: DecoderConfig,
        feature_dim: int,
        vocabulary_size: int,
        regions: int,
        styles: int = 0,
    ) -> None:
        """Create the layers.

        Args:
            config: Sizes and attention mechanism.
            feature_dim: D, the encoder's feature size.
            vocabulary_size: V.
            regions: Maximum number of regions (L).
            styles: Number of additional start tokens; see ``Vocabulary.start``.

        Raises:
            ConfigError: Incompatible settings.
        """
        super().__init__()
        hidden_dim = config.hidden_dim
        self.projection = (
            nn.Linear(feature_dim, config.projection_dim) if config.projection_dim else None
        )
        self.feature_dim = config.projection_dim or feature_dim
        sizes = Sizes(self.feature_dim, hidden_dim, config.attention_dim, regions)
        self.attention = build_attention(config, sizes)
        self.embedding = nn.Embedding(vocabulary_size + styles, config.embed_dim)
        self.init_hidden = nn.Linear(self.feature_dim, hidden_dim)
        self.init_cell = nn.Linear(self.feature_dim, hidden_dim)
        # The word's contribution to the LSTM gates needs no state, so it has a layer of its own:
        # training computes it for all steps in one product.
        self.word_gates = nn.Linear(config.embed_dim, 4 * hidden_dim)
        self.hidden_gates = DeferredLinear(hidden_dim, 4 * hidden_dim)
        self.gate_norms, self.cell_norm = None, None
        if config.layer_norm:
            self.gate_norms = nn.ModuleList(nn.LayerNorm(hidden_dim) for _ in range(4))
            self.cell_norm = nn.LayerNorm(hidden_dim)
        self.word_output = nn.Linear(self.readout_dim(config), vocabulary_size)
        self.dropout = Dropout(config.dropout)
        self.cached_word_gates: WordGates | None = None
        self.add_layers(config)
        self.initialize()

    def readout_dim(self, config: DecoderConfig) -> int:
        """Input size of the output layer."""
        return config.embed_dim

    def add_layers(self, config: DecoderConfig) -> None:
        """Create the layers of ``step`` and ``readout`` that the others do not have."""
        raise NotImplementedError

    def initialize(self) -> None:
        """Initialize the weights."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.embedding.weight, std=0.5)
        for gates in self.hidden_gates.weight.chunk(4):
            nn.init.orthogonal_(gates)
        hidden_dim = self.hidden_gates.in_features
        with torch.no_grad():  # open forget gates (Jozefowicz et al. 2015)
            if self.gate_norms is None:
                self.word_gates.bias[hidden_dim : 2 * hidden_dim] = 1.0
            else:  # a norm would cancel the bias in front of it
                self.gate_norms[1].bias.fill_(1.0)  # type: ignore[operator]

    def compile_scores(self) -> None:
        """Compile additive scores with torch.compile, if this decoder uses them.

        Raises:
            ConfigError: Compilation fails, e.g. because there is no C++ compiler.
        """
        for module in self.modules():
            if isinstance(module, AdditiveScores):
                module.compiled = True
                try:
                    warm_up_compiled_kernels(self.embedding.weight)
                except Exception as error:
                    raise ConfigError(
                        f"training.compile: torch.compile failed ({first_line(error):.120}); "
                        "install a C++ compiler (on a GPU: triton), or turn it off"
                    ) from error

    @torch.no_grad()
    def init_output_bias(self, counts: Tensor) -> None:
        """Initialize the output bias to the log word frequencies, which saves the first steps.

        Args:
            counts: Count of each token among the training targets, (V,).
        """
        share = (counts + 1) / (counts + 1).sum()  # + 1: unseen tokens are rare, not impossible
        self.word_output.bias.copy_(share.log())

    def memory(
        self, features: Tensor, mask: Tensor | None = None, summary: Tensor | None = None
    ) -> Memory:
        """Precompute what depends on the photo (or text) alone.

        Args:
            features: (B, L, D).
            mask: (B, L), True at real regions; None: all regions are real.
            summary: The photo as one vector, (B, 1, D); None: the mean over real regions.
        """
        if summary is None:
            summary = masked_mean(features, mask)
        if self.projection is not None:  # a 1 x 1 convolution over the grid
            features = self.projection(features) if self.attention.reads_regions else features
            summary = self.projection(summary)
        return self.attention.memory(features, summary, mask)

    def start(self, memory: Memory, captions: int = 1) -> State:
        """Initial state, computed from the summary: (B, captions, N) each."""
        hidden = torch.tanh(widen(self.init_hidden(memory.summary)))
        cell = torch.tanh(widen(self.init_cell(memory.summary)))
        return State(hidden, cell).map(lambda part: part.expand(-1, captions, -1))

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens of any shape (...,) to (..., E)."""
        embedded: Tensor = self.dropout(self.embedding(tokens))
        return embedded

    def cache_word_gates(self) -> None:
        """Keep the gate inputs of words, (V, 4N), for inference.

        A lookup then replaces a product, one seventh of a step's work in the shipped model. The
        weights must not change afterwards.
        """
        self.cached_word_gates = WordGates(self.embedding, self.word_gates)

    def embed_with_gates(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings (..., E) and gate inputs (..., 4N) of tokens (...,)."""
        embedded = self.embed(tokens)
        if self.cached_word_gates is not None and not self.training:
            return embedded, self.cached_word_gates.look_up(tokens)
        return embedded, self.word_gates(embedded)

    def lstm_cell(self, gates: Tensor, cell: Tensor) -> State:
        """LSTM update from the summed gate inputs, (B, R, 4N), and the cell, (B, R, N).

        Source: Hochreiter and Schmidhuber 1997 with forget gates; gates in torch's order i, f, g,
        o. Layer norm: Ba et al. 2016 (arXiv:1607.06450), equations 20 to 22; deviation: the sum of
        a gate's inputs is normalized, gate by gate, not each input separately.
        """
        parts = list(widen(gates).chunk(4, dim=-1))
        if self.gate_norms is not None:
            parts = [norm(part) for norm, part in zip(self.gate_norms, parts, strict=True)]
        i, f, g, o = parts
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        normed = cell if self.cell_norm is None else self.cell_norm(cell)
        return State(torch.sigmoid(o) * torch.tanh(normed), cell)

    def step(self, word_gates: Tensor, state: State, memory: Memory) -> Step:
        """Advance every caption by one word; the only decode step there is.

        Args:
            word_gates: Gate inputs of the previous word, (B, R, 4N).
            state: State after the previous step, (B, R, ...) each.
            memory: The photos, (B, ...).
        """
        raise NotImplementedError

    def readout(self, embedded: Tensor, *outputs: Tensor) -> Tensor:
        """Logits over the vocabulary.

        Args:
            embedded: Embedding of the previous word, (..., E).
            *outputs: ``Step.outputs``, (..., n) each.

        Returns:
            (..., V).
        """
        raise NotImplementedError

    def readout_photo(self, memory: Memory) -> Tensor:
        """Logits from the summary in place of a context, without a word or a state: (B, V).

        Not for attention ``fixed_at_start``, whose readout has no context.
        """
        context: Tensor = widen(self.context_output(memory.summary.squeeze(1)))
        logits: Tensor = self.word_output(self.dropout(torch.tanh(context)))
        return logits

    def forward(self, memory: Memory, tokens: Tensor) -> Unrolled:
        """Teacher forcing: every step gets the true previous word.

        The caller applies ``readout``, so that it can skip padding. Positions that ``unroll``
        skips are 0.

        Args:
            memory: The photos, (B, ...).
            tokens: Start token, words, then padding, (B, R, T), on the CPU, see
                ``PackedLayout``.
        """
        layout = PackedLayout.of(tokens.cpu())
        packed = self.unroll(memory, upload(tokens, memory.summary.device), layout)
        return Unrolled(
            layout.unpack(packed.embedded),
            tuple(layout.unpack(part) for part in packed.outputs),
            layout.unpack(packed.alphas),
            layout.unpack(packed.gates),
            None if packed.chosen is None else layout.unpack(packed.chosen),
        )

    def unroll(self, memory: Memory, tokens: Tensor, layout: PackedLayout) -> Packed:
        """Teacher forcing that skips most of the padding.

        Each step runs on the photos and captions up to the last one with a word at that step. With
        the longest captions and photos first, that skips nearly all padding. Embeddings and word
        gates need no state and are computed in one product over all steps.

        Args:
            memory: The photos, (B, ...).
            tokens: Start token, words, then padding, (B, R, T).
            layout: The layout of ``tokens``.
        """
        embedded = self.embed(tokens.flatten()[layout.indices(tokens.device)])  # (P, E)
        state = self.start(memory, layout.captions)
        steps = []
        all_gates = self.word_gates(embedded).split(layout.sizes)
        with deferred_gradients(self):
            for gates, (photos, captions) in zip(all_gates, layout.extents, strict=True):
                if (photos, captions) != state.hidden.shape[:2]:  # else a copy going back
                    state = state.crop(photos, captions)
                    memory = memory.select(slice(photos))
                steps.append(self.step(gates.view(photos, captions, -1), state, memory))
                state = steps[-1].state

        def packed(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat([part.flatten(0, 1) for part in parts])

        chosen = [step.chosen for step in steps if step.chosen is not None]
        return Packed(
            embedded,
            tuple(packed(parts) for parts in zip(*(step.outputs for step in steps), strict=True)),
            packed([step.alphas for step in steps]),
            packed([step.gate for step in steps]).squeeze(-1),
            packed(chosen) if chosen else None,
        )


class BahdanauDecoder(Decoder):
    """Attend with the previous hidden state, then run the LSTM on word and gated context.

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), appendix A.2, with the gate of Xu et al. 2015
    (arXiv:1502.03044), section 4.2.1, and its equations 1-7. Deviation: an LSTM instead of
    Bahdanau's GRU (as Xu et al.); a tanh before L_o (as in their released code), dropout on the
    embedding and the readout.
    """

    def add_layers(self, config: DecoderConfig) -> None:
        """See ``Decoder.add_layers``."""
        embed_dim, hidden_dim = config.embed_dim, config.hidden_dim
        self.gate = nn.Linear(hidden_dim, 1)
        self.context_gates = DeferredLinear(self.feature_dim, 4 * hidden_dim)
        self.hidden_output = nn.Linear(hidden_dim, embed_dim)
        self.context_output = nn.Linear(self.feature_dim, embed_dim, bias=False)

    def step(self, word_gates: Tensor, state: State, memory: Memory) -> Step:
        """See ``Decoder.step``; outputs: hidden state (B, R, N), gated context (B, R, D)."""
        attended = self.attention(state.hidden, memory)
        gate = torch.sigmoid(widen(self.gate(state.hidden)))  # (B, R, 1)
        context = gate.to(attended.context.dtype) * attended.context
        gates = word_gates + self.context_gates(context) + self.hidden_gates(state.hidden)
        state = self.lstm_cell(gates, state.cell)
        return Step(state, (state.hidden, context), attended.alphas, gate, attended.chosen)

    def readout(self, embedded: Tensor, *outputs: Tensor) -> Tensor:
        """Deep output: word (..., E), hidden state (..., N), gated context (..., D) to (..., V)."""
        hidden, context = outputs
        mixed = embedded + self.hidden_output(hidden) + self.context_output(context)
        logits: Tensor = self.word_output(self.dropout(torch.tanh(mixed)))
        return logits


class LuongDecoder(Decoder):
    """Run the LSTM, then attend with its new hidden state.

    Source: Luong et al. 2015 (arXiv:1508.04025), equations 5 and 6; input feeding, section 3.3.
    Deviation: one LSTM layer with its initial state computed from the summary; L_o has a bias;
    dropout on the embedding and before L_o.
    """

    def readout_dim(self, config: DecoderConfig) -> int:
        """That of the attentional vector."""
        return config.hidden_dim

    def add_layers(self, config: DecoderConfig) -> None:
        """See ``Decoder.add_layers``."""
        hidden_dim = config.hidden_dim
        self.fed_gates = (
            DeferredLinear(hidden_dim, 4 * hidden_dim) if config.input_feeding else None
        )
        self.hidden_output = DeferredLinear(hidden_dim, hidden_dim)
        self.context_output = DeferredLinear(self.feature_dim, hidden_dim)

    def start(self, memory: Memory, captions: int = 1) -> State:
        """Initial state; the attentional vector before the first word is zero."""
        state = super().start(memory, captions)
        if self.fed_gates is None:
            return state
        return state._replace(fed=torch.zeros_like(state.hidden))

    def step(self, word_gates: Tensor, state: State, memory: Memory) -> Step:
        """See ``Decoder.step``; outputs: attentional vector (B, R, N)."""
        gates = word_gates + self.hidden_gates(state.hidden)
        if self.fed_gates is not None:
            gates = gates + self.fed_gates(state.fed)
        state = self.lstm_cell(gates, state.cell)
        attended = self.attention(state.hidden, memory)
        mixed = self.context_output(attended.context) + self.hidden_output(state.hidden)
        attentional = torch.tanh(widen(mixed))  # (B, R, N)
        if self.fed_gates is not None:
            state = state._replace(fed=attentional)
        gate = torch.ones_like(attentional[..., :1])  # this order has no gate: fully open
        return Step(state, (attentional,), attended.alphas, gate, attended.chosen)

    def readout(self, embedded: Tensor, *outputs: Tensor) -> Tensor:
        """Logits from the attentional vector alone, (..., N) to (..., V)."""
        del embedded
        (attentional,) = outputs
        logits: Tensor = self.word_output(self.dropout(attentional))
        return logits


class PlainDecoder(Decoder):
    """A language model initialized from the photo; no step uses a context.

    Source: Sutskever et al. 2014 (arXiv:1409.3215) for texts, Vinyals et al. 2015
    (arXiv:1411.4555) for photos. Deviation: the photo sets the initial state instead of being the
    first input; the readout is that of ``BahdanauDecoder`` without the context.
    """

    def add_layers(self, config: DecoderConfig) -> None:
        """See ``Decoder.add_layers``."""
        self.hidden_output = nn.Linear(config.hidden_dim, config.embed_dim)

    def step(self, word_gates: Tensor, state: State, memory: Memory) -> Step:
        """See ``Decoder.step``; outputs: hidden state (B, R, N). Uniform map, closed gate."""
        alphas = self.attention(state.hidden, memory).alphas
        state = self.lstm_cell(word_gates + self.hidden_gates(state.hidden), state.cell)
        gate = torch.zeros_like(state.hidden[..., :1])
        return Step(state, (state.hidden,), alphas, gate, None)

    def readout(self, embedded: Tensor, *outputs: Tensor) -> Tensor:
        """Word (..., E) and hidden state (..., N) to logits (..., V)."""
        (hidden,) = outputs
        logits: Tensor = self.word_output(
            self.dropout(torch.tanh(embedded + self.hidden_output(hidden)))
        )
        return logits


def build_decoder(
    config: DecoderConfig, feature_dim: int, vocabulary_size: int, regions: int, styles: int = 0
) -> Decoder:
    """Build the decoder that a config describes.

    Args:
        config: Sizes, attention mechanism, order of the step.
        feature_dim: D.
        vocabulary_size: V.
        regions: Maximum number of regions (L).
        styles: Number of additional start tokens; see ``Vocabulary.start``.

    Raises:
        ConfigError: Incompatible settings.
    """
    kind: type[Decoder] = {"bahdanau": BahdanauDecoder, "luong": LuongDecoder}[config.order]
    if config.attention == "fixed_at_start":
        kind = PlainDecoder
    return kind(config, feature_dim, vocabulary_size, regions, styles)
