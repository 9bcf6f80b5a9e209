"""Model kinds x ways to generate, by pairwise covering arrays: tokens and logits equal those of the dense twin.

A kind is the content of a checkpoint; its twin is the dense model with the reconstructed weights. Quantized latents
have no twin: their reference is the same model without a cache, and the twin if rounding is disabled.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, DynamicCache, StaticCache
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import AttentionMaskInterface

from recalkv.errors import ParameterError
from recalkv.kernels.decoder import use_kernels
from recalkv.kernels.plan import MAX_ROWS
from recalkv.model import residual_window
from recalkv.model.families import FAMILIES as DESCRIPTIONS
from recalkv.model.spec import LatentSpec
from recalkv.model.values import MAX_EXPLICIT_QUERIES
from tests import tiny
from tests.covering import cover, covering, settings
from tests.tiny import FAMILIES, FURTHER_FAMILIES, windows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# --- cases -----------------------------------------------------------------------------------------------------------

METHODS: dict[str, dict[str, Any]] = {
    "joint": {"method": "loss-aware"}, "separate": {"method": "loss-aware", "joint": False},
    "whole-values": {"method": "recalkv"}, "grouped": {"method": "palu"},
}  # fmt: skip
RATIOS = {16: 0.5, 4: 0.65, 3: 0.65, "mixed": 0.8}


@dataclass(frozen=True)
class Kind:
    """Content of a checkpoint, and the value path that short queries take."""

    family: str
    latents: str
    group: int | str
    bits: int | str
    values: str
    window: int = 0


@dataclass(frozen=True)
class Way:
    """Way to generate tokens, to feed them in pieces, or to pass queries to the kernels."""

    way: str
    prompt: int
    cache: str
    attention: str


ALIKE = ("llama-linear-rope", "llama3-rope", "llama-bias", "mistral-full")
"""Families that differ from others only in frequencies, biases or a disabled window; tried as further families."""

KINDS: dict[str, list[Any]] = {
    "family": [family for family in FAMILIES if family not in ALIKE],
    "latents": list(METHODS),
    "group": [1, 2, "all"],
    # All equal bits are served alike; other tests cover rows of each width.
    "bits": [16, 4, 3, "mixed"],
    "values": ["fused", "absorbed", "reconstructed"],
    "window": [0, 5],
}
TOKENS = ["greedy", "beams", "padded", "turns", "lookup", "assisted", "chunks7"]
LOGITS = ["one-pass", "singly", "pieces", "crop", "half-precision"]
WAYS: dict[str, list[Any]] = {
    "way": TOKENS + LOGITS,
    # Around the window of the sliding families, 16, and above the limit of explicit scores, 64.
    "prompt": [4, 15, 16, 40, 90],
    "cache": ["dynamic", "whole", "static"],
    "attention": ["sdpa", "eager", "maskless", "mask-object"],
}


def legal_kind(kind: Kind) -> bool:
    if kind.window and kind.bits == 16:
        return False  # 16-bit latents are exact without a window
    # Only water-filling allocates bits per direction.
    return kind.bits != "mixed" or METHODS[kind.latents]["method"] == "loss-aware"


def legal_way(way: Way) -> bool:
    if way.cache == "static" and way.way in ("lookup", "assisted", "crop"):
        return False  # transformers cannot crop a static cache
    if way.attention in ("maskless", "mask-object") and (way.cache == "static" or way.way == "padded"):
        return False  # empty slots and padding are unknown without a readable mask
    return way.way != "one-pass" or way.cache == "dynamic"


def cases(kinds: list[Kind], ways: list[Any]) -> list[Any]:
    """Return (kind, way) cases that cover all pairs of a factor of a kind and a factor of a way, sorted by kind."""
    order = {kind: place for place, kind in enumerate(kinds)}
    return sorted(cover(itertools.product(kinds, ways)), key=lambda case: order[case[0]])


def name(*parts: Any) -> str:
    """Return a readable id of settings."""
    names = {"group": "groups-of-{}", "bits": "{}-bits", "prompt": "prompt-{}", "window": "window-{}"}
    entries = [entry for part in parts for entry in (vars(part) if hasattr(part, "__dict__") else {"": part}).items()]
    return "_".join(names.get(key, "{}").format(value) for key, value in entries)


def named(rows: list[Any], marks: Sequence[Any] = ()) -> list[Any]:
    """Return test parameters; the cases of a kind run in one process, which compresses it once."""
    return [pytest.param(*row, id=name(*row), marks=[*marks, pytest.mark.xdist_group(name(row[0]))]) for row in rows]


LIKE_OTHERS = ("arcee", "apertus", "gemma", "ernie4.5-moe", "qwen3.5-hybrid", "qwen3.5-moe-hybrid")
"""Families whose attention is the same as in other families that are tried."""


def further_cases() -> Iterator[tuple[Kind, Way]]:
    """Yield cases of families that differ from the families above in a few independent points."""
    for family, (model_type, _) in (FURTHER_FAMILIES | {each: FAMILIES[each] for each in ALIKE}).items():
        attention = "sdpa" if MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]]._supports_sdpa else "eager"
        described = DESCRIPTIONS[model_type]
        values = "absorbed" if described.sink_logits or described.gated else "fused"
        packed, plain = Kind(family, "joint", 2, "mixed", values), Kind(family, "whole-values", 1, 16, "absorbed")
        if described.gated:
            yield dataclasses.replace(packed, window=5), Way("greedy", 40, "dynamic", "eager")
        yield (packed if family in LIKE_OTHERS else plain), Way("greedy", 40, "static", attention)
        # LongRoPE frequencies depend on the longest sequence of the batch and on how its tokens were fed.
        if "longrope" not in family:
            yield packed, Way("padded", 40, "dynamic", attention)
            yield packed, Way("pieces", 16, "dynamic", attention)
        elif family not in LIKE_OTHERS:
            yield packed, Way("greedy", 40, "static", attention)


CASES = cases(covering(settings(Kind, KINDS, legal_kind)), covering(settings(Way, WAYS, legal_way)))
FURTHER_CASES = list(further_cases())
CHOSEN_KINDS = list(dict.fromkeys(kind for kind, _ in CASES))


# --- models ----------------------------------------------------------------------------------------------------------


def kv_heads(kind: Kind) -> int:
    return int(tiny.SIZES["num_attention_heads" if kind.family == "llama-mha" else "num_key_value_heads"])


def group_size(kind: Kind) -> int:
    return kv_heads(kind) if kind.group == "all" else int(kind.group)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small blocks of queries, so that prompts with windows of exact latents take several blocks."""
    monkeypatch.setattr(residual_window, "_QUERIES", 24)


