"""PMI-TR: a causal decoder whose whole past is a small state of fixed size.

    model = PMI(load_model_config("small"))
    hidden, state = model(tokens, model.initial_state(lanes=4))     # any number of tokens, lanes at any positions
    loss = model.head.loss(hidden, targets)

- pre-norm blocks: window attention, memory (in the layers that carry it), feed-forward with squared ReLU
- text is cut into segments by position. A segment's tokens read the memory that earlier segments left; the segment is written
  when it is complete. So no token sees a later one
- whole segments run in parallel through a layer (memory scope `layer`), or one after the other (scope `global`); tokens within
  an open segment run from its cached part. All give the same function
- embedding wide enough to keep token identity, everything added to the residual stream starts at zero, tied output

Axes: b lane, s segment, t token of a segment, d feature.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import ModelConfig, Remembering
from lm.model.attention import MAX_TOKENS, Rotary, Span, WindowAttention, aligned_span, partial_span
from lm.model.checks import check_call, check_finite, check_lanes
from lm.model.memory import MemoryModule, memory_shapes
from lm.model.state import Memory, Open, Readout, Remembered, State, exact, map_tensors, where_lanes
from lm.model.verbatim import VerbatimWrite, addresses, addresses_at, look_up, recite, table_shape
from lm.model.vocabulary import Embedding, Head


class SquaredReLU(torch.autograd.Function):
    """relu(x)^2 with the derivative 2 relu(x) from one saved tensor: half the memory traffic of composing the two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rectified = x.relu()
        ctx.save_for_backward(rectified)
        return rectified.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (2 * ctx.saved_tensors[0])


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, with a norm of its own for the memory where it carries one."""

    def __init__(self, config: ModelConfig, rotary: Rotary, memory: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = WindowAttention(config.width, config.heads, config.window, rotary)
        self.memory_norm = nn.LayerNorm(config.width) if memory else None
        self.feedforward_norm = nn.LayerNorm(config.width)
        self.rise = nn.Linear(config.width, config.feedforward, bias=False)
        self.fall = nn.Linear(config.feedforward, config.width, bias=False)

    def feedforward(self, x: Tensor) -> Tensor:
        """What the feed-forward network adds to the residual stream."""
        risen = self.rise(self.feedforward_norm(x))
        return self.fall(SquaredReLU.apply(risen) if risen.requires_grad else risen.relu_().square_())


class InitialMemory(nn.Module):
    """The learned memory that every document starts with, one per memory of the state."""

    def __init__(self, config: Remembering, count: int) -> None:
        super().__init__()
        self.count = count
        self.working, self.long_term = memory_shapes(config)
        for i in range(count):
            if math.prod(self.working):
                self.register_parameter(f"working_{i}", nn.Parameter(torch.randn(self.working) * 0.5))
            if math.prod(self.long_term):
                # fragments of slots are normalised at every write; an associative matrix starts with about one association
                scale = 1.0 if self.long_term[1:] == self.working else self.long_term[1] ** -0.5
                self.register_parameter(f"long_term_{i}", nn.Parameter(torch.randn(self.long_term) * scale))

    def forward(self, lanes: int) -> tuple[Memory, ...]:
        """The initial memories, for so many lanes."""

        def level(name: str, shape: tuple[int, ...]) -> Tensor:
            learned = getattr(self, name, None)
            return next(self.parameters()).new_zeros(lanes, *shape) if learned is None else learned.expand(lanes, *shape)

        return tuple(
            Memory(level(f"working_{i}", self.working), level(f"long_term_{i}", self.long_term)) for i in range(self.count)
        )


class PMI(nn.Module):
    """The language model. Holds weights only: the state goes in and comes out."""

    causal: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.layers_with_memory = config.memory_layers
        memory, n = config.memory, len(self.layers_with_memory)
        self.shared_state = memory is not None and memory.scope == "global"
        self.shared_weights = memory is not None and memory.parameters == "tied"
        self.embedding = Embedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.rotary = Rotary(config.width // config.heads, config.segment, config.rotary_base)
        self.blocks = nn.ModuleList(Block(config, self.rotary, i in self.layers_with_memory) for i in range(config.layers))
        _draw(self)  # before there are memories: one seed gives one decoder, with memory on or off
        self.memories = nn.ModuleList(MemoryModule(config) for _ in range(min(n, 1) if self.shared_weights else n))
        _draw(self.memories)
        self.initial_memory = InitialMemory(config, min(n, 1) if self.shared_state else n)
        self.wordings = memory.verbatim if memory is not None else None
        if self.wordings is not None:
            self.verbatim = VerbatimWrite(config.width, self.wordings)
            _draw(self.verbatim)
        self.norm = nn.LayerNorm(config.width)
        self.head = Head(self.embedding)
        self.blueprints: dict[torch.dtype, dict[str, Tensor]] = {}  # what states look like, on the meta device, for checks.py
        self._initialise()
        rows = torch.arange(-config.window, config.segment)
        hidden = rows > torch.arange(config.segment)[:, None]
        self.register_buffer("causal", torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf), persistent=False)

    def _initialise(self) -> None:
        for block in cast(Iterable[Block], self.blocks):
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.fall.weight)
        for memory in cast(Iterable[MemoryModule], self.memories):
            memory.initialise()
        if self.wordings is not None:  # all tokens are written alike, and what is found let through alike, until it is learned
            nn.init.zeros_(self.verbatim.strength.weight)
        # logits of unit variance at the start, however wide the embedding was drawn
        nn.init.constant_(self.norm.weight, 1 / (self.config.embedding_std * math.sqrt(self.config.width)))

    # --- state -------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.causal.device

    @property
    def dtype(self) -> torch.dtype:
        """The type the decoder computes in (memory is float32 at least)."""
        kind = self.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.norm.weight.dtype

    def compute_in(self, dtype: torch.dtype) -> "PMI":
        """Turn the decoder's weights to `dtype` for inference; the memory's stay float32."""
        for module in (self.embedding, self.blocks, self.norm, self.head):
            module.to(dtype)
        return self

    def initial_state(self, lanes: int) -> State:
        """The state of `lanes` new documents."""
        check_lanes(self, lanes)
        blank = self.blank_state(lanes, self.device)
        return blank._replace(memories=map_tensors(torch.Tensor.clone, self.initial_memory(lanes)))

    def blank_state(self, lanes: int, device: torch.device | str) -> State:
        """A state of zeros: the shapes and types that this model's states have."""
        config, kept = self.config, self.causal.dtype

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(lanes, *shape, device=device, dtype=kept)

        cache = (lanes, config.window + config.segment, config.heads, config.width // config.heads)
        return State(
            position=torch.zeros(lanes, dtype=torch.long, device=device),
            keys=tuple(torch.zeros(cache, device=device, dtype=self.dtype) for _ in self.blocks),
            values=tuple(torch.zeros(cache, device=device, dtype=self.dtype) for _ in self.blocks),
            memories=tuple(Memory(*(zeros(*shape) for shape in memory_shapes(config))) for _ in range(self.initial_memory.count)),
            verbatim=zeros(*table_shape(config)),
            readouts=tuple(Readout(*(zeros(*shape) for shape in shapes)) for shapes in self._readout_shapes()),
            open=tuple(Open(*(zeros(*shape) for shape in self._open_shapes())) for _ in self.layers_with_memory),
            tokens=torch.zeros(lanes, config.segment if self.wordings else 0, dtype=torch.long, device=device),
        )

    def reset(self, state: State, lanes: Sequence[int] | Tensor) -> State:
        """`state` with some lanes at the start of a new document."""
        return state.merge(lanes, self.initial_state(len(lanes)))

    def _readout_shapes(self) -> list[list[tuple[int, ...]]]:
        memory = self.config.memory
        if memory is None:
            return []
        rows, d, width = memory.heads * memory.slots, self.config.memory_width, self.config.width
        working, delta = memory.read != "long_term", memory.consolidation == "delta"
        long_slots, heads = memory.keeps_long_term and not delta, (memory.heads, memory.slots, d // memory.heads)
        shapes: list[tuple[int, ...]] = [
            (rows * (working + long_slots), width),
            heads if working else (0, 0, 0),
            (rows, 2 * d) if memory.correction else (0, 0),
            (0, 0, 0),
        ]
        if memory.keeps_long_term:
            shapes[3] = memory_shapes(self.config)[1] if delta else (rows, d) if memory.correction else heads
        return [shapes] * (len(self.memories) if self.shared_state else len(self.layers_with_memory))

    def _open_shapes(self) -> list[tuple[int, ...]]:
        memory, t = self.config.memory, self.config.segment
        assert memory is not None
        corrected = (t, memory.heads, self.config.memory_width // memory.heads) if memory.correction else (0, 0, 0)
        return [(t, self.config.width), corrected, corrected]

    # --- calls -------------------------------------------------------------------------------------------------

    def forward(
        self,
        tokens: Tensor,
        state: State,
        lengths: Tensor | None = None,
        starts: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, State]:
        """Read `tokens [b, t]` behind `state`; returns hidden features [b, t, d] and the state after.

        lengths: how many of each lane's tokens are real (the rest is padding: no effect, hidden features 0).
        starts:  [b, segments] bool, for training on whole segments: a new document begins with that segment. What stands
                 behind a document's end in its last segment is padding; the next segment must start a document.
        donate:  the caller gives `state` up and its storage is reused; for decoding, outside of autograd.
        """
        check_call(self, tokens, state, lengths, starts, donate)
        if starts is not None:
            hidden, state = self._whole_segments(tokens, state, starts)
        else:
            counts = [tokens.shape[1]] * state.lanes if lengths is None else lengths.tolist()
            hidden, state = self._in_pieces(tokens, state, counts, donate)
        if not self.training:
            check_finite(hidden, state, donate)
        return hidden, state

    def _in_pieces(self, tokens: Tensor, state: State, counts: list[int], donate: bool) -> tuple[Tensor, State]:
        """Tokens of any number for lanes at any positions: whole segments together where all can, else up to a boundary."""
        t = self.config.segment
        left, taken = list(counts), [0] * len(counts)
        offsets = (state.position % t).tolist()
        pieces: list[tuple[list[int], list[int], list[int], Tensor]] = []
        while any(left):
            lanes = [b for b, n in enumerate(left) if n]
            whole = min(left[b] for b in lanes) // t
            aligned = whole > 0 and not any(offsets[b] for b in lanes)
            counted = [whole * t if aligned else min(left[b], t - offsets[b]) for b in lanes]
            everyone = len(lanes) == len(counts)
            part = state if everyone else state.select(lanes)
            begins = [taken[b] for b in lanes]
            cut = _gather(tokens, lanes, begins, max(counted))
            if aligned:
                hidden, part = self._whole_segments(cut, part, None)
            else:
                count = torch.tensor(counted, device=self.device)
                own = not everyone and not torch.is_grad_enabled()  # a selection is a copy that may be written to
                hidden, part = self._within_segment(cut, part, count, donate or own)
            if everyone:
                state = part
            elif donate:
                state.merge_(torch.tensor(lanes, device=self.device), part)
            else:
                state = state.merge(lanes, part)
            pieces.append((lanes, begins, counted, hidden))
            for b, n in zip(lanes, counted, strict=True):
                left[b], taken[b], offsets[b] = left[b] - n, taken[b] + n, (offsets[b] + n) % t
        return _assemble(pieces, tokens.shape, self.config.width, self.device, self.dtype), state

    def _whole_segments(self, tokens: Tensor, state: State, starts: Tensor | None) -> tuple[Tensor, State]:
        """Whole segments from a boundary, in groups that run in parallel."""
        t = self.config.segment
        group = 1 if self.shared_state else max(1, MAX_TOKENS // t)
        outputs = []
        for first in range(0, tokens.shape[1] // t, group):
            cut = tokens[:, first * t : (first + group) * t]
            hidden, state = self._group(cut, state, None if starts is None else starts[:, first : first + group])
            outputs.append(hidden)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), state

    def _group(self, tokens: Tensor, state: State, starts: Tensor | None) -> tuple[Tensor, State]:
        """One parallel pass over whole segments."""
        t = self.config.segment
        segments = tokens.shape[1] // t
        position, valid = state.position, []
        for s in range(segments):
            position = position if starts is None else position.masked_fill(starts[:, s], 0)
            valid.append(position)
            position = position + t
        span = aligned_span(self.rotary, self.causal, torch.stack(valid, 1).clamp(max=self.config.window))
        if starts is not None and bool(starts[:, 0].any()):  # what a lane held before is hidden; wiped, not even NaN can show
            state = state._replace(keys=_wiped(state.keys, starts[:, 0]), values=_wiped(state.values, starts[:, 0]))
        # with `starts` the initial memory is touched whether or not one is set: where weights are sharded, every process must
        # gather it in the same calls and give it a gradient (of zeros), whatever its own lanes do
        initial = state.memories if starts is None else self.initial_memory(state.lanes)
        memories = list(state.memories)
        if self.shared_state:
            if starts is not None:
                memories = [where_lanes(starts[:, 0], initial[0], memories[0])]
            shared = self._segment_readouts(memories[0])

        ids = tokens.unflatten(1, (segments, t))
        embedded, found, verbatim = self.embedding(ids), None, state.verbatim

        def recall(j: int, h: Tensor) -> tuple[Readout, Tensor | None]:
            nonlocal found, verbatim
            if j == 0 and self.wordings is not None:
                found, verbatim = self._recite(ids, embedded, h, verbatim, starts)
            if self.shared_state:
                return shared[0 if self.shared_weights else j], found
            before, memories[j] = self._memory(j).scan(memories[j], h, starts, initial[j])
            return self._readouts(self._memory(j), before), found

        x, keys, values, features, _ = self._layers(embedded, state, span, recall, False)
        if self.shared_state:
            memories = [self._write_through(memories[0], features)]
        turned = self.rotary.angles(torch.tensor(segments * t, device=self.device), self.causal.dtype, back=True)
        keys = tuple(self.rotary.rotate(k, turned) for k in keys)
        remembered = Remembered(tuple(memories), verbatim)
        return x.flatten(1, 2), state._replace(position=position, keys=keys, values=values).remembering(remembered)

    def _within_segment(self, tokens: Tensor, state: State, counts: Tensor, donate: bool) -> tuple[Tensor, State]:
        """Up to a segment's rest of tokens for every lane, from the open part; lanes that complete theirs are closed."""
        t, window = self.config.segment, self.config.window
        offset = state.position % t
        begun = (offset == 0).nonzero().squeeze(-1)
        if len(begun) and self.memories:
            state = state._replace(readouts=self._refresh_readouts(state, begun, donate))
        valid = (state.position - offset).clamp(max=window)
        span = partial_span(self.rotary, self.causal, valid, offset, counts, tokens.shape[1])

        found, ids = None, state.tokens
        if self.wordings is not None:
            ids = span.put(ids, tokens, 0, donate)
            offsets = offset[:, None] + torch.arange(tokens.shape[1], device=self.device)
            found = look_up(state.verbatim, addresses_at(ids, offsets, self.wordings))

        def recall(j: int, h: Tensor) -> tuple[Readout, Tensor | None]:
            readout = state.readouts[0 if self.shared_state and self.shared_weights else j]
            return map_tensors(lambda x: x[:, None], readout), found

        embedded = self.embedding(tokens[:, None])
        x, keys, values, features, opened = self._layers(embedded, state, span, recall, donate)
        opened = tuple(
            part._replace(features=span.put(part.features, h[:, 0], 0, donate)) for part, h in zip(opened, features, strict=True)
        )
        state = state._replace(position=state.position + counts, keys=keys, values=values, open=opened, tokens=ids)
        complete = (offset + counts == t).nonzero().squeeze(-1)
        if len(complete) == state.lanes:
            state = self._close(state)
        elif len(complete):
            closed = self._close(state.select(complete))
            if donate:
                state.merge_(complete, closed)
            else:
                state = state.merge(complete, closed)
        return x[:, 0], state

    def _layers(
        self,
        embedded: Tensor,
        state: State,
        span: Span,
        recall: Callable[[int, Tensor], tuple[Readout, Tensor | None]],
        donate: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], list[Tensor], tuple[Open, ...]]:
        """All layers over tokens `embedded [b, s, t, d]`; `recall(j, features)` gives what memory layer j reads: the readout of
        its memory, and what its tokens find in the verbatim tables.

        Returns hidden features, the caches after the span, each memory layer's features and its open part.
        """
        keys, values, opened = [], [], []
        features: list[Tensor] = []
        x = self.dropout(embedded)
        for i, block in enumerate(cast(Iterable[Block], self.blocks)):
            added, k, v = block.attention(block.attention_norm(x), state.keys[i], state.values[i], span, donate)
            x = x + self.dropout(added)
            keys.append(k)
            values.append(v)
            if block.memory_norm is not None:
                j = len(features)
                with _float32(x.device):
                    h = exact(block.memory_norm(x))
                    readout, found = recall(j, h)
                    added, part = self._memory(j).read(readout, h, state.open[j], span, donate)
                    if found is not None:
                        added = added + self._memory(j).verbatim(h, found)
                x = x + self.dropout(added.to(x.dtype))
                features.append(h)
                opened.append(part)
            x = x + self.dropout(block.feedforward(x))
        return self.norm(x), tuple(keys), tuple(values), features, tuple(opened)

    def _close(self, state: State) -> State:
        """Write every lane's complete open segment to memory and move its keys and values into the window."""
        t, window = self.config.segment, self.config.window
        features = [part.features[:, None] for part in state.open]
        with _float32(self.device):
            if self.shared_state:
                memories: tuple[Memory, ...] = (self._write_through(state.memories[0], features),)
            else:
                memories = tuple(
                    self._memory(j).scan(memory, h, None, memory)[1]
                    for j, (memory, h) in enumerate(zip(state.memories, features, strict=True))
                )
        verbatim = state.verbatim
        if self.wordings is not None:
            ids = state.tokens[:, None]
            verbatim = self._recite(ids, self.embedding(ids), features[0], verbatim, None)[1]
        turned = self.rotary.angles(torch.tensor(t, device=self.device), self.causal.dtype, back=True)
        blank = (0, 0, 0, 0, 0, t)
        return state._replace(
            keys=tuple(F.pad(self.rotary.rotate(k[:, t : t + window], turned), blank) for k in state.keys),
            values=tuple(F.pad(v[:, t : t + window], blank) for v in state.values),
            memories=memories,
            verbatim=verbatim,
        )

    # --- memory ------------------------------------------------------------------------------------------------

    def _memory(self, j: int) -> MemoryModule:
        """The weights of memory layer j."""
        return cast(MemoryModule, self.memories[0 if self.shared_weights else j])

    def _recite(self, ids: Tensor, embedded: Tensor, h: Tensor, tables: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
        """What whole segments `ids [b, s, t]` find in the verbatim tables, each behind those before it, and the tables after;
        `h` are the features of the first memory layer."""
        assert self.wordings is not None
        reads = addresses(ids, self.wordings)
        everything = ids.numel() >= self.config.vocab_size
        if everything:
            embedded = self.embedding(torch.arange(self.config.vocab_size, device=self.device))
        with _float32(self.device):
            return recite(tables, reads, self.verbatim(embedded, h, reads, ids if everything else None), starts)

    def _write_through(self, memory: Memory, features: list[Tensor]) -> Memory:
        """The one global memory, written from a segment's features [b, 1, t, d] by each memory layer in turn."""
        with _float32(self.device):
            for j, h in enumerate(features):
                memory = self._memory(j).scan(memory, h, None, memory)[1]
        return memory

    def _readouts(self, module: MemoryModule, memories: Memory) -> Readout:
        """The readouts of memories [b, s, ...]."""
        lanes_segments = memories.long_term.shape[:2]
        with _float32(self.device):
            flat = module.readout(map_tensors(lambda x: x.flatten(0, 1), memories))
        return map_tensors(lambda x: x.unflatten(0, lanes_segments), flat)

    def _segment_readouts(self, memory: Memory) -> list[Readout]:
        """The readouts of the one global memory for one segment, one per set of weights."""
        single = map_tensors(lambda x: x[:, None], memory)
        return [self._readouts(self._memory(j), single) for j in range(len(self.memories))]

    def _refresh_readouts(self, state: State, lanes: Tensor, donate: bool) -> tuple[Readout, ...]:
        """The readouts, with those of `lanes`, which begin a segment, made from their memory."""
        copy = torch.Tensor.index_copy_ if donate else torch.Tensor.index_copy
        refreshed = []
        for r, old in enumerate(state.readouts):
            memory = state.memories[0 if self.shared_state else r]
            chosen = map_tensors(lambda x: x.index_select(0, lanes)[:, None], memory)
            new = self._readouts(self._memory(r), chosen)
            refreshed.append(map_tensors(lambda a, b: copy(a, 0, lanes, b[:, 0]), old, new))
        return tuple(refreshed)


def _draw(part: nn.Module) -> None:
    """Draw the projections in `part` with variance 1 / fan-in."""
    for module in part.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _float32(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, enabled=False)


def _wiped(caches: tuple[Tensor, ...], lanes: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.masked_fill(lanes[:, None, None, None], 0) for x in caches)


def _gather(tokens: Tensor, lanes: list[int], begins: list[int], count: int) -> Tensor:
    """`count` tokens of each of `lanes`, from its own column on; what lies beyond the call is 0."""
    if len(lanes) == tokens.shape[0] and len(set(begins)) == 1 and begins[0] + count <= tokens.shape[1]:
        return tokens[:, begins[0] : begins[0] + count]
    return torch.stack(
        [F.pad(row := tokens[b, i : i + count], (0, count - len(row))) for b, i in zip(lanes, begins, strict=True)]
    )


def _assemble(
    pieces: list[tuple[list[int], list[int], list[int], Tensor]],
    shape: torch.Size,
    width: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    """The hidden features of all pieces, each in its place of the call."""
    if len(pieces) == 1 and len(pieces[0][0]) == shape[0] and set(pieces[0][2]) == {shape[1]}:
        return pieces[0][3]
    result = torch.zeros(*shape, width, device=device, dtype=pieces[0][3].dtype if pieces else dtype)
    for lanes, begins, counts, hidden in pieces:
        for row, (b, begin, count) in enumerate(zip(lanes, begins, counts, strict=True)):
            result[b, begin : begin + count] = hidden[row, :count]
    return result
