"""Fitting a codec, its files, the model it is bound to, and refusals; the model stays unchanged."""

import contextlib
import copy
import dataclasses
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import recalkv
from recalkv import fitting
from recalkv.codec.context import cached_tokens, model_context, model_fingerprint, sliding_windows
from recalkv.codec.fit import build_codec
from recalkv.codec.moments import heads_per_code, take_moments
from recalkv.codec.probe import watching
from recalkv.codec.sidecar import Codec
from recalkv.errors import CheckpointError, DataError, NonFiniteError, ParameterError, UnsupportedModelError
from recalkv.runtime.models import check_cached
from tests import raises
from tests.coded import fit, mean_keys, packed, unpacked
from tests.tiny import SIZES, VOCABULARY, dense_model, random_model, windows

CONTEXT = 256


@pytest.fixture(scope="module")
def model() -> Any:
    return dense_model("llama-gqa")


@pytest.fixture(scope="module")
def codec(model: Any) -> Codec:
    return fit(model, windows(), bits=4)


def states_of(codec: Codec, layer: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return random keys, values and positions as a layer may have them."""
    own, generator = codec.layers[layer], torch.Generator().manual_seed(0)
    positions = torch.randint(0, CONTEXT, (2, 40), generator=generator)
    shape = (2, own.kv_heads, 40, own.head_dims[0])
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    return keys + mean_keys(own, positions), values + own.value_mean[:, None], positions


def test_layers_with_a_sliding_window_count_for_what_they_cache(model: Any) -> None:
    codec = fit(model, windows(2, 24), bits=4)
    one, two, three = (layer.row_bytes for layer in codec.layers.values())
    codec = replace(codec, record=codec.record | {"sliding_windows": {"0": 16, "2": 100}})
    assert codec.sequence_bytes(256) == 16 * one + 256 * two + 100 * three
    assert codec.bits_per_element() == 8 * codec.sequence_bytes(256) / (48 * (16 + 256 + 100))
    # In the first layer all 16 tokens are exact, in the others 36.
    held = 16 * 48 * (16 + 36 + 36)
    assert codec.bits_per_element(50) == (8 * codec.sequence_bytes(50) + held) / (48 * (16 + 50 + 50))
    assert codec.bits_per_element(50, exact=False) == 8 * codec.sequence_bytes(50) / (48 * (16 + 50 + 50))


def test_windows_are_recorded_whatever_the_context_of_the_fit() -> None:
    assert sliding_windows(dense_model("gemma3")) == {"0": 16, "2": 16}


def test_heads_of_an_odd_size_are_refused() -> None:
    model = random_model("gpt2", n_embd=54, n_layer=1, n_head=6, vocab_size=VOCABULARY)
    raises(UnsupportedModelError, "have 9 numbers, and only even sizes", take_moments, model, windows(2, 24), CONTEXT)


@pytest.mark.parametrize("bits", [1, 2, 3.5, 4, 8])
def test_rows_take_what_was_asked_for(model: Any, bits: float) -> None:
    codec = fit(model, windows(2, 24), bits=bits)
    assert sorted(codec.layers) == [0, 1, 2] and codec.bits_per_element() <= bits
    # 8 bits for all coefficients and their scales is the maximum; of 24 coefficients, a scale takes a third of a bit.
    assert codec.bits_per_element() > bits - 0.35 and codec.dense_bytes_per_token == 3 * 2 * 2 * 3 * 8
    assert codec.bytes_per_token == sum(layer.row_bytes for layer in codec.layers.values())
    assert codec.context == model_context(model) == 256
    exact = 36 * 16 / 2048
    assert codec.bits_per_element(2048) == pytest.approx(codec.bits_per_element() + exact)


def test_keys_and_values_come_back_from_their_rows(model: Any) -> None:
    layer = fit(model, windows(), bits=8).layers[1]
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    ids = windows(2, 40, seed=9)
    with watching(model, lambda index, key, value: seen.update({index: (key, value)})), torch.no_grad():
        model(input_ids=ids, use_cache=False)
    keys, values = seen[1]
    positions = torch.arange(40).expand(2, -1)
    rows = packed(layer, keys, values, positions)
    assert rows.shape == (2, 40, layer.row_bytes) and rows.dtype == torch.uint8
    for own, found in zip((keys, values), unpacked(layer, rows, positions), strict=True):
        assert float((own - found).norm() / own.norm()) < 0.02
    # Any tokens can be packed by themselves.
    assert torch.equal(packed(layer, keys[:, :, 7:9], values[:, :, 7:9], positions[:, 7:9]), rows[:, 7:9])


def test_matrices_give_segments_of_unit_variance(model: Any) -> None:
    moments = take_moments(model, windows(), CONTEXT)
    for index, layer in build_codec(moments, 4, CONTEXT).layers.items():
        for side, code in enumerate((layer.keys[0], layer.values[0])):
            (states,) = moments[index].states[side]
            ridge = 0.1 * states.diagonal().mean() * torch.eye(len(states), dtype=torch.float64)
            coded = code.matrix.double().T @ (states + ridge) @ code.matrix.double()
            start = 0
            for segment in code.segments:
                part = coded[start : start + segment.width, start : start + segment.width]
                assert float(part.diagonal().mean()) == pytest.approx(1, abs=0.35)
                start += segment.width
            torch.testing.assert_close(code.back, code.matrix.double().inverse()[: code.width].float())


def test_heads_share_codes_up_to_a_width() -> None:
    assert heads_per_code(3, 64) == 3 and heads_per_code(2, 128) == 2 and heads_per_code(8, 128) == 2
    assert heads_per_code(5, 64) == 1 and heads_per_code(1, 256) == heads_per_code(4, 512) == 1


def test_heads_may_have_codes_of_their_own(model: Any) -> None:
    moments = take_moments(model, windows(), CONTEXT)
    codec = build_codec(moments, 4, CONTEXT, heads=1)
    layer = codec.layers[0]
    assert layer.groups == 3 and len(layer.values) == 3 and layer.keys[0].matrix.shape == (8, 8)
    keys, values, positions = states_of(codec)
    found = unpacked(layer, packed(layer, keys, values, positions), positions)
    assert float((found[1] - values).norm() / values.norm()) < 0.5
    with pytest.raises(ParameterError, match=r"2 heads per code do not divide the 3 KV heads of layer 0"):
        build_codec(moments, 4, CONTEXT, heads=2)


def test_sliding_layers_hold_their_window(model: Any) -> None:
    sliding = dense_model("gemma3", num_hidden_layers=4)
    assert cached_tokens(sliding, 256) == {0: 16, 1: 256, 2: 16, 3: 256}
    assert cached_tokens(sliding, 8) == dict.fromkeys(range(4), 8)
    assert cached_tokens(model, 99) == dict.fromkeys(range(3), 99)
    codec = fit(sliding, windows(3, 32), bits=2)
    row_bytes = {index: layer.row_bytes for index, layer in codec.layers.items()}
    assert min(row_bytes[0], row_bytes[2]) > max(row_bytes[1], row_bytes[3])
    used = 16 * (row_bytes[0] + row_bytes[2]) + 256 * (row_bytes[1] + row_bytes[3])
    assert 0.9 < used / (2 / 8 * 48 * 2 * (16 + 256)) <= 1


@pytest.mark.parametrize("family", ["qwen3.5-hybrid", "granite4-hybrid"])
def test_layers_of_other_kinds_have_no_code(family: str) -> None:
    hybrid = dense_model(family)
    kinds, codec = hybrid.config.layer_types, fit(hybrid, windows(2, 24))
    assert list(codec.layers) == [index for index, kind in enumerate(kinds) if kind == "full_attention"]


# ---- the model


@pytest.mark.parametrize("failing", [False, True])
def test_the_model_stays_as_it_was(failing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense_model("llama-gqa").train()
    model.lm_head.eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    weights = copy.deepcopy(model.state_dict())
    before = [each.training for each in model.modules()], [each.requires_grad for each in model.parameters()]
    attention = model.config._attn_implementation

    def progress(step: str, done: int, total: int) -> None:
        if failing and step == "moments" and done == 2:
            raise KeyboardInterrupt

    if failing:
        monkeypatch.setattr("recalkv.codec.moments._CHECKPOINTED", 0)
    with pytest.raises(KeyboardInterrupt) if failing else contextlib.nullcontext():
        fit(model, windows(3, 24), progress=progress)
    after = [each.training for each in model.modules()], [each.requires_grad for each in model.parameters()]
    assert after == before and model.config._attn_implementation == attention
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())
    assert not any(each._forward_hooks for each in model.modules())
    # And it still works.
    model.eval()(input_ids=windows(1, 8)).logits.sum().backward()


def test_models_are_fitted_in_threads() -> None:
    models = [dense_model("llama-gqa"), dense_model("qwen2-bias")]
    expected = [fit(model, windows(3, 24)) for model in models]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda model: fit(model, windows(3, 24)), models))
    for own, other in zip(found, expected, strict=True):
        assert all(layer.is_like(other.layers[index]) for index, layer in own.layers.items())
    layer = expected[0].layers[0]
    assert not layer.is_like(replace(layer, rotation=replace(layer.rotation, pairs=layer.rotation.pairs.flip(0))))


# ---- the files


def test_a_codec_is_what_was_saved(codec: Codec, tmp_path: Path) -> None:
    codec.save(tmp_path / "codec")
    found = Codec.load(tmp_path / "codec")
    assert sorted(path.name for path in (tmp_path / "codec").iterdir()) == ["codec.json", "codec.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["codec"]
    for name in ("window", "sinks", "context", "fingerprint", "record"):
        assert getattr(found, name) == getattr(codec, name)
    for index, layer in codec.layers.items():
        keys, values, positions = states_of(codec, index)
        assert torch.equal(packed(found.layers[index], keys, values, positions), packed(layer, keys, values, positions))
        assert torch.equal(found.layers[index].rotation.pairs, layer.rotation.pairs)
    assert found.record["bits"] == 4 and found.record["windows"] == [8, 48]


def test_a_codec_replaces_a_codec_alone(codec: Codec, tmp_path: Path) -> None:
    place = tmp_path / "codec"
    codec.save(place)
    codec.save(str(place))
    (place / "notes.txt").write_text("mine")
    raises(ParameterError, r"holds other files than those of a codec", codec.save, place)
    assert (place / "notes.txt").read_text() == "mine"
    (place / "notes.txt").rename(place / "evaluation.md.12.partial")
    (tmp_path / "link").symlink_to(place)
    codec.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and Codec.load(place).layers.keys() == codec.layers.keys()
    raises(ParameterError, "is the current folder, which cannot be replaced", codec.save, ".")
    (tmp_path / "file").write_text("mine")
    raises(ParameterError, "holds other files", codec.save, tmp_path / "file")


def test_a_write_that_fails_leaves_the_old_one(codec: Codec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "codec"
    codec.save(place)
    (place / "codec.json").write_text(old := (place / "codec.json").read_text() + "\n")

    monkeypatch.setattr("recalkv.codec.sidecar.save_file", Mock(side_effect=SystemExit(143)))
    with pytest.raises(SystemExit):
        codec.save(place)
    assert (place / "codec.json").read_text() == old and [path.name for path in tmp_path.iterdir()] == ["codec"]


def test_an_interrupt_between_its_renames_leaves_the_old_one(
    codec: Codec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, rename = tmp_path / "codec", Path.rename
    codec.save(place)
    old = (place / "codec.json").read_text()

    def interrupted(path: Path, target: Path) -> Path:
        if path.name == "new":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dataclasses.replace(codec, window=7).save(place)
    assert (place / "codec.json").read_text() == old and [path.name for path in tmp_path.iterdir()] == ["codec"]


def test_files_of_two_codecs_are_refused_and_read_again(
    codec: Codec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dataclasses.replace(codec, layers={0: codec.layers[0]})
    for name, each in (("one", codec), ("other", other)):
        each.save(tmp_path / name)
    # Another process replaces the side-car after its JSON was read.
    files = [(tmp_path / name / FILE).read_bytes() for name in ("other", "one")]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: files.pop(0))
        assert Codec.load(tmp_path / "one").layers.keys() == codec.layers.keys()
    (tmp_path / "other" / FILE).rename(tmp_path / "one" / FILE)
    raises(CheckpointError, "is not the one that codec.json describes", Codec.load, tmp_path / "one")


def changed_record(place: Path, change: Any) -> None:
    record = json.loads((place / "codec.json").read_text())
    change(record)
    (place / "codec.json").write_text(json.dumps(record))


def changed_tensors(place: Path, change: Any) -> None:
    tensors = load_file(place / "codec.safetensors")
    change(tensors)
    save_file(tensors, place / "codec.safetensors")
    # As a version without digests would have written it, so that the check behind the digest's is reached.
    changed_record(place, lambda record: record.pop("sha256"))


NAME, MEAN, FILE = "layers.1.keys.0", "layers.1.key_mean", "codec.safetensors"
KEYS, VALUES, PAIRS = "layers.0.key_mean", "layers.0.value_mean", "layers.0.pairs"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "codec.json").unlink(), "holds no readable codec.json"),
        (lambda p: (p / "codec.json").write_text("{"), "holds no readable codec.json"),
        (lambda p: (p / "codec.json").write_text("[]"), "has format None, and this version reads 1"),
        (lambda p: (p / "codec.safetensors").write_bytes(b"12345678"), "holds no readable"),
        (lambda p: os.truncate(p / FILE, (p / FILE).stat().st_size - 100), "holds no readable"),
        (lambda p: changed_record(p, lambda r: r.update(format=2)), "has format 2, and this version reads 1; fit"),
        (lambda p: changed_record(p, lambda r: r.pop("window")), "is damaged"),
        (lambda p: changed_record(p, lambda r: r.update(layers=[])), "is damaged"),
        (lambda p: changed_tensors(p, lambda t: t.update({MEAN: t[MEAN].flatten()})), "do not cover its heads"),
        (lambda p: changed_record(p, lambda r: r["layers"]["1"]["keys"][0].append([8, 5])), "cannot be packed"),
        (lambda p: changed_record(p, lambda r: r["layers"]["1"]["keys"][0].append([64, 2])), "has a basis of"),
        (lambda p: changed_record(p, lambda r: r["layers"]["1"]["keys"].append([[8, 2]])), "is damaged"),
        (lambda p: changed_record(p, lambda r: r["layers"]["1"].update(keys=[], values=[])), "do not cover its heads"),
        (lambda p: changed_record(p, lambda r: r["layers"].update({"7": r["layers"]["1"]})), "is damaged"),
        (lambda p: changed_tensors(p, lambda t: t.pop(NAME)), "is damaged"),
        (lambda p: changed_tensors(p, lambda t: t.update({NAME: t[NAME][:, :8].contiguous()})), "has a basis of"),
        (lambda p: changed_tensors(p, lambda t: t[NAME].fill_(float("nan"))), "has NaN or infinity|has no inverse"),
        (lambda p: changed_tensors(p, lambda t: t[NAME].zero_()), "has no inverse"),
        (lambda p: changed_tensors(p, lambda t: t["layers.0.pairs"].fill_(3)), "pairs of layers.0 do not cover"),
        (lambda p: changed_tensors(p, lambda t: t.update({KEYS: torch.zeros(2, 8)})), "do not cover its heads"),
        (lambda p: changed_tensors(p, lambda t: t.update({VALUES: torch.zeros(6, 4)})), "do not cover its heads"),
        (lambda p: changed_tensors(p, lambda t: t.update({PAIRS: t[PAIRS].int()})), "pairs of layers.0 do not cover"),
        (lambda p: changed_tensors(p, lambda t: t.update({KEYS: t[KEYS].half()})), "have other dtypes"),
        (lambda p: changed_tensors(p, lambda t: t["layers.0.frequencies"].fill_(float("inf"))), "NaN or infinity"),
        *((lambda p, n=n: changed_record(p, lambda r: r.update(sinks=n)), "is damaged") for n in (-4, 1.5, "4", None)),
        *((lambda p, n=n: changed_record(p, lambda r: r.update(window=n)), "is damaged") for n in (0, 10**9)),
        (lambda p: (p / "codec.json").write_text("[" * 100_000), "holds no readable codec.json"),
    ],
)
def test_a_damaged_codec_is_refused(codec: Codec, tmp_path: Path, damage: Any, message: str) -> None:
    codec.save(tmp_path / "codec")
    damage(tmp_path / "codec")
    raises(CheckpointError, message, Codec.load, tmp_path / "codec")


def test_no_codec_says_how_to_make_one(tmp_path: Path) -> None:
    raises(CheckpointError, "nowhere is not a folder; name the one that", Codec.load, tmp_path / "nowhere")
    raises(CheckpointError, "no/such is neither a folder nor a repository that can be", Codec.load, "no/such")


def test_a_codec_is_read_from_the_hub(codec: Codec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the two files of a side-car are fetched, and its checks are those of a folder."""
    codec.save(tmp_path)
    asked: list[Any] = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **given: asked.append((name, given)) or str(tmp_path)
    )
    assert Codec.load(Path("owner/codec-4")).layers[0].is_like(codec.layers[0])
    assert asked == [("owner/codec-4", {"allow_patterns": ["codec.safetensors", "codec.json"]})]