@functools.cache
def models(kind: Kind, layers: int = 2) -> tuple[Any, Any]:
    """Return a float32 (compressed, dense twin) of few layers; the kind decides how R_v is stored, not the ranks."""
    method = METHODS[kind.latents] | {"bits": kind.bits, "ratio": RATIOS[kind.bits], "group_size": group_size(kind)}
    method |= {"exact_window": kind.window}
    _, compressed, twin = tiny.compressed_pair(kind.family, kind.values, layers=layers, **method)
    return endless(compressed), endless(twin)


@functools.cache
def in_type(kind: Kind, dtype: torch.dtype, layers: int = 2) -> tuple[Any, Any]:
    """Return the (compressed, reference) models of a kind in the given dtype."""
    compressed, twin = (endless(copy.deepcopy(model).to(dtype)) for model in models(kind, layers))
    for model in (compressed, twin):
        # The grouped matmuls of experts do not support float64.
        model.set_experts_implementation("eager")
    if kind.bits == 16:
        return compressed, twin
    return compressed, Uncached(tiny.over_values(copy.deepcopy(compressed), "reconstructed"))


def exact(kind: Kind) -> tuple[Any, Any]:
    """Return (compressed, reference) models that agree on every token.

    In float32 the last bits of a sum may decide a code at the edge of its step, and so a token; not so in float64.
    """
    return in_type(kind, torch.float32 if kind.bits == 16 else torch.float64)


