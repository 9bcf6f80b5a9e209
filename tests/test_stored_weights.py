"""Quantized checkpoints: what is read, what is replaced, and what stays as it was byte for byte."""

import copy
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from recalkv.compression import assemble, compress_checkpoint, compress_layers
from recalkv.errors import ModelUnavailableError, UnsupportedModelError
from recalkv.model.layers import CheckpointSource, ModuleSource
from recalkv.model.source import ModelReference, fingerprint
from recalkv.params import CompressionParams
from recalkv.store.folders import writing_folder
from tests import raises
from tests.quantized import KINDS, LINEAR, naive, published, published_experts, write
from tests.tiny import calibration, dense_model, plain, windows

CPU = torch.device("cpu")
PROJECTION = "model.layers.1.self_attn.v_proj"
SCALE = f"{PROJECTION}.weight_scale_inv"


@functools.cache
def held_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of every stored tensor, whatever the shards."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118
                tensor = shard.get_tensor(name)
                raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                found[name] = (str(tensor.dtype), tuple(tensor.shape), raw)
    return found


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def compress(folder: Path, tokenizer: Any, out: Path, **changes: Any) -> Path:
    """Compress a checkpoint like the command line does."""
    tokenizer.save_pretrained(folder)
    texts = {"words": [" ".join(f"{n}" for n in range(700))]}
    parameters = plain(**({"method": "palu", "ratio": 0.3} | changes))
    out.mkdir()
    reference = ModelReference(folder, "tiny", None, fingerprint(folder))
    compress_checkpoint(reference, texts, calibration(samples=4, length=24, text=["words"]), parameters, CPU, out)
    return out


