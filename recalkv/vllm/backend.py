"""vLLM's attention backend over rows of codes: what layers hand over is coded, and no model is changed for it."""

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config, set_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from recalkv.codec.layout import TILE
from recalkv.errors import UnsupportedModelError
from recalkv.runtime.coded import kernel
from recalkv.runtime.paged import Chunk, PagedLayer, Tokens
from recalkv.vllm import BACKEND
from recalkv.vllm.served import ServedModel, as_paged, served_model, start_state_kernels

__all__ = ["CodecBackend", "CodecImpl", "ExactBackend", "Step"]

_DECODED = 8
"""New tokens of a request up to which each is decoded as a sequence of its own: drafts, above all. More are a chunk,
for which the rows of all older tokens are unpacked once."""


@dataclass
class Step(AttentionMetadata):
    """One step's requests, in one of their lists of blocks.

    What is on the device stays there until it is asked for as a list, so that a step in which each request has one new
    token can be captured into a CUDA graph.

    Attributes
    ----------
    tokens
        Of all requests, without padding but for a captured step's.
    starts
        First token of each request in the step, and the end of the last.
    longest
        Tokens that no request has more of, the new ones included.
    lengths : (requests,)
        Tokens of each request, the new ones included.
    table : (requests, any) int32, on a CPU int64
        Blocks of the cache, in the order of the tokens.
    slots : (tokens,) int64
        Where the new tokens go: block times its size, plus the place in it.
    """

    tokens: int
    starts: list[int]
    longest: int
    lengths: Tensor
    table: Tensor
    slots: Tensor

    @functools.cached_property
    def seen(self) -> list[int]:
        """Lengths, on the CPU."""
        lengths: list[int] = self.lengths.tolist()
        return lengths

    @property
    def single(self) -> bool:
        """Whether each request has one new token."""
        return self.tokens == len(self.table)

    @functools.cached_property
    def decoded(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """Tokens that are decoded, None for all; their lengths, and their requests' blocks."""
        if self.single:
            return None, self.lengths, self.table
        tokens: list[int] = []
        requests: list[int] = []
        lengths: list[int] = []
        for number, (start, end) in enumerate(itertools.pairwise(self.starts)):
            if end - start <= _DECODED:
                tokens += range(start, end)
                requests += [number] * (end - start)
                lengths += range(self.seen[number] - (end - start) + 1, self.seen[number] + 1)
        places = torch.tensor(tokens, dtype=torch.int64, device=self.table.device)
        if not tokens:
            return places, places, self.table[:0]
        return places, places.new_tensor(lengths), self.table[places.new_tensor(requests)]

    @functools.cached_property
    def chunks(self) -> list[tuple[int, int, int, int]]:
        """Of requests with more tokens: request, first token, slot of it in the sequence, tokens."""
        if self.single:
            return []
        spans = enumerate(itertools.pairwise(self.starts))
        return [
            (n, start, self.seen[n] - end + start, end - start) for n, (start, end) in spans if end - start > _DECODED
        ]

    @functools.cached_property
    def chunked(self) -> Tensor | None:
        """Tokens of chunks, None for all."""
        if sum(count for *_, count in self.chunks) == self.tokens:
            return None
        places = [torch.arange(start, start + count) for _, start, _, count in self.chunks]
        return torch.cat(places).to(self.table.device)

    @functools.cached_property
    def positions(self) -> Tensor:
        """Place of each token in its sequence, (tokens,)."""
        if self.single:
            return self.lengths.long() - 1
        spans = zip(self.seen, itertools.pairwise(self.starts), strict=True)
        return torch.cat([torch.arange(seen - end + start, seen) for seen, (start, end) in spans]).to(self.table.device)


class StepBuilder(AttentionMetadataBuilder[Step]):
    """Makes :class:`Step`, once for all layers that have the same lists of blocks."""

    _last: ClassVar[tuple[Any, Step] | None] = None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Steps of one new token a request, where the kernel decodes."""
        served = kernel() is not None
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if served else AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        """Of what vLLM knows of the step."""
        common = common_attn_metadata
        # Layers with rows of unequal size have builders of their own.
        if StepBuilder._last is not None and StepBuilder._last[0] is common:
            return StepBuilder._last[1]
        requests = common.num_reqs
        table = common.block_table_tensor[:requests]
        step = Step(
            common.num_actual_tokens,
            common.query_start_loc_cpu[: requests + 1].tolist(),
            common.max_seq_len,
            common.seq_lens[:requests],
            # Compiled loops read it as 64-bit; kernels as it is, where captured steps find it again.
            table.long() if table.device.type == "cpu" else table,
            common.slot_mapping[: common.num_actual_tokens],
        )
        if table.device.type == "cpu":
            step.lengths = step.lengths.long()
        StepBuilder._last = common, step
        return step


class ExactStepBuilder(StepBuilder):
    """The same of the exact states, of which a process has one."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        start_state_kernels(vllm_config)


class CodecBackend(AttentionBackend):
    """The backend; each layer has one of its own, which knows the bytes of its rows."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto"]
    served: ClassVar[ServedModel | None] = None
    layer: ClassVar[str | None] = None

    @staticmethod
    def get_name() -> str:
        """As vLLM's log has it."""
        return BACKEND

    @staticmethod
    def get_impl_cls() -> Any:
        """What attends."""
        return CodecImpl

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        """What describes a step."""
        return StepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Whole tiles."""
        return [MultipleOf(TILE)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """A row of bytes a token, of all KV heads together."""
        served = served_model() if cls.served is None else cls.served
        assert served is not None
        if cls.layer is None:  # asked before layers are known
            bytes_of_row = max(each.row_bytes for each in served.layers.values())
        else:
            bytes_of_row = served.row_bytes(cls.layer)
        return replace(spec, num_kv_heads=1, head_size=bytes_of_row, head_size_v=0, dtype=torch.uint8)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows are served."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """And learned sinks."""
        return True


class ExactBackend(CodecBackend):
    """Of the exact states, whose blocks are not those of rows cut anew: every block's bytes must stand together."""

    @staticmethod
    def get_impl_cls() -> Any:
        """None: vLLM asks where it has to know what an implementation can do, and takes this for nothing special."""
        raise NotImplementedError

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        """What describes a step."""
        return ExactStepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any."""
        return [MultipleOf(1)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """As it is."""
        return spec

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Blocks first."""
        return (KVCacheLayout.BLHNC,)


class CodecImpl(AttentionImpl[Step]):
    """Attention of one layer."""

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
        self.sliding_window, self.softcap, self.sinks = sliding_window, logits_soft_cap or None, sinks
        self._dense: tuple[Any, ...] = (
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name,
        )  # fmt: skip
        self._further = further | ({} if sinks is None else {"sinks": sinks})
        self._name, self._cache = "", 0
        self._paged: PagedLayer | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Once all layers are made: which one this is, as vLLM does not say before, and what its rows are."""
        layers = self.config.compilation_config.static_forward_context
        self._name, layer = next((n, each) for n, each in layers.items() if getattr(each, "impl", None) is self)
        codec = self.served.take(self._name, layer)
        if codec is None:
            backend: Any = resolve_obj_by_qualname(self.served.dense)
            with set_current_vllm_config(self.config):
                layer.attn_backend, layer.impl = backend, backend.get_impl_cls()(*self._dense, **self._further)
            layer.impl.process_weights_after_loading(act_dtype)
            return
        window, sinks = self.served.codec.window, self.served.codec.sinks
        self._paged = PagedLayer(
            codec, window, sinks, self.sliding_window, self.scale, self.softcap, self.sinks,
            self.config.model_config.max_model_len, self.config.device_config.device,
        )  # fmt: skip
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
        """Write a step's tokens, (tokens, heads, d), and attend from them."""
        steps = get_forward_context().attn_metadata
        if attn_metadata is None or not isinstance(steps, dict):
            # vLLM measures its memory with no requests.
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
        """The layer over vLLM's cache, which it makes after a first pass without one."""
        paged = self._paged
        assert paged is not None
        if self._cache != kv_cache.data_ptr():
            self._cache = kv_cache.data_ptr()
            paged.bind(as_paged(kv_cache, paged.codec.row_bytes, TILE), self.served.exact.states(self._name))
        return paged
