"""Kernels in Triton's interpreter against a float64 reference; on a GPU the same tests run compiled."""

import dataclasses
import itertools
import math
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from recalkv.errors import ParameterError
from recalkv.kernels.plan import cover_rank, value_blocks
from recalkv.model.attention import LatentAttention
from recalkv.model.support import group_sizes
from tests import raises, tiny

pytest.importorskip("triton", reason="triton is not installed")


from recalkv.kernels import decoder as module
from recalkv.kernels.attention import latent_attention
from recalkv.kernels.decoder import KernelDecoder, decoder_of, use_kernels
from recalkv.kernels.plan import LayerPlan, joined
from recalkv.kernels.rotary import TileRotary

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Rotary:
    """Rotary module of plain RoPE."""

    def __init__(self, head_dim: int, scaling: float = 1.0) -> None:
        self.inv_freq = 10000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
        self.attention_scaling = scaling


@dataclass
class Case:
    """Attention of one layer: queries over latents."""

    head_dim: int = 32
    kv_heads: int = 4
    query_heads: int = 4
    key_group: int = 2
    value_group: int = 4
    key_rank: int = 24
    rank_step: int = 3
    value_rank: int = 40
    slots: int = 70
    queries: int = 1
    batch: int = 1
    joint: bool = False
    bias: bool = False
    norm: bool = False
    dtype: torch.dtype = torch.float32
    padding: list[int] = field(default_factory=list)
    runs: int | None = None
    scaling: float = 1.0
    spare_slots: int = 0
    value_up: bool = True