# ---- the model that it is bound to


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_of_other_types_have_the_same_fingerprint(model: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    mark = model_fingerprint(model)
    assert model_fingerprint(copy.deepcopy(model).to(dtype)) == mark
    model.save_pretrained(tmp_path / "model")
    assert model_fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)) == mark


def test_other_models_have_other_fingerprints(model: Any) -> None:
    marks = [model_fingerprint(model), *(model_fingerprint(dense_model("llama-gqa", seed)) for seed in range(1, 6))]
    marks += [model_fingerprint(dense_model(family)) for family in ("llama-mha", "mistral-full", "qwen3-qk-norm")]
    marks.append(model_fingerprint(dense_model("llama-gqa", num_hidden_layers=2)))
    assert len(set(marks)) == len(marks)


# ---- refusals


@pytest.mark.parametrize("bits", [0, -1, 8.5, float("nan"), float("inf")])
def test_bits_out_of_range(model: Any, tiny_tokenizer: Any, bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "take_moments", lambda *_: pytest.fail("too late"))
    with pytest.raises(ParameterError, match=rf"bits={bits} must lie above 0 and up to 8, the longest code"):
        fitting.fit(model, tiny_tokenizer, ["text " * 400], bits=bits, length=32)


def test_arguments_are_checked_before_the_work(
    model: Any, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "take_moments", lambda *_: pytest.fail("too late"))
    data = {"tokenizer": tiny_tokenizer, "dataset": ["text " * 400], "length": 32, "samples": 2}
    for context in (True, 256.5, 0, float("nan"), "256"):
        raises(
            ParameterError, f"context={context!r} must be a positive whole", fitting.fit, model, context=context, **data
        )
    raises(ParameterError, "bits='4' must lie above 0", fitting.fit, model, bits="4", **data)
    small = dense_model("llama-gqa", vocab_size=8)
    raises(ParameterError, r"gives token \d+, and the model has 8 embeddings", fitting.fit, small, **data)
    raises(ParameterError, "the model has 8 embeddings", recalkv.compress, small, ratio=0.5, device="cpu", **data)
    raises(UnsupportedModelError, "not a causal language model with an output head", fitting.fit, model.model, **data)
    stateful = random_model("qwen3_next", **SIZES, layer_types=["linear_attention"] * 3)
    raises(UnsupportedModelError, "does not run over a cache", fitting.fit, stateful, **data)


