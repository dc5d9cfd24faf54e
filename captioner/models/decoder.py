"""The LSTM decoder: one word a step, in the order of Bahdanau, of Luong, or with no context at all.

Every decoder has one ``step``, which training, search and everything later call, and one
``readout``. Given the previous word y and the previous state (h, c):

    Bahdanau  attend with the previous hidden state, then remember
        z, alpha = attend(h)
        beta     = sigmoid(w_beta h + b_beta)      gate: how much of the context is let in
        h, c     = LSTM([E y; beta z], h, c)
        logits   = L_o tanh(E y + L_h h + L_z beta z)    deep output

    Luong     remember, then attend with the new hidden state
        h, c     = LSTM([E y; f], h, c)            f: the attentional vector before (input feeding)
        z, alpha = attend(h)
        f        = tanh(W_z z + W_h h)             attentional vector
        logits   = L_o f

    Plain     the photo is the first state and nothing else (attention ``fixed_at_start``)
        h, c     = LSTM(E y, h, c)
        logits   = L_o tanh(E y + L_h h)

Notation: B photos, R captions (or beams) a photo, T steps, V vocabulary, L regions, D feature
size, N hidden size, E embedding size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from captioner.config import DecoderConfig
from captioner.errors import ConfigError
from captioner.models.additive import compiled_scores
from captioner.models.attention import (
    AdditiveScorer,
    ConcatScorer,
    Memory,
    Sizes,
    build_attention,
    masked_mean,
    widen,
)
from captioner.models.layout import Layout


class State(NamedTuple):
    """What one word hands to the next."""

    hidden: Tensor
    """(B, R, N)."""
    cell: Tensor
    """(B, R, N)."""
    fed: Tensor | None = None
    """(B, R, N), the attentional vector; None where it is not fed."""

    def map(self, change: Callable[[Tensor], Tensor]) -> State:
        """The same change to every part."""
        return State(*(None if part is None else change(part) for part in self))  # type: ignore[arg-type]

    def crop(self, photos: int, captions: int) -> State:
        """The first so many photos, and the first so many captions of each."""
        return self.map(lambda part: part[:photos, :captions])


class Step(NamedTuple):
    """What one step gives."""

    state: State
    outputs: tuple[Tensor, ...]
    """What ``readout`` turns into logits, (B, R, ...) each."""
    alphas: Tensor
    """(B, R, L), rows sum to 1."""
    gate: Tensor
    """(B, R, 1), 0..1: how much of the context was let in."""
    chosen: Tensor | None
    """(B, R), the region that hard attention took."""


class Packed(NamedTuple):
    """What teacher forcing gives, in the order of a ``Layout``."""

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
    """The same, T steps, in the order of the tokens."""

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


class Decoder(nn.Module):
    """What all orders share; ``step`` and ``readout`` are theirs."""

    def __init__(
        self,
        config: DecoderConfig,
        feature_dim: int,
        vocabulary_size: int,
        regions: int,
        *,
        readout_dim: int,
        styles: int = 0,
    ) -> None:
        """Make the shared layers.

        Args:
            config: Sizes and the kind of attention.
            feature_dim: D, as the encoder gives it.
            vocabulary_size: V.
            regions: Most regions there will be (L).
            readout_dim: Size of what the last layer reads.
            styles: Start tokens beside the vocabulary; see ``Vocabulary.start``.

        Raises:
            ConfigError: Sizes or words of the config do not go together.
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
        # The LSTM's input is split in its word half and the rest: the word half needs no state,
        # so training computes it for all steps in one product.
        self.word_gates = nn.Linear(config.embed_dim, 4 * hidden_dim)
        self.hidden_gates = nn.Linear(hidden_dim, 4 * hidden_dim, bias=False)
        self.gate_norms, self.cell_norm = None, None
        if config.layer_norm:
            self.gate_norms = nn.ModuleList(nn.LayerNorm(hidden_dim) for _ in range(4))
            self.cell_norm = nn.LayerNorm(hidden_dim)
        self.word_output = nn.Linear(readout_dim, vocabulary_size)
        self.dropout = nn.Dropout(config.dropout)
        self.word_table: Tensor | None
        self.register_buffer("word_table", None, persistent=False)

    def initialize(self) -> None:
        """Draw the first weights; the last thing that a constructor does."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.embedding.weight, std=0.5)
        for gates in self.hidden_gates.weight.chunk(4):
            nn.init.orthogonal_(gates)
        hidden_dim = self.hidden_gates.in_features
        with torch.no_grad():  # forget gate: remember at first (Jozefowicz et al. 2015)
            if self.gate_norms is None:
                self.word_gates.bias[hidden_dim : 2 * hidden_dim] = 1.0
            else:  # a norm would take the bias before it away
                self.gate_norms[1].bias.fill_(1.0)  # type: ignore[operator]

    def compile_scores(self) -> None:
        """Have torch.compile make the additive score, if this decoder has one.

        Raises:
            ConfigError: It cannot, e.g. for want of a C++ compiler.
        """
        for module in self.modules():
            if isinstance(module, AdditiveScorer | ConcatScorer):
                module.compiled = True
                some = torch.ones(2, 2, 2, device=self.embedding.weight.device, requires_grad=True)
                try:
                    scores = compiled_scores()(some, some, some[0, 0])
                    torch.autograd.grad(scores.sum(), some)
                except Exception as error:
                    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                    raise ConfigError(
                        f"training.compile: torch.compile fails here ({first[:120]}); install a "
                        "C++ compiler (on a GPU: triton), or leave it out"
                    ) from error

    @torch.no_grad()
    def expect_words(self, counts: Tensor) -> None:
        """Start from the words' frequencies, so that training need not spend its first steps on it.

        Args:
            counts: How often each token is a target in the training captions, (V,).
        """
        share = (counts + 1) / (counts + 1).sum()  # + 1: a token never seen is rare, not impossible
        self.word_output.bias.copy_(share.log())

    def memory(
        self, features: Tensor, mask: Tensor | None = None, summary: Tensor | None = None
    ) -> Memory:
        """Prepare photos (or texts), once each.

        Args:
            features: (B, L, D).
            mask: (B, L), True at real regions; None: all are.
            summary: One vector for the whole, (B, 1, D); None: the mean over the real regions.
        """
        if summary is None:
            summary = masked_mean(features, mask)
        if self.projection is not None:  # a 1 x 1 convolution over the grid
            features = self.projection(features) if self.attention.reads_regions else features
            summary = self.projection(summary)
        return self.attention.memory(features, summary, mask)

    def start(self, memory: Memory, captions: int = 1) -> State:
        """The first state, from the summary: (B, captions, N) each."""
        hidden = torch.tanh(widen(self.init_hidden(memory.summary)))
        cell = torch.tanh(widen(self.init_cell(memory.summary)))
        return State(hidden, cell).map(lambda part: part.expand(-1, captions, -1))

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens of any shape (...,) to (..., E)."""
        embedded: Tensor = self.dropout(self.embedding(tokens))
        return embedded

    @torch.no_grad()
    def tabulate_words(self) -> None:
        """Keep every word's half of the LSTM's input, (V, 4N), for use without training.

        A look-up then takes the place of a product, a seventh of a step's work in the shipped
        model. The weights must not change any more.
        """
        self.word_table = self.word_gates(self.embedding.weight)

    def take_words(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Embed tokens (...,) to (..., E), and to their half of the LSTM's input, (..., 4N)."""
        embedded = self.embed(tokens)
        if self.word_table is not None and not self.training:
            return embedded, nn.functional.embedding(tokens, self.word_table)
        return embedded, self.word_gates(embedded)

    def remember(self, gates: Tensor, cell: Tensor) -> State:
        """The LSTM's update from the sum of its inputs, (B, R, 4N), and its cell, (B, R, N).

        Source: Hochreiter and Schmidhuber 1997 with forget gates; torch's order i, f, g, o. With
        norms: Ba et al. 2016 (arXiv:1607.06450), equations 20 to 22; deviation: the sum of a gate's
        inputs is normalised, gate by gate, and not each input by itself.
        """
        parts = list(widen(gates).chunk(4, dim=-1))
        if self.gate_norms is not None:
            parts = [norm(part) for norm, part in zip(self.gate_norms, parts, strict=True)]
        take, forget, update, show = parts
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(take) * torch.tanh(update)
        seen = cell if self.cell_norm is None else self.cell_norm(cell)
        return State(torch.sigmoid(show) * torch.tanh(seen), cell)

    def step(self, word_gates: Tensor, state: State, memory: Memory) -> Step:
        """One word further. Training, search and everything later call this function.

        Args:
            word_gates: The previous word's half of the LSTM's input, (B, R, 4N).
            state: From the step before, (B, R, ...) each.
            memory: The photos, (B, ...).
        """
        raise NotImplementedError

    def readout(self, embedded: Tensor, *outputs: Tensor) -> Tensor:
        """Logits over the vocabulary.

        Args:
            embedded: The previous word, (..., E).
            *outputs: The step's, (..., n) each.

        Returns:
            (..., V).
        """
        raise NotImplementedError

    def forward(self, memory: Memory, tokens: Tensor) -> Unrolled:
        """Teacher forcing: every step is given the true previous word.

        ``readout`` is left to the caller, so that it runs on the real words only. What ``unroll``
        leaves out is 0 here.

        Args:
            memory: The photos, (B, ...).
            tokens: Words from the start token on, then padding, (B, R, T).
        """
        layout = Layout.of(tokens.cpu())
        packed = self.unroll(memory, tokens, layout)
        return Unrolled(
            layout.unpack(packed.embedded),
            tuple(layout.unpack(part) for part in packed.outputs),
            layout.unpack(packed.alphas),
            layout.unpack(packed.gates),
            None if packed.chosen is None else layout.unpack(packed.chosen),
        )

    def unroll(self, memory: Memory, tokens: Tensor, layout: Layout) -> Packed:
        """Teacher forcing without most of the padding.

        A step runs on the photos and captions up to the last that still has a word there. With the
        longest captions and photos first that is nearly all padding left out. What needs no state
        (embedding, the words' half of the LSTM's input) is one product over all steps.

        Args:
            memory: The photos, (B, ...).
            tokens: Words from the start token on, then padding, (B, R, T).
            layout: Of these tokens.
        """
        embedded = self.embed(tokens.flatten()[layout.places(tokens.device)])  # (P, E)
        state = self.start(memory, layout.captions)
        steps = []
        all_gates = self.word_gates(embedded).split(layout.sizes)
        for gates, (photos, captions) in zip(all_gates, layout.extents, strict=True):
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
    """Attend with the previous hidden state, feed word and context, predict from all three.

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), appendix A.2, with the gate of Xu et al. 2015
    (arXiv:1502.03044), section 4.2.1, and its equations 1-7. Deviation: an LSTM for Bahdanau's GRU
    (as Xu et al.); a tanh before L_o (as in their released code), dropout on the embedding and on
    the readout.
    """

    def __init__(
        self,
        config: DecoderConfig,
        feature_dim: int,
        vocabulary_size: int,
        regions: int,
        styles: int = 0,
    ) -> None:
        embed_dim, hidden_dim = config.embed_dim, config.hidden_dim
        super().__init__(
            config, feature_dim, vocabulary_size, regions, readout_dim=embed_dim, styles=styles
        )
        self.gate = nn.Linear(hidden_dim, 1)
        self.context_gates = nn.Linear(self.feature_dim, 4 * hidden_dim, bias=False)
        self.hidden_output = nn.Linear(hidden_dim, embed_dim)
        self.context_output = nn.Linear(self.feature_dim, embed_dim, bias=False)
        self.initialize()

    def step(self, word_gates: Tensor, state: State, memory: Memory) -> Step:
        """See ``Decoder.step``; outputs: hidden (B, R, N), gated context (B, R, D)."""
        glimpse = self.attention(state.hidden, memory)
        gate = torch.sigmoid(widen(self.gate(state.hidden)))  # (B, R, 1)
        context = gate.to(glimpse.context.dtype) * glimpse.context
        gates = word_gates + self.context_gates(context) + self.hidden_gates(state.hidden)
        state = self.remember(gates, state.cell)
        return Step(state, (state.hidden, context), glimpse.alphas, gate, glimpse.chosen)

    def readout(self, embedded: Tensor, *outputs: Tensor) -> Tensor:
        """Deep output: word (..., E), hidden (..., N) and gated context (..., D) to (..., V)."""
        hidden, context = outputs
        mixed = embedded + self.hidden_output(hidden) + self.context_output(context)
        logits: Tensor = self.word_output(self.dropout(torch.tanh(mixed)))
        return logits


class LuongDecoder(Decoder):
    """Run the LSTM, attend with its new hidden state, predict from the attentional vector.

    Source: Luong et al. 2015 (arXiv:1508.04025), equations 5 and 6; input feeding, section 3.3.
    Deviation: one LSTM layer, its first state made from the summary; L_o has a bias; dropout on
    the embedding and before L_o.
    """

    def __init__(
        self,
        config: DecoderConfig,
        feature_dim: int,
        vocabulary_size: int,
        regions: int,
        styles: int = 0,
    ) -> None:
        hidden_dim = config.hidden_dim
        super().__init__(
            config, feature_dim, vocabulary_size, regions, readout_dim=hidden_dim, styles=styles
        )
        self.fed_gates = (
            nn.Linear(hidden_dim, 4 * hidden_dim, bias=False) if config.input_feeding else None
        )
        self.hidden_output = nn.Linear(hidden_dim, hidden_dim, bias=False)
        self.context_output = nn.Linear(self.feature_dim, hidden_dim, bias=False)
        self.initialize()

    def start(self, memory: Memory, captions: int = 1) -> State:
        """The first state; nothing was attended to before the first word."""
        state = super().start(memory, captions)
        if self.fed_gates is None:
            return state
        return state._replace(fed=torch.zeros_like(state.hidden))

    def step(self, word_gates: Tensor, state: State, memory: Memory) -> Step:
        """See ``Decoder.step``; outputs: the attentional vector (B, R, N)."""
        gates = word_gates + self.hidden_gates(state.hidden)
        if self.fed_gates is not None:
            gates = gates + self.fed_gates(state.fed)
        state = self.remember(gates, state.cell)
        glimpse = self.attention(state.hidden, memory)
        mixed = self.context_output(glimpse.context) + self.hidden_output(state.hidden)
        attentional = torch.tanh(widen(mixed))  # (B, R, N)
        if self.fed_gates is not None:
            state = state._replace(fed=attentional)
        open_gate = torch.ones_like(attentional[..., :1])  # the whole context is let in
        return Step(state, (attentional,), glimpse.alphas, open_gate, glimpse.chosen)

    def readout(self, embedded: Tensor, *outputs: Tensor) -> Tensor:
        """From the attentional vector alone, (..., N) to (..., V)."""
        del embedded
        (attentional,) = outputs
        logits: Tensor = self.word_output(self.dropout(attentional))
        return logits


class PlainDecoder(Decoder):
    """A language model whose first state is the photo: no context at any step, whatever the order.

    Source: Sutskever et al. 2014 (arXiv:1409.3215) for texts, Vinyals et al. 2015
    (arXiv:1411.4555) for photos. Deviation: the photo is the first state, not the first word; the
    readout of ``BahdanauDecoder`` without its context.
    """

    def __init__(
        self,
        config: DecoderConfig,
        feature_dim: int,
        vocabulary_size: int,
        regions: int,
        styles: int = 0,
    ) -> None:
        embed_dim = config.embed_dim
        super().__init__(
            config, feature_dim, vocabulary_size, regions, readout_dim=embed_dim, styles=styles
        )
        self.hidden_output = nn.Linear(config.hidden_dim, embed_dim)
        self.initialize()

    def step(self, word_gates: Tensor, state: State, memory: Memory) -> Step:
        """See ``Decoder.step``; outputs: hidden (B, R, N). The map is even and the gate shut."""
        alphas = self.attention(state.hidden, memory).alphas
        state = self.remember(word_gates + self.hidden_gates(state.hidden), state.cell)
        shut_gate = torch.zeros_like(state.hidden[..., :1])
        return Step(state, (state.hidden,), alphas, shut_gate, None)

    def readout(self, embedded: Tensor, *outputs: Tensor) -> Tensor:
        """From word (..., E) and hidden (..., N) to (..., V)."""
        (hidden,) = outputs
        logits: Tensor = self.word_output(
            self.dropout(torch.tanh(embedded + self.hidden_output(hidden)))
        )
        return logits


def build_decoder(
    config: DecoderConfig, feature_dim: int, vocabulary_size: int, regions: int, styles: int = 0
) -> Decoder:
    """The decoder that a config names.

    Args:
        config: Sizes, kind of attention, order of the step.
        feature_dim: D.
        vocabulary_size: V.
        regions: Most regions there will be (L).
        styles: Start tokens beside the vocabulary; see ``Vocabulary.start``.

    Raises:
        ConfigError: Sizes or words of the config do not go together.
    """
    orders: dict[str, type[BahdanauDecoder | LuongDecoder]] = {
        "bahdanau": BahdanauDecoder,
        "luong": LuongDecoder,
    }
    if config.attention == "fixed_at_start":
        return PlainDecoder(config, feature_dim, vocabulary_size, regions, styles)
    return orders[config.order](config, feature_dim, vocabulary_size, regions, styles)
