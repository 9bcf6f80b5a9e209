"""Attention of vLLM's decoders over a latent cache: :class:`recalkv.model.attention.LatentAttention` on paged rows."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import AutoWeightsLoader, extract_layer_index
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from recalkv.errors import ParameterError
from recalkv.model.attention import Cached, LatentAttention, compiled_loops
from recalkv.model.families import attention_layers
from recalkv.model.family import family_of
from recalkv.model.slots import SlotRotary, layer_slots
from recalkv.model.spec import LatentSpec
from recalkv.vllm.backend import LatentBackend, LatentBatch
from recalkv.vllm.shards import shard, shard_weight
from recalkv.vllm.window import ExactWindow

__all__ = ["ServedAttention", "specs"]


class ServedAttention(LatentAttention, AttentionLayerBase):
    """A layer's attention over vLLM's paged cache: one row of latents, or packed latents, a token.

    With tensor parallelism it holds its process's groups of heads.
    """

    supports_dcp = False

    def __init__(self, *_: Any, prefix: str, **__: Any) -> None:
        config: Any = get_current_vllm_config().model_config.hf_text_config
        self._whole, self._parts = specs(config)
        self._rank, self._ranks = get_tensor_model_parallel_rank(), len(self._parts)
        super().__init__(config, self._parts[self._rank], extract_layer_index(prefix))
        self._number = attention_layers(config).index(self.layer_idx)
        norm: Any = self.q_norm
        if self._ranks > 1 and norm is not None and norm.weight.numel() != self.head_dim:
            raise ParameterError(
                f"tensor_parallel_size={self._ranks} would cut the norms of queries and keys, which this family takes "
                f"over all heads of a token; set it to 1 and serve more replicas."
            )
        # An unset name stands for transformers' eager attention, which masks of booleans, as below, are not for.
        config._attn_implementation = self.family.attention_implementation
        self.prefix, self.slots = prefix, _slots(config)[self.layer_idx]
        self.kv_cache = torch.empty(0)
        layers = get_current_vllm_config().compilation_config.static_forward_context
        layers[prefix] = self
        self.window, self.window_columns = None, slice(0)
        if self.exact_window:
            # Behind the rows' own name: vLLM gives blocks in this order.
            self.window = ExactWindow.of(layers, prefix, self.exact_window)
            parts = [part.layers[self._number] for part in self._parts]
            self.window_columns = self.window.place(parts, self._rank)

    def get_attn_backend(self) -> type[LatentBackend]:
        """The plugin's."""
        return LatentBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """One state a token: exactly the bytes that the layer caches, of the process that caches most.

        vLLM wants one size for all processes.
        """
        dtype = self.k_proj.weight.dtype if self.key_rows is None else torch.uint8
        # Beside exact latents vLLM wants one size of all layers whose window slides, or forgets some of them.
        equal = self.window is not None and self.sliding_window is not None
        layers = range(self._whole.geometry.layers) if equal else (self._number,)
        columns = max(part.layers[layer].cached_bytes(1) for part in self._parts for layer in layers)
        sizes: dict[str, Any] = {
            "block_size": vllm_config.cache_config.block_size,
            "num_kv_heads": 1,
            "head_size": columns,
            "head_size_v": 0,
            "dtype": dtype,
        }
        if self.sliding_window is not None:
            return SlidingWindowSpec(**sizes, sliding_window=self.sliding_window)
        return FullAttentionSpec(**sizes)

    @property
    def _columns(self) -> tuple[int, int]:
        """Of a cached row that are keys' (or both's), and values'."""
        if self.key_rows is None:
            return sum(self.key_ranks), 0 if self.joint else sum(self.value_ranks)
        return self.key_rows.row_bytes, 0 if self.value_rows is None else self.value_rows.row_bytes

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:  # type: ignore[override]
        """Attend (tokens, m) hidden states of all requests; vLLM's positions are slots, which the cache tells."""
        hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        output = torch.empty_like(hidden_states)
        torch.ops.vllm.recalkv_attention(hidden_states, output, self.prefix)
        return output

    def attend(self, hidden_states: Tensor, output: Tensor, batch: LatentBatch) -> None:
        """Write the attention's output for the tokens of a step, after their latents went to the cache."""
        query, *exact = self._latents(hidden_states[None, : batch.tokens])
        if self.family.query_scale is not None:
            query = query * self.family.query_scale(self.config, batch.positions)[:, None, None].to(query.dtype)
        rows = torch.cat(self._rows(*exact), dim=-1)[0, 0]
        # [blocks, slots of a block, columns]
        cache = self.kv_cache[:, 0]
        cache = cache if cache.dtype == rows.dtype else cache.view(rows.dtype)
        cache = cache[..., : rows.shape[-1]]
        cache[batch.slots // cache.shape[1], batch.slots % cache.shape[1]] = rows
        latents = (exact[0] if self.joint else torch.cat(exact, dim=-1))[0, 0]
        if self.window is not None:
            self.window.write(latents, self.window_columns)
        inputs = query.new_empty(batch.tokens, self.o_proj.in_features)
        decoded = self._decode(query[0], cache, batch, inputs)
        for request, (start, end) in enumerate(itertools.pairwise(batch.starts)):
            if end - start > decoded:
                recent = None
                if self.window is not None:
                    before = self.window.before(request, self.window_columns, latents.dtype)
                    recent = torch.cat([before, latents[start:end]])[None, None]
                own = cache, batch.blocks[request], batch.seen[request], recent
                inputs[start:end] = self._attend_request(query[:, start:end], *own)[0]
        if self.gate_proj is not None:
            inputs = self._gated(inputs, hidden_states[: batch.tokens])
        result = self.o_proj(inputs)
        output[: batch.tokens] = result if self._ranks == 1 else tensor_model_parallel_all_reduce(result)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take this process's part of each."""
        place = self._whole, self._number, self._rank, self._ranks
        parts = (shard_weight(*place, name, weight) for name, weight in weights)
        return AutoWeightsLoader(self).load_weights(part for part in parts if part is not None)

    def _decode(self, query: Tensor, cache: Tensor, batch: LatentBatch, inputs: Tensor) -> bool:
        """Attend to one new token of each request that has just one, all at once; whether that could be done."""
        requests, blocks = batch.decoding
        loops = compiled_loops() if requests and query.device.type == "cpu" else None
        if loops is None:
            return False
        places, seen = [batch.starts[request] for request in requests], [batch.seen[request] for request in requests]
        keys, values = cache.split(list(self._columns), dim=-1)
        recent = None if self.window is None else self.window.newest(self.window_columns, query.dtype)
        output: Tensor | None = loops.paged_output(self, query[places, None], keys, values, blocks, seen, recent)
        if output is None:
            return False
        inputs[places] = output[:, 0]
        return True

    def _attend_request(self, query: Tensor, cache: Tensor, blocks: Tensor, seen: int, recent: Tensor | None) -> Tensor:
        """What the output projection reads of one request's new tokens, (1, tokens, its inputs)."""
        tokens, size, window = query.shape[1], cache.shape[1], self.sliding_window
        keys, values = cache.split(list(self._columns), dim=-1)
        # Blocks before the window may be gone.
        first = 0 if window is None else max(0, seen - tokens + 1 - window) // size
        own = blocks[first : -(-seen // size)]
        z_k, z_v = (part[own].flatten(0, 1)[None, None, : seen - first * size] for part in (keys, values))
        mask, offset = None, first * size
        if window is not None or (tokens > 1 and recent is None):
            places = torch.arange(seen - tokens, seen, device=query.device)[:, None]
            slots = torch.arange(offset, seen, device=query.device)
            mask = slots <= places
            if window is not None:
                mask &= slots > places - window
            mask = mask[None, None]
        nothing = query[..., :0], query[..., :0]
        return self._attend(query, Cached(z_k, z_v, seen, offset, False, recent), nothing, mask, {})[0]


def _attention(hidden_states: Tensor, output: Tensor, prefix: str) -> None:
    context = get_forward_context()
    batches = context.attn_metadata
    batch = batches.get(prefix) if isinstance(batches, dict) else None
    if batch is None:
        # vLLM measures its memory with no requests.
        output.zero_()
        return
    layer: Any = context.no_compile_layers[prefix]
    layer.attend(hidden_states, output, batch)


def _attention_shapes(hidden_states: Tensor, output: Tensor, prefix: str) -> None:
    return


direct_register_custom_op(
    op_name="recalkv_attention", op_func=_attention, mutates_args=["output"], fake_impl=_attention_shapes
)


def specs(config: Any) -> tuple[LatentSpec, list[LatentSpec]]:
    """Of the whole model and of each process, read once for all layers."""
    if getattr(config, "_recalkv_specs", None) is None:
        whole, ranks = LatentSpec.from_config(config), get_tensor_model_parallel_world_size()
        object.__setattr__(config, "_recalkv_specs", (whole, [shard(whole, rank, ranks) for rank in range(ranks)]))
    found: tuple[LatentSpec, list[LatentSpec]] = config._recalkv_specs
    return found


def _slots(config: Any) -> list[SlotRotary]:
    """Rotary tables of the layers."""
    if getattr(config, "_recalkv_slots", None) is None:
        object.__setattr__(config, "_recalkv_slots", layer_slots(config, family_of(config).rotary(config)))
        for slots in config._recalkv_slots:
            # By vLLM's own rule: cached states of a prefix must not depend on what follows.
            slots.longest = get_current_vllm_config().model_config.max_model_len
    found: list[SlotRotary] = config._recalkv_slots
    return found
