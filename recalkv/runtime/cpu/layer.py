"""A layer's codec in the form that compiled loops take: addresses of tables and bases, and the memory of a step."""

import functools
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from recalkv.codec.layer import LayerCodec
from recalkv.runtime.cpu.records import CODE, COLUMNS, PIECE, STEP, StepCache, partial_size, query_size, thread_size
from recalkv.runtime.partial import Scoring
from recalkv.trellis.cpu import compiled
from recalkv.trellis.cpu.codes import partner
from recalkv.trellis.cpu.rows import pack_tiles, segment_table, tables, unpack_tiles
from recalkv.trellis.cpu.threads import record, run, threads_of_torch
from recalkv.trellis.rows import Segment, located

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@functools.cache
def _mean_table(frequencies: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Factor the cosines and sines of a piece's offsets into two matrices of the lowest rank that float32 needs.

    Pairs that rotate little within a piece are nearly polynomials of the offset: 28 rows replace the 64 of SmolLM2.

    Parameters
    ----------
    frequencies
        Bytes of the float64 frequencies.

    Returns
    -------
    reduced : (2 pairs, rows)
    table : (rows, PIECE)
    """
    angles = np.frombuffer(frequencies)[:, None] * np.arange(PIECE)
    left, sizes, right = np.linalg.svd(np.concatenate([np.cos(angles), np.sin(angles)]), full_matrices=False)
    rows = int((sizes > 3e-8 * sizes.max(initial=0)).sum())
    return left[:, :rows] * sizes[:rows], right[:rows]


def _partners(segments: Sequence[Segment]) -> np.ndarray:
    """Return the coefficient indices of a row in the order in which pairs are decoded: (width,) int64."""
    order = list[int]()
    for segment, start, _ in located(segments):
        for pair in zip(*partner(segment.width, segment.bits), strict=True):
            order += [start + number for number in pair]
    return np.array(order, np.int64)


class LayerLoops:
    """Tables, matrices and calls of the loops for one layer's codec; made once.

    Parameters
    ----------
    codec
        Codec of the layer.
    """

    def __init__(self, codec: LayerCodec) -> None:
        self.codec = codec
        self._kept: list[np.ndarray] = []
        groups, start = [], 0
        self.tables: list[tuple[np.ndarray, np.ndarray]] = []
        for keys, values in zip(codec.keys, codec.values, strict=True):
            pair = segment_table(keys.segments, start), segment_table(values.segments, start + keys.row_bytes)
            start += keys.row_bytes + values.row_bytes
            self.tables.append(pair)
            heads = codec.kv_heads_per_code
            value_back = values.back.unflatten(1, (heads, -1)).transpose(0, 1)
            own = {
                "wk": keys.width, "wv": values.width, "key_segments": self._at(pair[0]), "key_count": len(pair[0]),
                "value_segments": self._at(pair[1]), "value_count": len(pair[1]),
                "key_into": self._tensor(keys.into, True), "key_back": self._tensor(keys.back.T, True),
                "value_into": self._tensor(values.into, True), "value_back": self._tensor(value_back, True),
                "partners": self._at(_partners(keys.segments)),
            }  # fmt: skip
            groups.append(record(CODE, own))
        most, wk = max(len(code.segments) for code in codec.keys), max(code.width for code in codec.keys)
        rotation = codec.rotation
        frequencies, pairs = rotation.frequencies.double().numpy(), np.ascontiguousarray(rotation.pairs.numpy())
        reduced, table = (torch.from_numpy(each) for each in _mean_table(frequencies.tobytes()))
        self._frequencies, self._pieces = frequencies, np.zeros((0, 2, len(frequencies)), np.float32)
        self._fixed = {
            "groups": codec.groups, "kv": codec.kv_heads, "dk": codec.head_dims[0], "dv": codec.head_dims[1],
            "row": codec.row_bytes, "pairs": self._at(pairs), "count": len(frequencies),
            "frequencies": self._at(np.ascontiguousarray(frequencies)), "inner": len(table),
            "reduced": self._tensor(reduced, True), "table": self._tensor(table),
            "codes": self._at(np.concatenate(groups)), "key_mean": self._tensor(codec.key_mean),
            "value_mean": self._tensor(codec.value_mean), "lookup": self._at(np.array(tables().addresses, np.int64)),
            "wk": wk, "wv": max(code.width for code in codec.values), "most": most,
            "query_size": query_size(wk, most, len(frequencies), codec.head_dims[0]),
        }  # fmt: skip

    def _at(self, array: np.ndarray) -> int:
        self._kept.append(array)
        return int(array.ctypes.data)

    def _tensor(self, tensor: Tensor, padded: bool = False) -> int:
        lack = -tensor.shape[-1] % COLUMNS if padded else 0
        whole = torch.nn.functional.pad(tensor.detach().float().cpu(), (0, lack)).contiguous()
        return self._at(whole.numpy())

    def _piece_angles(self, pieces: int) -> np.ndarray:
        """Return cosines and sines of the first slots of ``pieces`` pieces; keep a reference while they are read.

        Another thread may replace the array by a longer one.
        """
        found = self._pieces
        if len(found) < pieces:
            angles = np.arange(max(pieces, 2 * len(found)))[:, None] * float(PIECE) * self._frequencies
            found = self._pieces = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        return found

    def step(
        self, cache: StepCache, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring
    ) -> Tensor:
        """Store one token per sequence in a cache with room for it, and attend: (batch, heads, d_v) float32.

        Parameters
        ----------
        cache
            Cache whose lengths include the new tokens.
        query : (batch, heads, 1, d_k)
        key, value : (batch, kv heads, 1, d)
            Contiguous, with the dtype of the exact states, as is the query.
        mask : (batch or 1, slots from the first attended one on) bool, or None
        """
        threads, (batch, heads) = threads_of_torch(), query.shape[:2]
        repeats = heads // self.codec.kv_heads
        out = torch.empty(batch, heads, self.codec.head_dims[1], dtype=torch.float32, device="cpu")
        real = np.array([scoring.scale, scoring.softcap or 0.0], np.float32)
        logits = scoring.sink_logits
        logits = None if logits is None else logits.detach().float().contiguous()
        mask = None if mask is None else mask.contiguous()
        fixed, queries = self._fixed, heads // self.codec.groups
        partial = partial_size(queries, fixed["dv"], fixed["wv"])
        own = thread_size(
            queries, fixed["kv"], fixed["count"], fixed["inner"], fixed["dk"] + fixed["dv"],
            max(fixed["wk"], fixed["wv"]), cache.sinks + cache.ring,
        )  # fmt: skip
        shared = batch * heads * fixed["query_size"]
        scratch = _scratch(shared + threads * (batch * self.codec.groups * partial + own))
        rows, exact, pages = cache.rows, cache.exact, cache.exact_pages
        size, angles = exact.element_size(), self._piece_angles((cache.longest - cache.base) // PIECE + 1)
        fields = {
            **fixed, "partial_size": partial, "thread_size": own, "threads": threads, "batch": batch,
            "repeats": repeats, "tiles": rows.shape[1],
            "block": rows.stride(0), "pages": cache.pages.data_ptr(), "pages_row": cache.pages.stride(0),
            "base": cache.base, "bounds": cache.bounds.data_ptr(), "sinks": cache.sinks, "ring": cache.ring,
            "kind": _KINDS[query.dtype], "rows": rows.data_ptr(), "exact": exact.data_ptr(),
            "exact_pages": 0 if pages is None else pages.data_ptr(),
            "exact_row": 0 if pages is None else pages.stride(0),
            "exact_size": exact.shape[1], "exact_block": exact.stride(0) * size, "exact_token": exact.stride(1) * size,
            "q": query.data_ptr(), "k": key.data_ptr(), "v": value.data_ptr(), "out": out.data_ptr(),
            "first": cache.first.data_ptr(), "offset": cache.offset.data_ptr(),
            "mask": 0 if mask is None else mask.data_ptr(),
            "mask_row": mask.shape[1] if mask is not None and mask.shape[0] > 1 else 0, "real": real.ctypes.data,
            "sink_logits": 0 if logits is None else logits.data_ptr(), "scratch": scratch.ctypes.data,
            "pieces": angles.ctypes.data,
        }  # fmt: skip
        # Compiled at the first step (recalkv.runtime.cpu.decoding_loops): packing does not need it.
        run(compiled("recalkv.runtime.cpu.step").attend, record(STEP, fields))
        return out

    def pack(self, keys: Tensor, values: Tensor, tiles: Tensor, slots: Tensor) -> None:
        """Write the rows of tokens, given their centered states.

        Parameters
        ----------
        keys, values : (kv heads, tokens, d) float32
        tiles : (blocks, tiles, row bytes, TILE) uint8
        slots : (tokens,) int64
            Same as in :func:`recalkv.trellis.cpu.rows.pack_tiles`.
        """
        for group, (pair, codes) in enumerate(
            zip(self.tables, zip(self.codec.keys, self.codec.values, strict=True), strict=True)
        ):
            for table, code, states in zip(pair, codes, (keys, values), strict=True):
                own = states.unflatten(0, (self.codec.groups, -1))[group].transpose(0, 1).flatten(1)
                pack_tiles((own @ code.into).contiguous(), table, tiles, slots)

    def unpack(self, tiles: Tensor, blocks: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Undo :meth:`pack` for ``count`` slots of each sequence from ``start`` on.

        Parameters
        ----------
        blocks : (batch, any) int64
            Block table of each sequence, in the order of its slots.

        Returns
        -------
        keys, values : (batch, kv heads, count, d) float32
            Centered states.
        """
        result: list[list[Tensor]] = [[], []]
        for group, pair in enumerate(self.tables):
            for side, table in enumerate(pair):
                code = (self.codec.keys, self.codec.values)[side][group]
                coefficients = torch.empty(len(blocks), count, code.width, dtype=torch.float32, device="cpu")
                for b in range(len(blocks)):
                    unpack_tiles(tiles, table, blocks[b], start, coefficients[b])
                states = coefficients @ code.back
                result[side].append(states.unflatten(2, (self.codec.kv_heads_per_code, -1)).transpose(1, 2))
        keys, values = (own[0] if len(own) == 1 else torch.cat(own, 1) for own in result)
        return keys, values


_local = threading.local()


def _scratch(size: int) -> np.ndarray:
    """Return this thread's scratch memory, which successive steps reuse."""
    kept: np.ndarray | None = getattr(_local, "scratch", None)
    if kept is None or len(kept) < size:
        kept = _local.scratch = np.empty(size + size // 4, np.float32)
    return kept


def loops_of(codec: LayerCodec) -> LayerLoops:
    """Return the loops of a layer's codec, made on first use."""
    found: LayerLoops | None = codec.__dict__.get("_loops")
    if found is None:
        with torch.inference_mode(False):
            found = codec.__dict__["_loops"] = LayerLoops(codec)
    return found