def endless(model: Any) -> Any:
    """Return the same model, whose generation no end-of-sequence token stops."""
    model.generation_config.eos_token_id = None
    return model


class Uncached:
    """Model that reads the whole sequence again for every token."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, ids: Tensor) -> Any:
        return self.model(ids, use_cache=False)

    def generate(self, ids: Tensor, **options: Any) -> Tensor:
        return self.model.generate(ids, use_cache=False, **options)


def opaque_kernel(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any,
    *, scaling: float, sliding_window: int | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend like flash and flex kernels: causality and window come from arguments, not from a mask tensor."""
    queries, slots = query.shape[2], key.shape[2]
    distance = torch.arange(queries)[:, None] + slots - queries - torch.arange(slots)
    allowed, repeats = (distance >= 0) & (distance < (sliding_window or slots)), query.shape[1] // key.shape[1]
    keys, values = repeat_kv(key, repeats), repeat_kv(value, repeats)
    output = scaled_dot_product_attention(query, keys, values, attn_mask=allowed, scale=scaling)
    return output.transpose(1, 2), None


for own_name, made in (("maskless", None), ("mask-object", SimpleNamespace())):
    AttentionInterface.register(own_name, opaque_kernel)
    AttentionMaskInterface.register(own_name, lambda *_, made=made, **__: made)


