"""Attention over a paged cache agrees with a naive reference, for any order of tokens and any implementation."""

from typing import Any

import pytest
import torch
from torch import Tensor

from recalkv.codec.layer import LayerCodec
from recalkv.runtime import paged, prefill, reference, row_attention
from recalkv.runtime.paged import Chunk, PagedLayer, Tokens
from recalkv.runtime.partial import Scoring
from recalkv.runtime.reference import coded_attention_torch
from recalkv.trellis.rows import TILE
from tests.coded import packed, unpacked
from tests.test_codec_decode import _layer_codec

_WINDOW, _SINKS = 32, 4
_BLOCK, _EXACT_BLOCK = 32, 8
_LENGTHS = (1, 3, 45, 130, 200, 31, 36)


class _Sequences:
    """Random sequences in a cache of shuffled blocks, between which are bytes of other layers."""

    def __init__(
        self,
        codec: LayerCodec,
        lengths: tuple[int, ...],
        sliding: int | None,
        kinds: dict[str, Any],
        device: str = "cpu",
    ) -> None:
        random = torch.Generator().manual_seed(7)
        self.codec, self.lengths, self.sliding, self.scale = codec, lengths, sliding, 0.2
        heads, (dk, dv) = 3 * codec.kv_heads, codec.head_dims
        self.aux = torch.randn(heads, generator=random) if kinds.get("aux") else None
        self.softcap = kinds.get("softcap")
        aux = None if self.aux is None else self.aux.to(device)
        self.layer = PagedLayer(codec, _WINDOW, _SINKS, sliding, Scoring(self.scale, self.softcap, aux), device=device)
        blocks, size = sum(-(-each // _BLOCK) for each in lengths), codec.row_bytes * _BLOCK
        memory = torch.randint(0, 256, (blocks + 1, size + 48), dtype=torch.uint8, generator=random).to(device)
        rows = memory[:, 16 : 16 + size].unflatten(1, (_BLOCK // TILE, codec.row_bytes, TILE))
        exact_blocks, width = sum(-(-each // _EXACT_BLOCK) for each in lengths), codec.kv_heads * (dk + dv)
        exact = torch.full((exact_blocks + 1, _EXACT_BLOCK, 2 * width), torch.nan, device=device)
        self.layer.bind(rows, exact[..., 8 : 8 + width].unflatten(2, (codec.kv_heads, dk + dv)))
        self.tables = [self._table(each, random) for each in (_BLOCK, _EXACT_BLOCK)]
        shapes = (heads, dk), (codec.kv_heads, dk), (codec.kv_heads, dv)
        self.states = [[torch.randn(each, *shape, generator=random) for shape in shapes] for each in lengths]

    def _table(self, size: int, random: torch.Generator) -> list[Tensor]:
        counts = [-(-each // size) for each in self.lengths]
        order, most = 1 + torch.randperm(sum(counts), generator=random), max(counts) + 1
        return [torch.nn.functional.pad(own, (0, most - len(own))) for own in order.split(counts)]

    def slots(self, kind: int, number: int, places: Tensor) -> Tensor:
        size = (_BLOCK, _EXACT_BLOCK)[kind]
        return self.tables[kind][number][places // size] * size + places % size

    def expected(self, number: int) -> Tensor:
        """Return the reference output, (tokens, heads, d_v) in float64."""
        query, key, value = self.states[number]
        places = torch.arange(len(key))
        keys, values = (each.transpose(0, 1)[None] for each in (key, value))
        rounded = unpacked(self.codec, packed(self.codec, keys, values, places[None]), places[None])
        result = []
        for place in range(len(key)):
            low = 0 if self.sliding is None else max(0, place + 1 - self.sliding)
            exact = ((places > place - _WINDOW) | (places < _SINKS))[:, None]
            own = [
                torch.where(exact, each, coded).double()[:, low : place + 1]
                for each, coded in zip((keys[0], values[0]), (rounded[0][0], rounded[1][0]), strict=True)
            ]
            own = [each.repeat_interleave(3, 0) for each in own]
            scores = (own[0] @ query[place].double()[..., None])[..., 0] * self.scale
            if self.softcap:
                scores = self.softcap * (scores / self.softcap).tanh()
            if self.aux is not None:
                scores = torch.cat([scores, self.aux.double()[:, None]], 1)
            result.append((scores.softmax(-1)[:, : own[1].shape[1]][:, None] @ own[1])[:, 0])
        return torch.stack(result)

    def decode(self, places: list[tuple[int, int]]) -> Tensor:
        """Attend from several tokens at once, given as (sequence, place)."""
        own = [[self.states[number][kind][place] for number, place in places] for kind in range(3)]
        query, key, value = map(torch.stack, own)
        tables = [torch.stack([self.tables[kind][number] for number, _ in places]) for kind in range(2)]
        lengths = torch.tensor([place + 1 for _, place in places])
        if not self.layer.writes_as_it_decodes(query):
            self._write(key, value, places)
        return self.layer.decode(query, key, value, Tokens(*tables, lengths, int(lengths.max())))

    def attend(self, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        """Attend from the chunks of one step, given as (sequence, start, count)."""
        states = [torch.cat([self.states[n][kind][s : s + c] for n, s, c in parts]) for kind in range(3)]
        self._write(*states[1:], [(n, s + i) for n, s, c in parts for i in range(c)])
        chunks, first = [], 0
        for number, start, count in parts:
            chunks.append(Chunk(*(table[number] for table in self.tables), first, start, count))
            first += count
        output = torch.full((first, states[0].shape[1], self.codec.head_dims[1]), torch.nan)
        self.layer.attend(*states, chunks, output)
        return list(output.split([count for *_, count in parts]))

    def _write(self, key: Tensor, value: Tensor, places: list[tuple[int, int]]) -> None:
        slots = [torch.cat([self.slots(kind, n, torch.tensor([place])) for n, place in places]) for kind in range(2)]
        self.layer.write(key, value, torch.tensor([place for _, place in places]), *slots)


# Any three of the four factors occur in all their combinations.
@pytest.mark.parametrize(
    ("kernel", "sliding", "kinds", "groups"),
    [
        (kernel, sliding, kinds, 1 + (bool(sliding) + bool(kinds) + kernel) % 2)
        for kernel in (False, True)
        for sliding in (None, 50)
        for kinds in ({}, {"softcap": 4.0, "aux": True})
    ],
)
def test_tokens_and_chunks_in_any_order(
    monkeypatch: pytest.MonkeyPatch, kernel: bool, groups: int, sliding: int | None, kinds: dict[str, Any]
) -> None:
    if kernel:
        monkeypatch.setattr(paged, "layer_loops", lambda *_: None)
        monkeypatch.setattr(paged, "decoding_loops", lambda *_: None)
        monkeypatch.setattr(paged, "kernel_serves", lambda *_: True)
        monkeypatch.setattr(row_attention, "kernel", lambda: coded_attention_torch)
        monkeypatch.setattr(paged, "_TOGETHER", 4)
        monkeypatch.setattr(reference, "_TILES", 8)
    monkeypatch.setattr(paged, "_PIECE", 32)
    texts = _Sequences(_layer_codec(groups), _LENGTHS, sliding, kinds)
    expected = [texts.expected(number) for number in range(len(_LENGTHS))]
    # Prefill all but six tokens of each together; then decode three of each at once, like drafts; then one by one.
    behind = [max(0, length - 6) for length in _LENGTHS]
    parts = [(number, 0, count) for number, count in enumerate(behind) if count]
    # One prompt comes in two chunks.
    parts = [(n, s, c if n != 4 else 90) for n, s, c in parts]
    for (number, start, count), own in zip(parts, texts.attend(parts), strict=True):
        torch.testing.assert_close(own.double(), expected[number][start : start + count], rtol=2e-3, atol=2e-3)
    (own,) = texts.attend([(4, 90, behind[4] - 90)])
    torch.testing.assert_close(own.double(), expected[4][90 : behind[4]], rtol=2e-3, atol=2e-3)
    drafts = [(n, begin + i) for n, begin in enumerate(behind) for i in range(3) if begin + i < _LENGTHS[n]]
    for (number, place), own in zip(drafts, texts.decode(drafts), strict=True):
        torch.testing.assert_close(own.double(), expected[number][place], rtol=2e-3, atol=2e-3)
    for step in range(3, 6):
        tokens = [(number, begin + step) for number, begin in enumerate(behind) if begin + step < _LENGTHS[number]]
        for (number, place), own in zip(tokens, texts.decode(tokens), strict=True):
            torch.testing.assert_close(own.double(), expected[number][place], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("longest", "starts"), [(1000, (126,)), (60, (0, 0))])
def test_a_rehearsal_takes_what_chunks_take(monkeypatch: pytest.MonkeyPatch, longest: int, starts: Any) -> None:
    monkeypatch.setattr(paged, "_PIECE", 32)
    texts, count, attend = _Sequences(_layer_codec(1), (200, 200), None, {}), 60, prefill.attend
    seen: list[list[torch.Size]] = []

    def watched(query: Tensor, rounded: tuple[Tensor, Tensor], *further: Any) -> Tensor:
        seen.append([query.shape, *(each.shape for each in rounded)])
        return attend(query, rounded, *further)

    texts.attend([(0, 0, starts[0] or 1)])
    monkeypatch.setattr(prefill, "attend", watched)
    texts.attend([(number, start, count) for number, start in enumerate(starts)])
    written = texts.layer.rows.clone()
    query, key, value = (each[: count * len(starts)] for each in texts.states[0])
    texts.layer.rehearse(query, key, value, torch.empty_like(query), longest)
    assert seen[0] == seen[1] and torch.equal(texts.layer.rows, written)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sliding", [None, 50])
def test_steps_of_a_graph_with_a_padded_request(
    monkeypatch: pytest.MonkeyPatch, device: str, sliding: int | None
) -> None:
    """On a GPU, the step is captured once and replayed with other tokens, as vLLM does."""
    if device == "cpu":
        for name in ("layer_loops", "decoding_loops"):
            monkeypatch.setattr(paged, name, lambda *_: None)
    texts = _Sequences(_layer_codec(2), _LENGTHS[2:], sliding, {"aux": True}, device)
    expected, begun = [texts.expected(n) for n in range(5)], [length - 3 for length in texts.lengths]
    for number, count in enumerate(begun):
        own = [each[:count].to(device) for each in texts.states[number][1:]]
        places = torch.arange(count)
        slots = [texts.slots(kind, number, places).to(device) for kind in range(2)]
        texts.layer.write(*own, places.to(device), *slots)
    whole = [torch.nn.functional.pad(torch.stack(table), (0, 0, 0, 1)).to(device) for table in texts.tables]
    tables = [each if device == "cpu" else each.int() for each in whole]

    def tensors(step: int) -> list[Tensor]:
        places = torch.tensor([begin + step for begin in begun])
        states = [
            torch.stack([each[kind][place] for each, place in zip(texts.states, places, strict=True)])
            for kind in range(3)
        ]
        slots = [torch.stack([texts.slots(kind, n, place) for n, place in enumerate(places)]) for kind in range(2)]
        padded = [torch.cat([each, torch.ones_like(each[:1])]) for each in states]
        return [*padded, *(torch.nn.functional.pad(each, (0, 1), value=-1) for each in (places, *slots))]

    given = [each.to(device) for each in tensors(0)]

    def run() -> Tensor:
        query, key, value, places, *slots = given
        texts.layer.write(key, value, places, *slots)
        return texts.layer.decode(query, key, value, Tokens(tables[0], tables[1], places + 1, 1024))

    output, replay = run(), None
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = run()
        replay = graph.replay
    for step in range(3):
        for kept, new in zip(given, tensors(step), strict=True):
            kept.copy_(new)
        if replay is None:
            output = run()
        else:
            replay()
        assert output.isfinite().all()
        for number, own in enumerate(output[:5].cpu()):
            torch.testing.assert_close(own.double(), expected[number][begun[number] + step], rtol=2e-3, atol=2e-3)