def rotate(states: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """Apply plain RoPE in float64 to (tokens, d_h) states."""
    angles = positions.double()[:, None] * rotary.inv_freq
    cos, sin = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
    left, right = states.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Problem:
    """Random tensors of a case, the kernels' result, and a float64 reference by loops over heads."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(case.dtype)

        self.key_heads = group_sizes(case.kv_heads, min(case.key_group, case.kv_heads))
        value_group = min(case.value_group, case.kv_heads)
        self.value_heads = self.key_heads if case.joint else group_sizes(case.kv_heads, value_group)
        # Groups differ in rank unless the step is 0.
        self.key_ranks = [case.key_rank - case.rank_step * number for number in range(len(self.key_heads))]
        if case.key_rank == 19:
            self.key_ranks = [32, 16]
        ranks = [case.value_rank - 5 * number for number in range(len(self.value_heads))]
        self.value_ranks = self.key_ranks if case.joint else ranks
        self.ups, self.value_ups = (
            [normal(rank, count * case.head_dim, scale=rank**-0.5) for rank, count in zip(ranks, heads, strict=True)]
            for ranks, heads in ((self.key_ranks, self.key_heads), (self.value_ranks, self.value_heads))
        )
        if not case.value_up:
            self.value_ups = []
        self.z_k = normal(case.batch, case.slots, sum(self.key_ranks))
        self.z_v = self.z_k if case.joint else normal(case.batch, case.slots, sum(self.value_ranks))
        self.query = normal(case.batch, case.query_heads, case.queries, case.head_dim)
        self.bias = normal(case.kv_heads * case.head_dim) if case.bias else None
        self.norm = (normal(case.head_dim).abs() + 0.5, 1e-6) if case.norm else None
        self.rotary = Rotary(case.head_dim, case.scaling)
        self.first = case.slots - case.queries - case.spare_slots
        self.mask: Tensor | None = None
        if case.padding or case.spare_slots:
            seen = torch.arange(case.slots) <= self.first + torch.arange(case.queries)[:, None]
            self.mask = seen.expand(case.batch, 1, -1, -1).clone()
            for sequence, count in enumerate(case.padding):
                self.mask[sequence, :, :, :count] = False

    def by_kernels(self) -> list[Tensor]:
        case, keys = self.case, joined([up.to(DEVICE) for up in self.ups])
        values = joined([up.to(DEVICE) for up in self.value_ups]) if self.value_ups else None
        groups = self.key_ranks, self.key_heads, self.value_ranks, self.value_heads
        plan = LayerPlan(keys, values, *groups, case.head_dim, 232_448)
        z_k, z_v = self.z_k.to(DEVICE), self.z_v.to(DEVICE)
        seen: Any = self.first + case.queries
        result = latent_attention(
            self.query.to(DEVICE).transpose(1, 2), z_k, None if case.joint else z_v, plan, TileRotary(self.rotary),
            None if self.mask is None else self.mask.to(DEVICE),
            torch.tensor([seen], device=DEVICE) if case.spare_slots else seen,
            case.head_dim**-0.5, None if self.bias is None else self.bias.to(DEVICE),
            None if self.norm is None else (self.norm[0].to(DEVICE), self.norm[1]), 0, case.runs or 0,
        ).cpu()  # fmt: skip
        # Width of each group's part in the input of the output projection.
        n_rep = case.query_heads // case.kv_heads
        inner = [case.head_dim] * len(self.value_ranks) if self.value_ups else self.value_ranks
        widths = [width * heads * n_rep for width, heads in zip(inner, self.value_heads, strict=True)]
        parts = zip(result.split(widths, dim=2), inner, strict=True)
        return [part.unflatten(2, (-1, width)).transpose(1, 2) for part, width in parts]

    def by_loops(self) -> list[Tensor]:
        case, n_rep = self.case, self.case.query_heads // self.case.kv_heads
        positions, places = torch.arange(case.slots), torch.arange(case.queries) + self.first
        heads: list[Tensor] = []
        for sequence in range(case.batch):
            latents = self.z_k[sequence].double().split(self.key_ranks, dim=-1)
            keys = torch.cat([z @ up.double() for z, up in zip(latents, self.ups, strict=True)], dim=-1)
            if self.bias is not None:
                keys = keys + self.bias.double()
            values = self.z_v[sequence].double().split(self.value_ranks, dim=-1)
            group_of = [group for group, count in enumerate(self.value_heads) for _ in range(count)]
            for head in range(case.query_heads):
                own = head // n_rep
                key = keys[:, own * case.head_dim : (own + 1) * case.head_dim]
                if self.norm is not None:
                    key = key * (key.square().mean(-1, keepdim=True) + self.norm[1]).rsqrt() * self.norm[0].double()
                query = rotate(self.query[sequence, head].double(), places, self.rotary)
                scores = query @ rotate(key, positions, self.rotary).T * case.head_dim**-0.5
                mask = positions <= places[:, None]
                if self.mask is not None:
                    mask = self.mask[sequence, 0]
                elif case.queries == 1:
                    mask = torch.ones_like(mask)
                weights = scores.masked_fill(~mask, -math.inf).softmax(-1).nan_to_num(0.0)
                heads.append(weights @ values[group_of[own]].masked_fill(~mask.any(0)[:, None], 0.0))
        results, start = [], 0
        for group, (rank, count) in enumerate(zip(self.value_ranks, self.value_heads, strict=True)):
            own = range(start * n_rep, (start + count) * n_rep)
            stacked = [torch.stack([heads[s * case.query_heads + h] for h in own]) for s in range(case.batch)]
            results.append(torch.stack(stacked))
            assert results[-1].shape[-1] == rank
            if self.value_ups:
                ups = self.value_ups[group].double().unflatten(1, (-1, case.head_dim)).repeat_interleave(n_rep, dim=1)
                results[-1] = torch.einsum("bhqr,rhd->bhqd", results[-1], ups)
            start += count
        return results

    def error(self) -> float:
        """Return the largest difference relative to the largest value."""
        errors = []
        for ours, reference in zip(self.by_kernels(), self.by_loops(), strict=True):
            assert ours.shape == reference.shape
            # Python's max() of a number and NaN can be the number.
            assert bool(ours.isfinite().all())
            errors.append(float((ours.double() - reference).abs().max() / reference.abs().max().clamp_min(1e-9)))
        return max(errors)


pytestmark = pytest.mark.usefixtures("poisoned")

GEOMETRIES = {
    "gqa": Case(kv_heads=2, query_heads=6, key_group=1, value_group=2),
    "uneven last group": Case(kv_heads=3, query_heads=3, key_group=2, value_group=3),
    "one group of all heads": Case(key_group=4, key_rank=50),
    "joint latents": Case(joint=True, key_rank=33),
    "grouped values": Case(value_group=2, value_rank=20),
    "two blocks of a rank": Case(kv_heads=2, query_heads=2, key_rank=83, key_group=1),
    "streamed rank": Case(head_dim=256, kv_heads=2, query_heads=2, key_rank=150, slots=65),
    "aligned ranks": Case(kv_heads=2, query_heads=4, key_group=1, key_rank=19, joint=True, slots=130),
    "wide values": Case(value_rank=150, slots=33),
    "values in the output projection": Case(kv_heads=3, query_heads=6, value_group=2, value_up=False),
    "wide values in the output projection": Case(value_rank=150, slots=33, value_up=False),
    "head dimension 80": Case(head_dim=80, kv_heads=2, query_heads=2, slots=20),
    "head dimension 128": Case(head_dim=128, kv_heads=2, query_heads=4, slots=130),
    "bias": Case(bias=True),
    "norm": Case(norm=True, kv_heads=2, query_heads=4),
    "yarn": Case(scaling=1.2),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometries(name: str) -> None:
    assert Problem(GEOMETRIES[name]).error() < 2e-6


@pytest.mark.parametrize(
    ("slots", "runs"), [(1, None), (2, 1), (17, 3), (63, 1), (64, 2), (65, 2), (150, 1), (150, 2), (150, 3), (300, 4)]
)
def test_lengths_and_runs(slots: int, runs: int | None) -> None:
    assert Problem(Case(kv_heads=2, query_heads=4, slots=slots, runs=runs), seed=slots).error() < 2e-6


@pytest.mark.parametrize("queries", [2, 5, 9])
@pytest.mark.parametrize("query_heads", [2, 6])
def test_several_queries_see_what_lies_before_them(queries: int, query_heads: int) -> None:
    """Several queries attend causally, as in assisted decoding; with 9 queries of 6 heads, a group fills two blocks."""
    assert Problem(Case(kv_heads=2, query_heads=query_heads, queries=queries, joint=True)).error() < 2e-6


@pytest.mark.parametrize("queries", [1, 3])
def test_left_padding_and_empty_slots_of_a_static_cache(queries: int) -> None:
    problem = Problem(Case(batch=3, padding=[0, 30, 65], spare_slots=9, queries=queries, slots=90, runs=2))
    assert problem.mask is not None
    # Latents that are hidden from every query may hold anything.
    hidden = ~problem.mask.any(dim=2)[:, 0]
    problem.z_k[hidden], problem.z_v[hidden] = 0.0, 0.0
    expected = problem.by_loops()
    problem.z_k[hidden], problem.z_v[hidden] = math.nan, math.nan
    for ours, reference in zip(problem.by_kernels(), expected, strict=True):
        torch.testing.assert_close(ours.double(), reference, atol=2e-6, rtol=2e-5)


def test_a_row_that_may_see_nothing_is_zero() -> None:
    problem = Problem(Case(batch=2, padding=[0, 70]))
    assert all(bool((part[1] == 0).all()) for part in problem.by_kernels()) and problem.error() < 2e-6


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize("name", ["bias", "gqa", "joint latents"])
def test_half_precision(name: str, dtype: torch.dtype, bound: float) -> None:
    assert Problem(dataclasses.replace(GEOMETRIES[name], dtype=dtype)).error() < bound


@pytest.mark.parametrize("tile", [64, 128])
def test_far_positions_are_exact(tile: int) -> None:
    """From slot 100,000 on, the rotation angles equal those of float64, which a float32 product would not."""
    plain = Rotary(64)
    anchors, offsets = TileRotary(plain).tables(tile, 100_100, torch.device("cpu"))
    places = torch.arange(50) + 100_003
    angles = places.double()[:, None] * plain.inv_freq
    exact = torch.polar(torch.ones_like(angles), angles)
    start, rest = (torch.complex(table[:, 0], table[:, 1]) for table in (anchors, offsets))
    assert float((start[places // tile] * rest[places % tile] - exact).abs().max()) < 3e-7
    naive = places.float()[:, None] * plain.inv_freq.float()
    assert float((torch.polar(torch.ones_like(naive), naive) - exact).abs().max()) > 1e-3


@pytest.mark.parametrize("rank", [1, 15, 16, 17, 31, 33, 64, 87, 96, 97, 128, 154, 160, 250, 256])
def test_blocks_cover_the_rank(rank: int) -> None:
    first, second = cover_rank(rank)
    assert first + second >= rank
    assert all(size == 0 or size >= 16 and size & (size - 1) == 0 for size in (first, second))
    assert first + second <= max(32, 1.5 * rank)


@pytest.mark.parametrize(("ranks", "heads", "rows"), [([40], [4], 1), ([150, 7], [2, 1], 3), ([300], [8], 9)])
def test_value_blocks_tile_the_context(ranks: list[int], heads: list[int], rows: int) -> None:
    """Every element of every group's context is written exactly once."""
    blocks, block_rows, block_columns = value_blocks(ranks, heads, rows)
    written = [0] * sum(rank * count * rows for rank, count in zip(ranks, heads, strict=True))
    for _, width, _, count, place, stride in blocks:
        assert width <= block_columns and count <= block_rows
        for row, column in itertools.product(range(count), range(width)):
            written[place + row * stride + column] += 1
    assert set(written) == {1}


# --- in the model ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def last_logits(model: Any, ids: Tensor) -> Tensor:
    """Return the logits of a token that is decoded after a prompt."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :-1].to(DEVICE), past_key_values=cache)
    return model(ids[:, -1:].to(DEVICE), past_key_values=cache).logits.cpu()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of queries in each call of the kernels."""
    calls: list[int] = []
    from recalkv.kernels import attention

    def call(query: Tensor, *arguments: Any, **options: Any) -> Tensor:
        calls.append(query.shape[1])
        return latent_attention(query, *arguments, **options)

    monkeypatch.setattr(attention, "latent_attention", call)
    return calls


@torch.no_grad()
def test_many_queries_stay_with_torch(counted: list[int]) -> None:
    _, model, _ = tiny.compressed_pair("llama-gqa", method="loss-aware", values="absorbed", layers=1)
    model, ids = use_kernels(model.to(DEVICE)), tiny.windows(1, 48).to(DEVICE)
    cache = DynamicCache(config=model.config)
    for part in ids.split([10, 17, 16, 5], dim=1):
        model(part, past_key_values=cache)
    # With two query heads per KV head, 17 queries (34 rows) are too many, and 16 (32 rows) are not.
    assert counted == [16, 5]


def test_gradients_and_autocast_stay_with_torch(counted: list[int]) -> None:
    _, model, _ = tiny.compressed_pair("llama-gqa", method="loss-aware")
    model, ids = use_kernels(model.to(DEVICE)), tiny.windows(1, 12).to(DEVICE)

    def step() -> Tensor:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :10], past_key_values=cache)
        return model(ids[:, 10:11], past_key_values=cache).logits

    step().sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None
    with torch.no_grad(), torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        step()
    assert not counted
    with torch.no_grad():
        step()
    assert counted == [1] * 3