@contextlib.contextmanager
def attending(model: Any, implementation: str) -> Iterator[Any]:
    """Switch a model temporarily to another attention implementation of transformers."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


@pytest.mark.parametrize("kind", named([(kind,) for kind in CHOSEN_KINDS]))
@torch.no_grad()
def test_a_checkpoint_is_what_was_asked_for_and_its_twin(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The spec is as requested; without rounding, logits are the twin's: bases, rotations and means cancel."""
    compressed, twin = models(kind)
    spec, groups = LatentSpec.from_config(compressed.config), -(-kv_heads(kind) // group_size(kind))
    for layer, attention in zip(spec.layers, tiny.attending_layers(compressed), strict=True):
        assert len(layer.key_ranks) == groups
        assert len(layer.value_ranks) == (1 if kind.latents == "whole-values" else groups)
        assert sorted(layer.head_permutation) == list(range(kv_heads(kind)))
        assert layer.value_layout == ("fused" if kind.values == "fused" else "separate")
        assert attention.self_attn.fused == (kind.values == "fused")
        rows = [rows for rows in (layer.key_rows, layer.value_rows) if rows is not None]
        bits = {segment.bits for own in rows for segment in own.segments}
        assert kind.bits == "mixed" or bits == {kind.bits} - {16}
    assert spec.joint == (kind.latents == "joint") and spec.removed >= RATIOS[kind.bits]
    monkeypatch.setattr("recalkv.cache.rows.RowLayout.pack", lambda rows, latents: latents)
    monkeypatch.setattr("recalkv.cache.rows.RowLayout.unpack", lambda rows, packed, dtype: packed)
    ids = windows(2, 24, seed=5)
    assert_near(compressed(ids).logits, twin(ids).logits, 1e-4)


# --- tokens ----------------------------------------------------------------------------------------------------------

NEW_TOKENS = 16
# Options that change the output, and options that only change how it is computed.
CHOICES: dict[str, dict[str, Any]] = {"beams": {"num_beams": 3, "num_return_sequences": 2}}
SPEED: dict[str, dict[str, Any]] = {"lookup": {"prompt_lookup_num_tokens": 4}, "chunks7": {"prefill_chunk_size": 7}}


def generate(model: Any, ids: Tensor, tokens: int = NEW_TOKENS, **options: Any) -> Tensor:
    torch.manual_seed(0)
    output = model.generate(ids, max_new_tokens=tokens, **({"do_sample": False} | options))
    assert output.shape[1] == ids.shape[1] + tokens
    return output


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Assert equality without pytest's comparison of long lists, which can take minutes."""
    where = (actual != expected).nonzero()
    assert not len(where), f"{len(where)} tokens differ, the first at {where[0].tolist()}"


def assert_likeliest(reference: Any, ids: Tensor, start: int) -> None:
    """Assert that each token from ``start`` on is the reference's most likely one: its greedy output, in one pass."""
    with torch.no_grad():
        logits = reference(ids).logits
    assert_same(ids[:, start:], logits[:, start - 1 : -1].argmax(-1))


def new_cache(model: Any, cache: str, slots: int = 0) -> Any:
    if cache == "static":
        return StaticCache(model.config, max_cache_len=slots)
    # Created without the config, the cache keeps all slots of sliding layers, too.
    return DynamicCache() if cache == "whole" else DynamicCache(config=model.config)


def cache_options(model: Any, way: Way, slots: int) -> dict[str, Any]:
    if way.cache == "whole":
        return {"past_key_values": new_cache(model, way.cache)}
    if way.way == "turns":
        return {"past_key_values": new_cache(model, way.cache, slots)}
    return {"cache_implementation": "static"} if way.cache == "static" else {}


def turns(model: Any, way: Way, **options: Any) -> Tensor:
    """Generate answers to a prompt, to a turn of one token and to a turn of several tokens."""
    ids = torch.zeros(2, 0, dtype=torch.int64)
    for seed, length in enumerate((way.prompt, 1, 9)):
        ids = torch.cat([ids, windows(2, length, seed)], dim=1)
        # Without a mask, generate would treat a generated token 0 as padding.
        ids = generate(model, ids, NEW_TOKENS // 2, attention_mask=torch.ones_like(ids), **options)
    return ids


@pytest.mark.parametrize(("kind", "way"), named([case for case in CASES + FURTHER_CASES if case[1].way in TOKENS]))
def test_tokens(kind: Kind, way: Way) -> None:
    compressed, reference = exact(kind)
    options = cache_options(compressed, way, slots=256)
    if way.way == "turns":
        with attending(compressed, way.attention):
            ids, start = turns(compressed, way, **options), 0
        for length in (way.prompt, 1, 9):
            start += length + NEW_TOKENS // 2
            assert_likeliest(reference, ids[:, :start], start - NEW_TOKENS // 2)
        return
    if way.way in ("lookup", "assisted"):  # one sequence at a time; repeated, so that lookup finds matches
        ids = windows(1, -(-way.prompt // 2), seed=2).repeat(1, 2)[:, : way.prompt]
    else:
        ids = windows(2, way.prompt)
    options |= CHOICES.get(way.way, {}) | SPEED.get(way.way, {})
    if way.way == "assisted":  # a new model each time, as generation changes its config
        options["assistant_model"] = endless(tiny.dense_model("llama-gqa", seed=7))
    if way.way == "padded":
        length, mask = -(-way.prompt // 3), torch.ones_like(ids)
        mask[1, :-length] = 0
        with attending(compressed, way.attention):
            actual = generate(compressed, ids * mask, attention_mask=mask, **options)
        assert_likeliest(reference, actual[:1], way.prompt)
        assert_likeliest(reference, actual[1:, way.prompt - length :], length)
        return
    with attending(compressed, way.attention):
        actual = generate(compressed, ids, **options)
    assert actual[:, way.prompt :].unique().numel() > 2, "a text this monotonous compares nothing"
    if way.way in CHOICES or "longrope" in kind.family:
        assert_same(actual, generate(reference, ids, **CHOICES.get(way.way, {})))
    else:
        assert_likeliest(reference, actual, way.prompt)


# --- logits ----------------------------------------------------------------------------------------------------------


def feed(model: Any, ids: Tensor, lengths: list[int], cache: Any, mask: Tensor | None = None) -> Tensor:
    """Return the logits of all tokens, fed through a cache in pieces of the given lengths."""
    assert sum(lengths) == ids.shape[1]
    device, seen, logits = model.device, 0, []
    for part in ids.to(device).split(lengths, dim=1):
        seen += part.shape[1]
        own = None if mask is None else mask[:, :seen].to(device)
        logits.append(model(part, attention_mask=own, past_key_values=cache).logits.cpu())
    return torch.cat(logits, dim=1)


def assert_near(actual: Tensor, expected: Tensor, bound: float = 1e-5) -> None:
    """Assert a bound on the root mean square of the difference, relative to that of the expected values."""
    assert actual.shape == expected.shape
    assert float((actual.double() - expected.double()).norm() / expected.double().norm()) < bound


def assert_holds_latents_alone(cache: Any, model: Any) -> None:
    """Assert that all tensors of each layer take exactly the bytes that the spec counts for its slots."""
    element = torch.empty((), dtype=model.dtype).element_size()
    layers = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    for layer, spec in zip(layers, LatentSpec.from_config(model.config).layers, strict=True):
        held = [value for value in vars(layer).values() if isinstance(value, Tensor) and value.dim() > 0]
        batch, _, slots, _ = layer.keys.shape
        recent = getattr(layer, "recent", None)
        if recent is not None:
            assert recent.shape[2] <= model.config.recalkv["exact_window"] + 32
            assert recent.nbytes == batch * recent.shape[2] * spec.cached_elements * element
        window = 0 if recent is None else recent.nbytes
        assert sum(tensor.nbytes for tensor in held) - window == batch * slots * spec.cached_bytes(element)
        assert layer.keys.dtype == (torch.uint8 if spec.quantized else model.dtype)


@pytest.mark.parametrize(("kind", "way"), named([case for case in CASES + FURTHER_CASES if case[1].way in LOGITS]))
@torch.no_grad()
def test_logits(kind: Kind, way: Way) -> None:
    half = way.way == "half-precision"
    compressed, reference = in_type(kind, torch.bfloat16) if half else exact(kind)
    pieces = [way.prompt, 20, 1, 3, MAX_EXPLICIT_QUERIES + 2]
    lengths = {"one-pass": [way.prompt], "singly": [1] * way.prompt, "crop": [way.prompt, 1, 11]}.get(way.way, pieces)
    # In half precision the last bit of a latent may change a code and all later ones, so many sequences are compared;
    # and in hybrid models, whose states and norms are float32 sums in any precision.
    hybrid = "hybrid" in kind.family
    ids = windows(8 if half or hybrid else 2, sum(lengths))
    expected, cache = reference(ids).logits, new_cache(compressed, way.cache, ids.shape[1] + 3)
    with attending(compressed, way.attention):
        if way.way == "one-pass":
            actual = compressed(ids, use_cache=False).logits
        elif way.way == "crop":
            cache.activate_past_recording()
            first, wrong = way.prompt // 2, windows(2, 12, seed=3)
            feed(compressed, torch.cat([ids[:, :first], wrong], dim=1), [first + 5, 7], cache)
            cache.crop(-12)
            actual = feed(compressed, ids[:, first:], [way.prompt - first, *lengths[1:]], cache)
            expected = expected[:, first:]
        else:
            actual = feed(compressed, ids, lengths, cache)
    assert actual.dtype == compressed.dtype
    if way.way != "one-pass":
        assert_holds_latents_alone(cache, compressed)
    if hybrid and not half:
        difference = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(difference.median(dim=0).values.max()) < 1e-4
    else:
        assert_near(actual, expected, 0.1 if half else 1e-5)


# RoPE tables of some families are float32 in 16-bit models.
@pytest.mark.parametrize(
    ("family", "bits"),
    [
        *((family, "mixed") for family in FURTHER_FAMILIES),
        *((family, 16) for family in ("olmo2-whole-norm", "olmo3-sliding", "ernie4.5", "ernie4.5-moe")),
    ],
)
@torch.no_grad()
def test_families_in_bfloat16(family: str, bits: int | str) -> None:
    compressed, reference = in_type(Kind(family, "joint", 2, bits, "absorbed"), torch.bfloat16, layers=1)
    ids = windows(8, 72)
    actual = feed(compressed, ids, [68, 1, 3], new_cache(compressed, "dynamic"))
    assert actual.dtype == torch.bfloat16
    assert_near(actual, reference(ids).logits, 0.1)


@pytest.mark.parametrize("values", ["fused", "absorbed"])
@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding", "qwen2-mixed-sliding"])
@torch.no_grad()
def test_without_a_mask_around_the_window(family: str, values: str) -> None:
    """Without a mask, logits are right for queries that see fewer slots than the window of 16, as many, or one more."""
    compressed, reference = exact(Kind(family, "separate", 2, 16, values))
    ids = windows(2, 18)
    expected = reference(ids).logits
    with attending(compressed, "maskless"):
        for lengths in ([16, 1, 1], [10, 5, 1, 2], [9, 7, 2], [17, 1]):
            assert_near(feed(compressed, ids, lengths, new_cache(compressed, "whole")), expected)


# --- kernels ---------------------------------------------------------------------------------------------------------


FEW = ["llama-mha", "mistral-sliding", "qwen2-bias", "qwen3-qk-norm"]
KERNEL_KINDS = KINDS | {"bits": [16], "values": ["fused", "absorbed"], "window": [0]}
KERNEL_WAYS = {
    "way": ["step", "several", "padded", "reordered", "crop"],
    # Within one tile of slots, beyond a sliding window, and across two tiles.
    "prompt": [9, 19, 66],
    "cache": ["dynamic", "whole", "static"],
    "attention": ["sdpa"],
}
"""Ways in which the kernels receive their queries."""


def legal_kernel_way(way: Way) -> bool:
    return way.way != "crop" or way.cache != "static"


def kernel_cases(families: list[str]) -> list[Any]:
    kinds = settings(Kind, KERNEL_KINDS | {"family": families}, legal_kind)
    return cases(covering(kinds), covering(settings(Way, KERNEL_WAYS, legal_kernel_way)))


OTHERS = [family for family in FAMILIES if family not in FEW]
KERNEL_CASES = named(kernel_cases(FEW)) + named(kernel_cases(OTHERS), marks=[pytest.mark.slow])


class Counting:
    """Kernel wrapper that records its launches."""

    def __init__(self, kernel: Any, launches: list[Any]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        self.launches.append(grid)
        return self.kernel[grid]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> list[Any]:
    """Record one entry per layer and step that attends with kernels, in compiled models too."""
    pytest.importorskip("triton", reason="triton is not installed")
    from recalkv.kernels import attention

    launches: list[Any] = []
    monkeypatch.setattr(attention, "scores_kernel", Counting(attention.scores_kernel, launches))
    return launches


@pytest.mark.parametrize(("kind", "way"), KERNEL_CASES)
@torch.no_grad()
def test_kernels(kind: Kind, way: Way, launched: list[Any]) -> None:
    layers = 2 if kind.family == "qwen2-mixed-sliding" else 1
    compressed, reference = in_type(kind, torch.float32, layers)
    lengths = [way.prompt, 4 if way.way == "several" else 1]
    ids = windows(2, sum(lengths))
    expected, model = reference(ids).logits, use_kernels(copy.deepcopy(compressed).to(DEVICE))
    cache = new_cache(model, way.cache, ids.shape[1] + 3)
    if way.way == "padded":
        padding, mask = way.prompt // 2, torch.ones_like(ids)
        mask[1, :padding] = 0
        actual = feed(model, ids * mask, lengths, cache, mask)[:, -1:]
        expected = torch.cat([expected[:1, -1:], reference(ids[1:, padding:]).logits[:, -1:]])
    elif way.way == "reordered":
        feed(model, ids[:, : way.prompt], [way.prompt], cache)
        cache.reorder_cache(torch.tensor([1, 1], device=DEVICE))
        actual = feed(model, ids[[1, 1], way.prompt :], lengths[1:], cache)
        expected = expected[[1, 1], way.prompt :]
    elif way.way == "crop":
        cache.activate_past_recording()
        kept, wrong = ids[:, : way.prompt - 2], windows(2, MAX_ROWS + 1, seed=3)
        feed(model, torch.cat([kept, wrong], dim=1), [kept.shape[1], wrong.shape[1]], cache)
        cache.crop(-wrong.shape[1])
        actual, expected = feed(model, ids[:, -3:], [3], cache), expected[:, -3:]
    else:
        actual = feed(model, ids, lengths, cache)
    assert len(launched) >= layers
    assert_near(actual, expected)


@pytest.mark.parametrize("family", ["gemma3", "smollm3-nope", "glm-partial", "qwen3-next-hybrid", "granite4-hybrid"])
@torch.no_grad()
def test_kernels_of_mixed_rotations_offset_norms_and_gates(family: str, launched: list[Any]) -> None:
    compressed, reference = in_type(Kind(family, "joint", 2, 16, "absorbed"), torch.float32)
    ids, model = windows(2, 21), use_kernels(copy.deepcopy(compressed).to(DEVICE))
    assert_near(feed(model, ids, [20, 1], new_cache(model, "dynamic")), reference(ids).logits)
    assert len(launched) == 2


@pytest.mark.parametrize("family", ["gemma2-softcap", "gpt-oss-sinks", "olmo2-whole-norm", "phi3-longrope"])
def test_kernels_refuse_what_they_do_not_compute(family: str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    compressed, _ = models(Kind(family, "joint", 2, 16, "absorbed"))
    with pytest.raises(ParameterError, match=r"kernel=triton cannot be used: .* soft-capped scores, sink logits"):
        use_kernels(compressed)


LLAMA, QWEN = ("llama-gqa", "joint", 2), ("qwen2-mixed-sliding", "joint", 2)


@pytest.mark.parametrize(
    "kind",
    [
        Kind("llama-gqa", "separate", 2, 16, "absorbed"),
        Kind(*LLAMA, "mixed", "absorbed", 5),
        Kind(*QWEN, 16, "fused"),
        pytest.param(Kind(*QWEN, "mixed", "fused"), marks=pytest.mark.slow),
        pytest.param(Kind(*QWEN, 16, "absorbed"), marks=pytest.mark.slow),
        pytest.param(Kind("qwen3-qk-norm", "whole-values", "all", 16, "absorbed"), marks=pytest.mark.slow),
    ],
    ids=name,
)
@torch.no_grad()
def test_compiled(kind: Kind, launched: list[Any]) -> None:
    """Steps over a static cache compile to whole graphs, which serve all lengths and give the reference's logits."""
    # Layers of the same kind share one graph.
    layers = 1 if "llama" in kind.family else 2
    compressed, reference = in_type(kind, torch.float32, layers)
    ids, by_kernels, model = windows(2, 22), kind.bits == 16, copy.deepcopy(compressed).to(DEVICE)
    if by_kernels:
        use_kernels(model)
    cache = new_cache(model, "static", 70)
    torch._dynamo.reset()
    step = torch.compile(model, backend="aot_eager" if by_kernels else "eager", fullgraph=True)
    prompt, *tokens = ids.to(DEVICE).split([19, 1, 1, 1], dim=1)
    logits = [model(prompt, past_key_values=cache).logits]
    launched.clear()
    for number, token in enumerate(tokens):
        # The first two steps may compile, later ones may not.
        with torch.compiler.set_stance("fail_on_recompile" if number > 1 else "default"):
            logits.append(step(token, past_key_values=cache).logits)
    assert len(launched) == layers * len(tokens) * by_kernels
    assert_near(torch.cat(logits, dim=1).cpu(), reference(ids).logits, 1e-5 if by_kernels else 0.02)
