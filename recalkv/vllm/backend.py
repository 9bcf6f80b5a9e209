"""vLLM attention backend over rows of codes: it encodes the keys and values of unmodified models."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config, set_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec

from recalkv.errors import UnsupportedModelError
from recalkv.runtime.paged import Chunk, PagedLayer, Tokens
from recalkv.runtime.partial import Scoring
from recalkv.trellis.rows import TILE
from recalkv.vllm.checks import BACKEND
from recalkv.vllm.served import ServedModel, served_model
from recalkv.vllm.steps import Step, StepBuilder


class CodecBackend(AttentionBackend):
    """Attention backend; each layer gets its own subclass, which knows the layer's row bytes."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto"]
    served: ClassVar[ServedModel | None] = None
    layer: ClassVar[str | None] = None

    @staticmethod
    def get_name() -> str:
        """Return the name shown in vLLM's log."""
        return BACKEND

    @staticmethod
    def get_impl_cls() -> Any:
        """Return the attention implementation."""
        return CodecImpl

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        """Return the metadata builder."""
        return StepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the supported block sizes: whole tiles."""
        return [MultipleOf(TILE)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Describe the cache as one row of bytes per token for all KV heads together."""
        served = served_model() if cls.served is None else cls.served
        assert served is not None
        if cls.layer is None:  # called before layers are known
            bytes_of_row = max(each.row_bytes for each in served.layers.values())
        else:
            bytes_of_row = served.row_bytes(cls.layer)
        return replace(spec, num_kv_heads=1, head_size=bytes_of_row, head_size_v=0, dtype=torch.uint8)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True: sliding windows are supported."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True: learned sink logits are supported."""
        return True


class CodecImpl(AttentionImpl[Step]):
    """Attention implementation of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **further: Any,
    ) -> None:
        served = served_model()
        assert served is not None, "the backend is chosen for models with a side-car alone"
        if alibi_slopes is not None or kv_sharing_target_layer_name is not None:
            what = "ALiBi" if alibi_slopes is not None else f"keys shared with {kv_sharing_target_layer_name}"
            raise UnsupportedModelError(f"codec: {what} cannot be served from rows; serve without the side-car.")
        self.served, self.config = served, get_current_vllm_config()
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window, self.scoring = sliding_window, Scoring(self.scale, logits_soft_cap or None, sinks)
        self._dense: tuple[Any, ...] = (
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name,
        )  # fmt: skip
        self._further = further | ({} if sinks is None else {"sinks": sinks})
        self._name = ""
        self.paged: PagedLayer | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Look up this layer's name and codec, which vLLM makes available only once all layers are built."""
        if self.paged is not None:
            return  # weights were reloaded; the row layout does not change
        layers = self.config.compilation_config.static_forward_context
        self._name, layer = next((n, each) for n, each in layers.items() if getattr(each, "impl", None) is self)
        codec = self.served.take(self._name, layer)
        if codec is None:
            backend: Any = resolve_obj_by_qualname(self.served.dense)
            with set_current_vllm_config(self.config):
                layer.attn_backend, layer.impl = backend, backend.get_impl_cls()(*self._dense, **self._further)
            layer.impl.process_weights_after_loading(act_dtype)
            return
        unknown = sorted(set(self._further) - {"sinks"})
        if unknown:
            raise UnsupportedModelError(
                f"codec: {self._name} asks its attention for {', '.join(unknown)}, which the backend does not know; "
                f"serve without the side-car."
            )
        window, sinks = self.served.codec.window, self.served.codec.sinks
        self.paged = PagedLayer(
            codec, window, sinks, self.sliding_window, self.scoring,
            self.config.model_config.max_model_len, self.config.device_config.device,
        )  # fmt: skip
        self.served.exact.readers.append(self.paged)
        layer.attn_backend = type("CodecBackend", (CodecBackend,), {"served": self.served, "layer": self._name})

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the step's tokens, (tokens, heads, d), to the cache and compute their attention."""
        steps = get_forward_context().attn_metadata
        if attn_metadata is None or not isinstance(steps, dict):
            # Profiling run: before allocating the cache, vLLM measures the peak memory of a step without requests.
            if self.paged is not None and output.is_cuda and not kv_cache.numel():
                self.paged.rehearse(query, key, value, output, self.config.model_config.max_model_len)
            return output.zero_()
        step, paged = attn_metadata, self._bound(kv_cache)
        exact: Step = steps[self.served.exact.prefix]
        query, key, value = (each[: step.tokens] for each in (query, key, value))
        places, lengths, table = step.decoded
        itself = paged.writes_as_it_decodes(query)
        written = step.chunked if itself and step.chunks else None
        if step.chunks or not itself:
            own = key, value, step.positions, step.slots, exact.slots
            paged.write(*(own if written is None else (each[written] for each in own)))
        if len(lengths):
            own_query, own_key, own_value = (each if places is None else each[places] for each in (query, key, value))
            tokens = Tokens(table, exact.decoded[2], lengths, step.longest)
            result = paged.decode(own_query, own_key, own_value, tokens)
            if places is None:
                output[: step.tokens] = result
            else:
                output[places] = result
        if step.chunks:
            chunks = [Chunk(step.table[n], exact.table[n], first, start, size) for n, first, start, size in step.chunks]
            paged.attend(query, key, value, chunks, output)
        return output

    def _bound(self, kv_cache: Tensor) -> PagedLayer:
        """Return the layer bound to vLLM's cache, which vLLM allocates after a first forward pass without one."""
        paged = self.paged
        assert paged is not None
        if paged.rows.data_ptr() != kv_cache.data_ptr():
            paged.bind(_as_paged(kv_cache, paged.codec.row_bytes), self.served.exact.states(self._name))
        return paged


def _as_paged(rows: Tensor, row_bytes: int) -> Tensor:
    """View vLLM's cache (blocks, 1, slots, bytes) as (blocks, tiles, row bytes, TILE)."""
    shape = rows.shape[0], rows.shape[2] // TILE, row_bytes, TILE
    return rows.as_strided(shape, (rows.stride(0), row_bytes * TILE, TILE, 1), rows.storage_offset())