def test_a_model_that_left_the_gpu_stays_with_torch(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, _ = tiny.compressed_pair("llama-gqa", method="loss-aware")
    use_kernels(model.to(DEVICE)).cpu()
    monkeypatch.setattr(module, "_interprets", lambda: False)
    model.generate(tiny.windows(1, 12), max_new_tokens=3, do_sample=False)
    assert not counted


def test_written_and_moved_factors_are_seen() -> None:
    _, model, _ = tiny.compressed_pair("llama-gqa", method="loss-aware", values="absorbed")
    layer = use_kernels(model.to(DEVICE)).model.layers[0].self_attn
    plan = layer.decoder.plan()
    # Torch does not track writes through `.data`; the kernels read the parameters themselves.
    layer.key_up[0].data.fill_(7.0)
    assert layer.decoder.plan() is plan and bool((plan.key_up[: layer.key_up[0].numel()] == 7.0).all())
    for change in (lambda: setattr(layer.value_up[0], "data", layer.value_up[0].data.clone()), model.half):
        change()
        plan, old = layer.decoder.plan(), plan
        assert plan is not old and plan.value_up.dtype == layer.value_up[0].dtype
        assert torch.equal(plan.value_up[: layer.value_up[0].numel()], layer.value_up[0].flatten())


def test_a_model_with_kernels_is_saved_whole(tmp_path: Path) -> None:
    """All factors are saved, although they are views of one buffer (safetensors refuses views that overlap)."""
    _, model, _ = tiny.compressed_pair("llama-gqa", method="loss-aware")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    use_kernels(model.to(DEVICE)).save_pretrained(tmp_path)
    tiny.assert_same_tensors(type(model).from_pretrained(tmp_path).state_dict(), expected)


def told_by_auto(model: Any) -> list[str]:
    """Return the warnings of the choice between kernels and torch."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        use_kernels(model, "auto")
    assert all(each.category is UserWarning for each in told)
    return [str(each.message) for each in told]


def test_choice_and_its_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, model, _ = tiny.compressed_pair("llama-gqa", method="loss-aware")
    model = model.to(DEVICE)
    raises(ParameterError, r"kernel='cuda' must be one of: torch, triton, auto", use_kernels, model, "cuda")
    raises(ParameterError, r"kernel=triton cannot be used: the model has no latent attention", use_kernels, dense)
    use_kernels(model)
    assert all(decoder_of(layer.self_attn) for layer in model.model.layers)
    raises(ParameterError, r"float64, and the kernels take float16", use_kernels, model.double())
    (told,) = told_by_auto(model)
    assert "decoding in plain torch: the weights are torch.float64" in told
    monkeypatch.setattr(module, "version", lambda name: "3.5.1")
    with pytest.raises(ParameterError, match=r"triton is 3\.5\.1, and the kernels are tested with 3\.6 and newer"):
        use_kernels(model.float())
    assert not any(decoder_of(layer.self_attn) for layer in model.model.layers)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    raises(ParameterError, "triton is not installed", use_kernels, model.float())


PACKED: dict[str, dict[str, Any]] = {
    "one code": {"method": "recalkv", "bits": 4, "ratio": 0.8},
    "joint, mixed": {"method": "loss-aware", "bits": "mixed", "ratio": 0.75},
    "a window": {"method": "loss-aware", "bits": "mixed", "ratio": 0.75, "exact_window": 5},
}


@pytest.mark.parametrize("settings", PACKED.values(), ids=PACKED)
def test_packed_latents_stay_with_torch(settings: dict[str, Any], counted: list[int]) -> None:
    model = tiny.compressed_pair("llama-gqa", layers=1, **settings)[1].to(DEVICE)
    refused = r"latents of layer 0 are packed in \d+\.\d bits each, and the kernels serve those of 16 bits"
    remedy = r"compress with bits=16, .* Use kernel=torch, or auto\."
    raises(ParameterError, rf"kernel=triton cannot be used: {refused}; {remedy}", use_kernels, model, "triton")
    (told,) = told_by_auto(model)
    assert re.match(f"decoding in plain torch: {refused}", told)
    assert type(model.model.layers[0].self_attn) is LatentAttention
    assert bool(last_logits(model, tiny.windows(1, 9)).isfinite().all()) and not counted


def test_one_layer_of_packed_latents_leaves_all_to_torch() -> None:
    """One layer with packed latents leaves all to torch, like a layer whose attention the kernels do not compute."""
    model = tiny.compressed_pair("llama-gqa", method="loss-aware")[1].to(DEVICE)
    model.model.layers[1] = tiny.compressed_pair("llama-gqa", **PACKED["one code"])[1].to(DEVICE).model.layers[1]
    raises(ParameterError, "latents of layer 1 are packed", use_kernels, model)
    (told,) = told_by_auto(model)
    assert "latents of layer 1 are packed" in told
    assert not any(decoder_of(layer.self_attn) for layer in model.model.layers)


def test_auto_trusts_the_kernels_after_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    model = tiny.compressed_pair("llama-gqa", method="recalkv")[1].to(DEVICE, dtype)
    layer = model.model.layers[1].self_attn
    assert not told_by_auto(model) and decoder_of(layer) is not None
    right = KernelDecoder.attend
    for wrong, message in (
        (lambda *args: right(*args) * 1.1, r"a trial step by the kernels was off by .*e-0\d of"),
        (lambda *args: right(*args) * torch.nan, "a trial step by the kernels was off by nan"),
        (lambda *args: 1 / 0, r"a trial step by the kernels failed \(ZeroDivisionError: division by zero\)"),
    ):
        monkeypatch.setattr(KernelDecoder, "attend", wrong)
        (told,) = told_by_auto(model)
        assert re.search(message, told) and decoder_of(layer) is None


@pytest.mark.parametrize(
    ("device", "dtype", "slow"),
    [("cuda", torch.float32, True), ("cuda", torch.bfloat16, False), ("cpu", torch.float32, False)],
)
def test_auto_leaves_float32_to_torch(
    device: str, dtype: torch.dtype, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = module.why_not_best(torch.device(device), dtype)
    assert reason == ("float32 has no tensor cores here" if slow else None)
    model = tiny.compressed_pair("llama-gqa", method="loss-aware")[1].to(DEVICE)
    monkeypatch.setattr(module, "why_not_best", lambda *_: reason)
    assert told_by_auto(model) == ([f"decoding in plain torch: {reason}."] if slow else [])
    assert (decoder_of(model.model.layers[0].self_attn) is None) == slow
    use_kernels(model, "triton")
    assert decoder_of(model.model.layers[0].self_attn) is not None