def test_whole_numbers_of_other_types_are_contexts(model: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    data = {"tokenizer": tiny_tokenizer, "dataset": ["text " * 400], "length": 32, "samples": 2}
    for number, context in enumerate((numpy.int64(256), 256.0)):
        fitting.fit(model, context=context, out=tmp_path / str(number), **data)
        assert Codec.load(tmp_path / str(number)).context == 256


@pytest.mark.parametrize("length", [1, 5])
def test_windows_without_tokens_behind_the_sinks_are_refused(model: Any, length: int) -> None:
    with pytest.raises(DataError, match=rf"length={length} must be at least 6: two tokens after"):
        fit(model, windows(2, length))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ("layers.1.self_attn.k_proj.weight", "in the keys or values of layer 1 during calibration; fit in float32"),
        ("layers.0.self_attn.v_proj.weight", "layer 0"),
        ("layers.1.mlp.up_proj.weight", "layer 2"),
        ("layers.2.mlp.up_proj.weight", "in the logits during calibration"),
        ("embed_tokens.weight", "layer 0"),
    ],
)
def test_weights_that_are_not_finite_name_the_layer(weight: str, message: str) -> None:
    model = dense_model("llama-gqa", tie_word_embeddings=False)
    model.get_parameter(f"model.{weight}").data.fill_(float("nan"))
    raises(NonFiniteError, message, fit, model, windows(2, 24))


