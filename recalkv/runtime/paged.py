"""Attention over a paged cache of rows: the engine-independent part of a serving engine's attention backend.

A sequence has two block tables: one for rows, which all its tokens have, and one for exact states, indexed by the same
slots, of which the first ``sinks`` and the newest ``window`` are read. A token's query reads the same as in
:class:`recalkv.runtime.cache.CodecLayer`, whether tokens arrive one by one, as drafts, or in chunks.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recalkv.codec.layer import LayerCodec
from recalkv.runtime import prefill
from recalkv.runtime.cpu import decoding_loops, layer_loops
from recalkv.runtime.cpu.records import StepCache
from recalkv.runtime.mean_keys import mean_keys_at, rope_tables
from recalkv.runtime.partial import Scoring, exact_seen, merge, partial_attention, with_sink_logits
from recalkv.runtime.reference import coded_attention_torch
from recalkv.runtime.row_attention import attend_rows, kernel_serves
from recalkv.trellis.rows import TILE, untiled

_PIECE = 8192
"""Earlier slots that a chunk attends to at once: unpacking all would take memory in proportion to the context."""

_TOGETHER = 1024
"""Tokens that are decoded at once: the exact states of each are gathered."""

_ALIKE = 0.7
"""Prompts are batched if the shortest has at least this fraction of the longest's tokens: work on padding is wasted."""


