"""What the vLLM backend refuses, with value, rule and remedy; vLLM itself is tested by `make test-vllm`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.modeling_utils import local_torch_dtype

from recalkv.codec.context import checkpoint_fingerprint, model_fingerprint
from recalkv.codec.layer import LayerCodec
from recalkv.errors import CheckpointError, ParameterError
from recalkv.vllm.checks import TESTED, check
from recalkv.vllm.shards import shard
from tests import raises
from tests.coded import packed
from tests.test_codec_decode import _layer_codec
from tests.tiny import dense_model

VERSION = ".".join(map(str, TESTED[0])) + ".1"


def config(
    cache_dtype: str = "auto", one_kind: bool = False, mrope: bool = False, images: bool = False, prefix: bool = False,
    connector: Any = None, offloaded: float | None = None, chunk: int | None = None, dual: Any = None,
    drafts: str | None = None, dbo: bool = False, hybrid: bool = False, states: str = "none", **parallel: int,
) -> Any:  # fmt: skip
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            cache_dtype=cache_dtype, kv_offloading_size=offloaded, mamba_cache_mode=states
        ),
        kv_transfer_config=connector,
        model_config=SimpleNamespace(
            multimodal_config=SimpleNamespace(language_model_only=not images), uses_mrope=mrope,
            is_mm_prefix_lm=prefix, dtype=torch.bfloat16, attention_chunk_size=chunk, is_hybrid=hybrid,
            hf_text_config=SimpleNamespace(dual_chunk_attention_config=dual),
        ),
        speculative_config=None if drafts is None else SimpleNamespace(method=drafts),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=one_kind),
        parallel_config=SimpleNamespace(use_ubatching=dbo, **parallel),
    )  # fmt: skip


def test_what_can_be_served_is_not_refused() -> None:
    check(VERSION + "+cpu", config())
    served: list[dict[str, Any]] = [
        {},
        {"drafts": "ngram"},
        {"mrope": True},
        {"prefix": True},
        {"cache_dtype": "bfloat16"},
        {"hybrid": True},
        {"states": "align"},
    ]
    for changes in (*served, {"images": True, "pipeline_parallel_size": 1}):
        check(VERSION, config(**changes))


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0.0", "dev"])
def test_other_versions(version: str) -> None:
    with pytest.raises(CheckpointError, match=rf"vLLM {version} is untested with this backend, .* install vllm==0.32"):
        check(version, config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_dtype": "fp8"}, "kv_cache_dtype='fp8' cannot be applied .* leave it at 'auto'"),
        ({"cache_dtype": "float16"}, "kv_cache_dtype='float16' cannot be applied"),
        ({"connector": object()}, "kv_transfer_config and kv_offloading_size are not served: .* leave them out"),
        ({"offloaded": 4.0}, "kv_transfer_config and kv_offloading_size are not served: .* leave them out"),
        ({"prefix": True, "images": True}, "tokens of an image attend .* --language-model-only"),
        ({"chunk": 8192}, "layers that attend within chunks .* serve without the side-car"),
        ({"dual": {"chunk_size": 8}}, "dual chunk attention .* take dual_chunk_attention_config out"),
        ({"drafts": "eagle"}, "speculative_config.method='eagle' is not served, .* choose one of ngram"),
        ({"hybrid": True, "states": "align"}, "prefix caching is not served .* give --no-enable-prefix-caching"),
        ({"dbo": True}, "microbatches .* are untested .* leave them out"),
        ({"one_kind": True}, "disable_hybrid_kv_cache_manager=True .* leave it out"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 is not served; leave it at 1"),
        ({"mrope": True, "images": True}, "positions of images .* --language-model-only"),
    ],
)
def test_what_rows_cannot_have(changes: dict[str, Any], message: str) -> None:
    raises(ParameterError, message, check, VERSION, config(**changes))


def test_processes_have_heads_of_their_own() -> None:
    """Each of two tensor-parallel ranks packs its heads to its slice of the rows, for four groups of two heads."""
    codec = _layer_codec(4)
    parts = [shard(codec, rank, 2) for rank in range(2)]
    assert sum(part.row_bytes for part in parts) == codec.row_bytes
    keys, values = torch.randn(2, 1, codec.kv_heads, 5, 32, generator=torch.Generator().manual_seed(0))
    places = torch.arange(5)[None]
    whole = packed(codec, keys, values, places)
    for rank, part in enumerate(parts):
        own = slice(rank * part.kv_heads, (rank + 1) * part.kv_heads)
        rows = whole[..., rank * part.row_bytes : (rank + 1) * part.row_bytes]
        assert torch.equal(packed(part, keys[:, own], values[:, own], places), rows)
    assert shard(codec, 0, 1) is codec


@pytest.mark.parametrize(("groups", "ranks", "fitting"), [(1, 2, "1"), (4, 8, "1, 2, 4"), (4, 3, "1, 2, 4")])
def test_a_group_is_not_cut(groups: int, ranks: int, fitting: str) -> None:
    message = rf"tensor_parallel_size={ranks} would cut groups of 2 .* that fit are {fitting}\. Fit with fewer"
    raises(ParameterError, message, shard, _layer_codec(groups), 0, ranks)


def test_more_processes_than_heads_hold_the_same() -> None:
    whole = _layer_codec(1)
    means = whole.key_mean[:1].repeat(1, 2), whole.value_mean[:1].repeat(1, 2)
    one = LayerCodec(whole.keys, whole.values, *means, whole.rotation)
    assert one.kv_heads == one.kv_heads_per_code == 1 and all(shard(one, rank, 4) is one for rank in range(4))
    raises(ParameterError, "would cut groups of 2", shard, whole, 0, 4)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama-gqa", "gemma3", "qwen3-next-hybrid"])
def test_a_folder_has_its_models_fingerprint(family: str, default: torch.dtype, tmp_path: Any) -> None:
    """A checkpoint folder has its model's fingerprint under any default dtype, as engines set one while loading."""
    model = dense_model(family)
    model.save_pretrained(tmp_path)
    # A file that is read first, of a vision tower beside the model.
    save_file({"a.position_embeddings.weight": torch.ones(4, 8)}, tmp_path / "a.safetensors")
    with local_torch_dtype(default):
        assert checkpoint_fingerprint(tmp_path, model.config) == model_fingerprint(model)
    assert checkpoint_fingerprint(tmp_path / "nowhere", model.config) is None