def test_gradients_that_are_not_finite_name_the_layer(model: Any) -> None:
    own = copy.deepcopy(model)

    class Poison(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, states: Tensor) -> Tensor:
            return states.clone()

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * float("inf")

    own.model.layers[1].register_forward_hook(lambda _, __, out: Poison.apply(out))
    raises(NonFiniteError, "in the gradients of layer 1 during calibration", fit, own, windows(2, 24))


def test_head_sizes_that_give_no_blocks_are_refused() -> None:
    model = dense_model("llama-gqa", head_dim=6, num_key_value_heads=2)
    with pytest.raises(
        UnsupportedModelError,
        match=r"layer 0 has 2 KV heads of 6, and 2 of them have 12 elements, which is not a multiple of 8",
    ):
        fit(model, windows(2, 24))


def test_models_with_attention_of_their_own_are_refused() -> None:
    bloom = random_model("bloom", vocab_size=128, hidden_size=48, n_layer=2, n_head=6)
    raises(UnsupportedModelError, r"attention interface", fit, bloom, windows(2, 24))
    raises(UnsupportedModelError, r"^codec: BloomForCausalLM does not use .* attention interface", check_cached, bloom)


def test_embeddings_that_are_changed_in_place_have_gradients() -> None:
    ctrl = random_model("ctrl", vocab_size=128, n_embd=48, n_layer=2, n_head=2, dff=48, n_positions=64)
    assert sorted(fit(ctrl, windows(2, 48)).layers) == [0, 1]