class Tokens(NamedTuple):
    """Tokens to decode: each is treated as a separate sequence, whose length includes the token.

    Attributes
    ----------
    rows, exact : (tokens, any) int64, or int32 on devices with kernels
        Block tables of the tokens' sequences.
    lengths : (tokens,) int64
        Number of slots up to and including each token's.
    longest
        The largest length or an upper bound.
    """

    rows: Tensor
    exact: Tensor
    lengths: Tensor
    longest: int


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence.

    Attributes
    ----------
    rows, exact : (any,) int64
        Block tables of the sequence.
    first
        Index of the first token among the tokens of the step.
    start, size
        Slot of the first token, and number of tokens.
    """

    rows: Tensor
    exact: Tensor
    first: int
    start: int
    size: int


class PagedLayer:
    """One layer of a paged cache.

    Parameters
    ----------
    codec
        Codec of the layer.
    window, sinks
        Number of newest and of first tokens that are read exactly.
    sliding_window
        Number of tokens that are attended to; None for all.
    scoring
        Scale, soft cap and sink logits of the layer's softmax.
    reach
        Maximum number of positions.
    device
        Device of the cache.
    """

    def __init__(
        self,
        codec: LayerCodec,
        window: int,
        sinks: int,
        sliding_window: int | None,
        scoring: Scoring,
        reach: int = 1024,
        device: torch.device | str = "cpu",
    ) -> None:
        device = torch.empty(0, device=device).device  # with its index, as in tensors' own devices
        codec = codec.on(device)
        self._rope_tables = rope_tables(codec.rotation, reach, device)
        self.codec, self.window, self.sinks, self.sliding_window = codec, window, sinks, sliding_window
        self.scoring = scoring
        self.release()
        codec.prepare()

    def bind(self, rows: Tensor, exact: Tensor) -> None:
        """Attach the tensors of a cache.

        Parameters
        ----------
        rows : (blocks, tiles, row bytes, TILE) uint8
            Contiguous except for the first dimension.
        exact : (blocks, slots, kv heads, d_k + d_v)
            Contiguous except for the first two dimensions.
        """
        self.rows, self.exact = rows, exact

    def release(self) -> None:
        """Detach the tensors of the cache."""
        self.rows = torch.zeros(0, 1, self.codec.row_bytes, TILE, dtype=torch.uint8)
        self.exact = torch.zeros(0, 1, self.codec.kv_heads, sum(self.codec.head_dims))

    def writes_as_it_decodes(self, query: Tensor) -> bool:
        """Return whether :meth:`decode` also writes the tokens, as compiled loops do; else call :meth:`write` first."""
        return decoding_loops(self.codec, query) is not None

    def write(self, key: Tensor, value: Tensor, positions: Tensor, slots: Tensor, exact_slots: Tensor) -> None:
        """Write tokens.

        Parameters
        ----------
        key, value : (tokens, kv heads, d)
            Post-RoPE keys.
        positions, slots, exact_slots : (tokens,) int64
            Positions in the sequences, and where rows and exact states go: block times slots per block, plus the place
            in the block. Negative slots are padding, which goes to block 0; compiled loops write no rows for it.
        """
        keys = key.float().transpose(0, 1) - mean_keys_at(self.codec, positions, self._rope_tables)
        values = value.float().transpose(0, 1) - self.codec.value_mean.to(value.device)[:, None]
        loops = layer_loops(self.codec, self.rows)
        if loops is not None:
            loops.pack(keys, values, self.rows, slots)
        else:
            place = slots.clamp_min(0)
            size = TILE * self.rows.shape[1]
            rows = self.codec.pack_centered(keys[None], values[None])[0]
            self.rows[place // size, place % size // TILE, :, place % TILE] = rows
        place, size = exact_slots.clamp_min(0), self.exact.shape[1]
        self.exact[place // size, place % size] = torch.cat([key, value], -1).to(self.exact.dtype)

    def decode(self, query: Tensor, key: Tensor, value: Tensor, tokens: Tokens) -> Tensor:
        """Attend from tokens that are each treated as a separate sequence.

        Parameters
        ----------
        query : (tokens, heads, d_k)
        key, value : (tokens, kv heads, d)
            States of the tokens; read only if :meth:`writes_as_it_decodes`.

        Returns
        -------
        (tokens, heads, d_v)
        """
        loops = decoding_loops(self.codec, query)
        if loops is not None:
            return self._decode_by_loops(loops, query, key, value, tokens)
        if len(query) > _TOGETHER:
            split = (each.split(_TOGETHER) for each in (query, key, value, *tokens[:3]))
            parts = [
                self.decode(q, k, v, Tokens(rows, exact, own, tokens.longest))
                for q, k, v, rows, exact, own in zip(*split, strict=True)
            ]
            return torch.cat(parts)
        lengths, device = tokens.lengths.long(), query.device
        low = self._lowest(lengths)
        first = torch.arange(self.sinks, device=device).expand(len(lengths), -1)
        newest = lengths[:, None] + torch.arange(-self.window, 0, device=device)
        slots = torch.cat([first, newest], 1)
        allowed = exact_seen(first, newest, 0, low[:, None], lengths[:, None], self.window)
        # Unwritten slots may hold NaN: point them at the token's own slot.
        slots = torch.where(allowed, slots, lengths[:, None] - 1)
        keys, values = self._exact_states(tokens.exact, slots, query.dtype)
        output, lse = partial_attention(query[:, :, None], keys, values, self.scoring, allowed[:, None, None])
        begin, end = low.clamp_min(self.sinks), (lengths - self.window).clamp_min(0)
        reach = -(-tokens.longest // (TILE * self.rows.shape[1]))
        attention = None if kernel_serves(self.codec, query) else coded_attention_torch
        coded = attend_rows(
            self.codec, self.rows, query[:, :, None], begin.minimum(end), end, torch.zeros_like(end), self.scoring,
            attention, tokens.rows[:, :reach],
        )  # fmt: skip
        output, lse = merge(output.float(), lse, *coded)
        return with_sink_logits(output, lse, self.scoring)[:, :, 0].to(query.dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, chunks: Sequence[Chunk], output: Tensor) -> None:
        """Attend from chunks whose tokens are written: prompts of similar length in batches, others one by one.

        Parameters
        ----------
        query : (step's tokens, heads, d_k)
        key, value : (step's tokens, kv heads, d)
        output : (step's tokens, heads, d_v)
            Filled for the tokens of the chunks.
        """
        for together in _batches(chunks):
            longest = together[0].size
            states = [each.new_zeros(len(together), longest, *each.shape[1:]) for each in (query, key, value)]
            for padded, each in zip(states, (query, key, value), strict=True):
                for number, chunk in enumerate(together):
                    padded[number, : chunk.size] = each[chunk.first : chunk.first + chunk.size]
            queries, keys, values = (each.transpose(1, 2) for each in states)
            own = self._attend(queries, keys, values, together)
            for number, chunk in enumerate(together):
                output[chunk.first : chunk.first + chunk.size] = own[number, :, : chunk.size].transpose(0, 1)

    def rehearse(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, longest: int) -> None:
        """Dry-run these tokens as the end of a sequence of ``longest`` tokens, or as prompts of that length.

        For an engine that measures the memory of its steps before a cache exists: all slots are in one block.
        ``output``, as in :meth:`attend`, is meaningless.
        """
        count, device = len(query), query.device
        # A longer context takes no more memory, as it is attended to piece by piece; this one's last piece is longest.
        start = max(0, min(longest - count, 2 * _PIECE + self.window - 2))
        blocks = torch.zeros(-(-(start + count) // TILE), dtype=torch.int64, device=device)
        slots = blocks.new_zeros(count)
        chunks = [Chunk(blocks, blocks, n, start, min(longest, count - n)) for n in range(0, count, longest)]
        bound = self.rows, self.exact
        self.bind(
            torch.zeros(1, 1, self.codec.row_bytes, TILE, dtype=torch.uint8, device=device),
            key.new_zeros(1, TILE, self.codec.kv_heads, sum(self.codec.head_dims)),
        )
        try:
            self.write(key, value, start + torch.arange(count, device=device) % longest, slots, slots)
            self.attend(query, key, value, chunks, output)
        finally:
            self.bind(*bound)

    def _decode_by_loops(self, loops: Any, query: Tensor, key: Tensor, value: Tensor, tokens: Tokens) -> Tensor:
        lengths = tokens.lengths
        bounds = torch.stack([lengths, self._lowest(lengths), (lengths - self.window).clamp_min(0)], 1)
        nothing = torch.zeros_like(lengths)
        cache = StepCache(
            self.rows, tokens.rows, bounds, tokens.longest, self.exact, tokens.exact, nothing, nothing, self.sinks,
            self.window,
        )  # fmt: skip
        states = (each.to(self.exact.dtype).contiguous()[:, :, None] for each in (query, key, value))
        output: Tensor = loops.step(cache, *states, None, self.scoring)
        return output.to(query.dtype)

    def _lowest(self, lengths: Tensor) -> Tensor:
        """Return the first slot that the last token of each length attends to."""
        if self.sliding_window is None:
            return torch.zeros_like(lengths)
        return (lengths - self.sliding_window).clamp_min(0)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        """Attend from one chunk, or several that all begin a sequence, padded: (batch, heads, queries, d_v)."""
        start, count = chunks[0].start, chunks[0].size
        low, before = 0 if self.sliding_window is None else max(0, start + 1 - self.sliding_window), None
        if self.sliding_window is None:
            # Whole pieces that all queries of the chunk see.
            low = max(0, start - self.window + 1) // _PIECE * _PIECE
            before = self._older(query, key.dtype, chunks[0], low)
        rounded = [key.new_zeros(*key.shape[:2], start + count - low, each) for each in self.codec.head_dims]
        for number, chunk in enumerate(chunks):
            for padded, each in zip(rounded, self._rounded(chunk, low, start + chunk.size), strict=True):
                padded[number, :, : each.shape[1]] = each
        first = chunks[0].exact[None]
        if low < self.sinks:
            last = min(self.sinks, start + count)
            if start:
                self._put_sinks(rounded, chunks[0], low, last)
            else:
                for padded, each in zip(rounded, (key, value), strict=True):
                    padded[:, :, : last - low] = each[:, :, low:last]
        places = torch.arange(start - self.window + 1, start, device=key.device)
        earlier: Sequence[Tensor] = (
            self._exact_states(first, places.clamp_min(0)[None], key.dtype)
            if start
            else [each.new_zeros(*each.shape[:2], self.window - 1, each.shape[3]) for each in (key, value)]
        )
        exact = [torch.cat(each, 2) for each in zip(earlier, (key, value), strict=True)]
        mask = None
        if self.sliding_window is not None and start + count > self.sliding_window:
            own = torch.arange(start, start + count, device=key.device)[:, None]
            slots = torch.arange(low, start + count, device=key.device)
            mask = ((slots <= own) & (slots > own - self.sliding_window))[None, None]
        return prefill.attend(
            query, (rounded[0], rounded[1]), (exact[0], exact[1]), self.window, start - low, mask, self.scoring, before
        )  # fmt: skip

    def _older(self, query: Tensor, dtype: torch.dtype, chunk: Chunk, end: int) -> tuple[Tensor, Tensor] | None:
        """Attend from a chunk to the slots before ``end`` piece by piece; return output and log-sum-exp, or None."""
        result = None
        for low in range(0, end, _PIECE):
            keys, values = (each[None].to(dtype) for each in self._rounded(chunk, low, low + _PIECE))
            if low < self.sinks:
                self._put_sinks((keys, values), chunk, low, min(self.sinks, low + _PIECE))
            output, lse = partial_attention(query, keys, values, self.scoring)
            result = (output.float(), lse) if result is None else merge(*result, output.float(), lse)
        return result

    def _put_sinks(self, states: Sequence[Tensor], chunk: Chunk, low: int, last: int) -> None:
        """Overwrite the states of slots from ``low`` to before ``last`` with the sequence's exact states."""
        slots = torch.arange(low, last, device=states[0].device)[None]
        exact = self._exact_states(chunk.exact[None], slots, states[0].dtype)
        for padded, each in zip(states, exact, strict=True):
            padded[:, :, : last - low] = each

    def _rounded(self, chunk: Chunk, low: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a sequence's slots as unpacked from their rows: (kv heads, slots, d) float32."""
        loops = layer_loops(self.codec, self.rows)
        if loops is not None:
            keys, values = loops.unpack(self.rows, chunk.rows[None], low, end - low)
        else:
            size = TILE * self.rows.shape[1]
            begin = low // size
            own = self.rows[chunk.rows[begin : -(-end // size)].long()].flatten(0, 1)
            rows = untiled(own, end - begin * size)[low - begin * size :]
            keys, values = self.codec.unpack_centered(rows[None])
        mean = mean_keys_at(self.codec, torch.arange(low, end, device=keys.device), self._rope_tables)
        return (keys + mean)[0], (values + self.codec.value_mean.to(values.device)[:, None])[0]

    def _exact_states(self, blocks: Tensor, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return exact keys and values (sequences, kv heads, any, d) of slots (sequences, any), by a block table."""
        size, place = self.exact.shape[1], slots.clamp_min(0)
        states = self.exact[blocks.gather(1, place // size).long(), place % size].to(dtype).transpose(1, 2)
        keys, values = states.split(list(self.codec.head_dims), -1)
        return keys, values


def _batches(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Yield the chunks that are attended to together, the longest first."""
    for start, own in itertools.groupby(sorted(chunks, key=lambda each: (each.start, -each.size)), lambda c: c.start):
        batch: list[Chunk] = []
        for chunk in own:
            if batch and (start or chunk.size < _ALIKE * batch[0].size):
                yield batch
                batch = []
            batch.append(chunk)
        yield batch