def built(source: Any, parameters: CompressionParams, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Build the compressed model in memory."""
    result = compress_layers(source, windows(), calibration(), parameters)
    return assemble(source, result, parameters, dtype, {"name": None}, **options)


@torch.no_grad()
def loaded_alike(folder: Path, twin: Path) -> Any:
    """Load a folder with transformers, check that logits and tokens equal those of its twin, and return the model."""
    mine, theirs = (AutoModelForCausalLM.from_pretrained(each) for each in (folder, twin))
    ids, options = windows(2, 20), {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(mine(ids).logits, theirs(ids).logits)
    assert torch.equal(mine.generate(ids, **options), theirs.generate(ids, **options))
    return mine


def replaced_in(compressed: Path) -> set[str]:
    """Return the modules whose weights a method without refit replaces, according to the compressed config."""
    modules = set()
    for index, layer in enumerate(config_of(compressed)["recalkv"]["layers"]):
        moved = layer["head_permutation"] != sorted(layer["head_permutation"])
        letters = "kv" + "q" * moved + "o" * (moved or layer["value_layout"] == "fused")
        modules |= {f"model.layers.{index}.self_attn.{letter}_proj" for letter in letters}
    return modules


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Any:
    """Return a quantized checkpoint, its compressed version, and the compressed version of its dequantized twin."""

    @functools.cache
    def make(kind: str, family: str = "llama-gqa", **changes: Any) -> tuple[Path, Path, Path]:
        place = tmp_path_factory.mktemp("exported")
        # transformers assumes an even grid of blocks, but blocks of 16 do not divide the experts' 24 columns.
        quantized, dense = published(place, kind, family, **({"moe_intermediate_size": 32} if "moe" in family else {}))
        names = {quantized: "first", dense: "second"}
        first, second = (compress(each, tiny_tokenizer, place / name, **changes) for each, name in names.items())
        return quantized, first, second

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_formula(kind: str, tmp_path: Path) -> None:
    quantized, dense = (CheckpointSource(folder) for folder in published(tmp_path, kind))
    assert quantized.layer_tensors(1).keys() == dense.layer_tensors(1).keys()
    for index in range(3):
        expected = dense.layer_tensors(index)
        for name, tensor in quantized.layer_tensors(index).items():
            assert tensor.dtype is torch.float32
            # Dividing by 127 first or last rounds differently.
            tolerance = {"rtol": 2e-7, "atol": 0.0} if kind == "bitsandbytes" else {"rtol": 0.0, "atol": 0.0}
            torch.testing.assert_close(tensor, expected[name], **tolerance, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_replaced_stays_byte_for_byte(kind: str, exported: Any) -> None:
    quantized, compressed, _ = exported(kind)
    before, after, replaced = held_of(quantized), held_of(compressed), replaced_in(compressed)
    kept = {name for name in before if name.rpartition(".")[0] not in replaced}
    assert len(replaced) >= 6 and len(kept) > 2 * len(LINEAR)
    assert {name: after.get(name) for name in kept} == {name: before[name] for name in kept}
    # Nothing is left of the codes whose weight was replaced.
    new = after.keys() - kept
    assert all("self_attn" in name for name in new) and {after[name][0] for name in new} == {"torch.bfloat16"}
    assert not any(name.endswith(("scale", "scale_inv", "SCB", "weight_format", "packed")) for name in new)


@pytest.mark.parametrize("kind", KINDS)
def test_config_names_what_is_no_longer_quantized(kind: str, exported: Any) -> None:
    quantized, compressed, _ = exported(kind)
    before, after = (config_of(folder)["quantization_config"] for folder in (quantized, compressed))
    keys = {"fp8": "modules_to_not_convert", "compressed-tensors": "ignore"}
    key = keys.get(before["quant_method"], "llm_int8_skip_modules")
    assert {n: v for n, v in after.items() if n != key} == {n: v for n, v in before.items() if n != key}
    # The head is tied to a table that is not quantized; if it were not listed, transformers would look for codes.
    assert set(after[key]) == replaced_in(compressed) | {"lm_head", "model.embed_tokens"}
    assert config_of(compressed)["dtype"] == "bfloat16"


@pytest.mark.parametrize("method", ["palu", "recalkv"])
def test_queries_are_replaced_where_heads_move(method: str, exported: Any) -> None:
    quantized, compressed, _ = exported("fp8 blocks", "llama-mha", method=method)
    before, after = held_of(quantized), held_of(compressed)
    names = {f"model.layers.{index}.self_attn.{letter}_proj" for index in range(3) for letter in "qo"}
    moved = names & replaced_in(compressed)
    assert len([name for name in moved if "q_proj" in name]) == (3 if method == "recalkv" else 0)
    for name in names:
        assert (after[f"{name}.weight"] != before[f"{name}.weight"]) == (name in moved)
        assert (f"{name}.weight_scale_inv" not in after) == (name in moved)


@pytest.mark.parametrize("kind", ["fp8 blocks", "fp8 matrices"])
def test_transformers_loads_and_runs_it(kind: str, exported: Any) -> None:
    """The compressed checkpoint equals its dequantized twin on a CPU, where transformers dequantizes FP8 weights."""
    loaded_alike(*exported(kind)[1:])


@pytest.mark.parametrize("family", ["qwen3-moe", "phi3-fused", "glm4-moe"])
def test_experts_and_fused_projections(family: str, exported: Any) -> None:
    """Experts stay as they are stored, one by one, and a fused query-key-value projection is split."""
    quantized, compressed, twin = exported("fp8 blocks", family)
    before, after = held_of(quantized), held_of(compressed)
    kept = [name for name in before if "self_attn" not in name]
    assert any("experts.3.up_proj.weight_scale_inv" in name for name in kept) == ("moe" in family)
    assert all(after[name] == before[name] for name in kept) and not any("qkv_proj" in name for name in after)
    loaded_alike(compressed, twin)


def test_transformers_keeps_codes_where_it_can_multiply_them(exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the GPU check passed over, transformers loads codes and scales unchanged (products would need the GPU)."""
    quantized, compressed, _ = exported("fp8 blocks")
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    model, before = AutoModelForCausalLM.from_pretrained(compressed), held_of(quantized)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            coded = name != "lm_head" and name not in replaced_in(compressed)
            assert isinstance(module, FP8Linear) == coded, name
            if coded:
                assert module.weight.view(torch.uint8).numpy().tobytes() == before[f"{name}.weight"][2]
                assert module.weight_scale_inv.detach().numpy().tobytes() == before[f"{name}.weight_scale_inv"][2]


@torch.no_grad()
def test_built_in_memory_it_is_dequantized(tmp_path: Path) -> None:
    folders = published(tmp_path, "fp8 blocks")
    model, twin = (built(CheckpointSource(folder), plain(method="palu")) for folder in folders)
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    assert getattr(model.config, "quantization_config", None) is None
    assert torch.equal(model(windows(2, 20)).logits, twin(windows(2, 20)).logits)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    source = CheckpointSource(folder)
    return {name: source.stored(name) for name in source.names()}


def rewritten(folder: Path, tensors: dict[str, Tensor | None], **section: Any) -> Path:
    """Copy a quantized checkpoint with tensors replaced (None: removed) and quantization_config entries changed."""
    held = {name: tensor for name, tensor in (tensors_of(folder) | tensors).items() if tensor is not None}
    source, out = CheckpointSource(folder), Path(tempfile.mkdtemp(dir=folder.parent))
    config = copy.deepcopy(source.config)
    del config.quantization_config
    return write(out, held, config, quantization_config=source.held.config | section)


def read(folder: Path) -> Tensor:
    """Read the weight of the projection that the tests change."""
    return CheckpointSource(folder).tensor(f"{PROJECTION}.weight")


def test_missing_scale_is_named(tmp_path: Path) -> None:
    damaged = rewritten(published(tmp_path, "fp8 blocks")[0], {SCALE: None})
    message = rf"{PROJECTION}\.weight holds codes \(F8_E4M3\).*no {PROJECTION}\.weight_scale_inv: .*download it again"
    raises(ModelUnavailableError, message, CheckpointSource, damaged)


@pytest.mark.parametrize(
    ("tensors", "section", "found"),
    [
        ({}, {"weight_block_size": [16, 16]}, r"\(3, 3\); .* 16 x 16 has \(2, 3\)"),
        ({}, {"weight_block_size": None}, r"\(3, 3\); .* 24 x 48 has \(1, 1\)"),
        ({SCALE: torch.ones(3, 2)}, {}, r"\(3, 2\); .* 8 x 16 has \(3, 3\)"),
        ({SCALE: torch.ones(9)}, {}, r"\(9,\); .* 8 x 16 has \(3, 3\)"),
    ],
    ids=["other blocks", "no blocks", "other shape", "flat"],
)
def test_a_scale_that_does_not_fit_is_named(tensors: Any, section: Any, found: str, tmp_path: Path) -> None:
    damaged = rewritten(published(tmp_path, "fp8 blocks")[0], tensors, **section)
    CheckpointSource(damaged)
    message = rf"{PROJECTION}\.weight_scale_inv has the shape {found}.*download"
    raises(ModelUnavailableError, message, read, damaged)


def test_a_scale_beside_plain_weights_is_refused(tmp_path: Path) -> None:
    folder, _ = published(tmp_path, "fp8 blocks")
    widened = rewritten(folder, {f"{PROJECTION}.weight": read(folder).to(torch.bfloat16)})
    message = rf"{PROJECTION}\.weight is of type bfloat16 .*codes as F8_E4M3"
    raises(UnsupportedModelError, message, CheckpointSource, widened)


def test_codes_that_no_group_names_are_refused(tmp_path: Path) -> None:
    groups = copy.deepcopy(KINDS["int-quantized"].config["config_groups"])
    groups["group_0"]["targets"] = ["re:.*mlp.*", "model.layers.0.self_attn.k_proj"]
    source = CheckpointSource(rewritten(published(tmp_path, "int-quantized")[0], {}, config_groups=groups))
    source.tensor("model.layers.1.mlp.up_proj.weight")
    source.tensor("model.layers.0.self_attn.k_proj.weight")
    with pytest.raises(UnsupportedModelError, match=rf"{PROJECTION} is quantized, and no group .*correct its targets"):
        source.tensor(f"{PROJECTION}.weight")


def test_codes_in_another_order_are_refused(tmp_path: Path) -> None:
    order = {f"{PROJECTION}.weight_format": torch.tensor(2, dtype=torch.uint8)}
    other = rewritten(published(tmp_path, "bitsandbytes")[0], order)
    raises(UnsupportedModelError, rf"{PROJECTION}\.weight_format=2; 0, .*dequantize them first", read, other)


def test_each_module_is_read_by_its_own_group(tmp_path: Path) -> None:
    """In a checkpoint of mixed types, each module is read by its group, and a pattern takes precedence over a class."""
    folder, dense = published(tmp_path, "float-quantized rows")
    other, other_dense = published(tmp_path / "other", "pack-quantized")
    rows = dict.fromkeys(name for name in tensors_of(folder) if ".mlp." in name)
    fours = {name: tensor for name, tensor in tensors_of(other).items() if ".mlp." in name}
    groups = {
        kind: KINDS[kind].config["config_groups"]["group_0"] | {"format": kind.split()[0], "targets": [target]}
        for kind, target in (("float-quantized rows", "Linear"), ("pack-quantized", "re:.*mlp.*"))
    }
    mixed = rewritten(folder, rows | fours, config_groups=groups, format="mixed-precision")
    for name, tensor in CheckpointSource(mixed).layer_tensors(1).items():
        expected = CheckpointSource(other_dense if "mlp" in name else dense).layer_tensors(1)[name]
        assert torch.equal(tensor, expected), name


def test_blocks_at_the_edges_are_smaller(tmp_path: Path) -> None:
    """A weight of 24 x 48 in blocks of 16 x 32, which ends with a block of 8 x 16, is dequantized by the formula."""
    scale = torch.rand(2, 2) + 0.5
    place = rewritten(published(tmp_path, "fp8 blocks")[0], {SCALE: scale}, weight_block_size=[16, 32])
    codes = tensors_of(place)[f"{PROJECTION}.weight"].float()
    assert torch.equal(read(place), naive(codes, scale, (16, 32)).float())


def test_damage_that_is_found_late_leaves_no_folder(tmp_path: Path, tiny_tokenizer: Any) -> None:
    last = "model.layers.2.self_attn.o_proj.weight_scale_inv"
    damaged = rewritten(published(tmp_path, "fp8 blocks")[0], {last: torch.ones(1, 1)})
    with pytest.raises(ModelUnavailableError, match="o_proj"), writing_folder(tmp_path / "compressed") as place:
        compress(damaged, tiny_tokenizer, place / "inner")
    assert not (tmp_path / "compressed").exists()


def test_plain_checkpoints_keep_types_and_bytes_too(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """A sharded, untied checkpoint in three dtypes keeps dtypes and bytes; only an old buffer is dropped."""
    model = dense_model("llama-mha", num_hidden_layers=2)
    tensors = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    tensors |= {name: tensor.float() for name, tensor in tensors.items() if "norm" in name}
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].half()
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = write(tmp_path / "dense", tensors | {buffer: torch.ones(4)}, model.config, dtype="bfloat16")
    compressed = compress(folder, tiny_tokenizer, tmp_path / "compressed")
    before, after = held_of(folder), held_of(compressed)
    kept = [name for name in tensors if not any(f"self_attn.{letter}_proj" in name for letter in "kvo")]
    assert {before[name][0] for name in kept} == {"torch.bfloat16", "torch.float32", "torch.float16"}
    assert all(after[name] == before[name] for name in kept) and buffer not in after
    assert {after[name][0] for name in after.keys() - set(kept)} == {"torch.bfloat16"}
    loaded = AutoModelForCausalLM.from_pretrained(compressed)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("names", [["embed"], ["head"], ["embed", "head"]], ids=" ".join)
@torch.no_grad()
def test_tied_tables_under_either_name(names: list[str], tmp_path: Path, tiny_tokenizer: Any) -> None:
    model = dense_model("llama-gqa")
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    table = tensors.pop("model.embed_tokens.weight")
    tensors |= {{"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}[name]: table.clone() for name in names}
    folder = write(tmp_path / "dense", tensors, model.config)
    source = CheckpointSource(folder)
    assert torch.equal(source.head_weight(), table)
    assert torch.equal(source.embed(windows(1, 5), 1)[0], table[windows(1, 5)])
    compressed = compress(folder, tiny_tokenizer, tmp_path / "compressed")
    others = {name for name in held_of(compressed) if ".layers." not in name}
    assert others == {name for name in tensors if ".layers." not in name}
    loaded = AutoModelForCausalLM.from_pretrained(compressed)
    for model in (loaded, built(source, CompressionParams(method="palu", bits=16))):
        assert torch.equal(model.lm_head.weight, table) and torch.equal(model.model.embed_tokens.weight, table)


def test_a_head_of_its_own_stays_whatever_the_config_says() -> None:
    """An untied head is kept although the config ties it, as after a fine-tune that trained the head."""
    model = dense_model("llama-gqa")
    assert model.config.tie_word_embeddings
    head = torch.randn_like(model.lm_head.weight)
    model.lm_head.weight = torch.nn.Parameter(head)
    compressed = built(ModuleSource(model), CompressionParams(method="palu", bits=16))
    assert torch.equal(compressed.lm_head.weight, head)
    assert torch.equal(compressed.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_types_of_a_model_in_memory_are_kept() -> None:
    model = dense_model("llama-mha").bfloat16()
    model.model.norm.float()
    for layer in model.model.layers:
        layer.input_layernorm.float()
    parameters = CompressionParams(method="palu", ratio=0.3, group_size=2, bits=16)
    compressed = built(ModuleSource(model), parameters, torch.bfloat16, convert=False)
    types = {name: tensor.dtype for name, tensor in compressed.state_dict().items()}
    assert types["model.layers.0.input_layernorm.weight"] is types["model.norm.weight"] is torch.float32
    assert {kind for name, kind in types.items() if "norm" not in name} == {torch.bfloat16}


def test_experts_in_mxfp4_pass_through(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """MXFP4 experts are read by the formula, copied byte for byte, and give the same tokens as plain experts."""
    quantized, dense = published_experts(tmp_path)
    first, second = CheckpointSource(quantized), CheckpointSource(dense)
    for index in range(3):
        expected = second.layer_tensors(index)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in first.layer_tensors(index).items())
    compressed, twin = (
        compress(folder, tiny_tokenizer, tmp_path / f"compressed-{folder.name}", method="loss-aware", bits="mixed")
        for folder in (quantized, dense)
    )
    before, after, plain_after = held_of(quantized), held_of(compressed), held_of(twin)
    kept = {name for name in before if ".self_attn." not in name}
    assert sum(name.endswith(("_blocks", "_scales")) for name in kept) == 3 * 4
    assert {name: held for name, held in after.items() if ".self_attn." not in name} == {n: before[n] for n in kept}
    attention = [name for name in after if ".self_attn." in name]
    assert len(attention) > 20 and all(after[name] == plain_after[name] for name in attention)
    assert config_of(compressed)["quantization_config"] == config_of(quantized)["quantization_config"]
    assert loaded_alike(compressed, twin).model.layers[0].mlp.experts.gate_up_proj.dtype is torch.bfloat16
    # A model that transformers dequantized while loading is like any other model.
    assert ModuleSource(AutoModelForCausalLM.from_pretrained(quantized)).num_layers == 3


def test_scales_of_mxfp4_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder, _ = published_experts(tmp_path)
    name = "model.layers.1.mlp.experts.down_proj"
    short = rewritten(folder, {f"{name}_scales": tensors_of(folder)[f"{name}_scales"][1:]})
    with pytest.raises(ModelUnavailableError, match=rf"{name}_scales has the shape \(3, 64, 1\); .*\(4, 64, 1\)"):
        CheckpointSource(short).tensor(name)
    lost = rewritten(folder, {f"{name}_scales": None})
    raises(ModelUnavailableError, rf"{name}_blocks holds codes \(U8\).*no {name}_scales", CheckpointSource, lost)
