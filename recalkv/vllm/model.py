"""Attention of vLLM's decoders over a latent cache: :class:`recalkv.model.attention.LatentAttention` on paged rows."""

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
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
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import AutoWeightsLoader, extract_layer_index
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from recalkv.errors import ParameterError
from recalkv.kernels.launch import ALL_SLOTS
from recalkv.kernels.module import KernelAttention, why_not
from recalkv.kernels.rotary import TileRotary
from recalkv.kernels.trial import why_wrong
from recalkv.model.attention import Cached, LatentAttention
from recalkv.model.cpu import compiled_loops
from recalkv.model.families import attention_layers
from recalkv.model.family import family_of
from recalkv.model.slots import SlotRotary, layer_slots
from recalkv.model.spec import LatentSpec
from recalkv.vllm.backend import LatentBackend, LatentBatch
from recalkv.vllm.shards import shard, shard_weight
from recalkv.vllm.window import ExactWindow

__all__ = ["ServedAttention"]

# vLLM shows what is under its own name.
_log = init_logger("vllm.recalkv")
_OPERATOR = "vllm::recalkv_attention"


class ServedAttention(KernelAttention, AttentionLayerBase):
    """A layer's attention over vLLM's paged cache: one row of latents, or packed latents, a token.

    With tensor parallelism it holds its process's groups of heads.
    """

    supports_dcp = False

    def __init__(self, *_: Any, prefix: str, **__: Any) -> None:
        vllm_config = get_current_vllm_config()
        config: Any = vllm_config.model_config.hf_text_config
        layers = vllm_config.compilation_config.static_forward_context
        reach = vllm_config.model_config.max_model_len
        shared = _Shared.of(config, layers, reach)
        rank = get_tensor_model_parallel_rank()
        index = extract_layer_index(prefix)
        super().__init__(config, shared.parts[rank], index, shared.slots[index])
        self.shared, self._whole, self._parts = shared, shared.whole, shared.parts
        self._rank, self._ranks, self._reach = rank, len(shared.parts), reach
        self._number = attention_layers(config).index(self.layer_idx)
        norm: Any = self.q_norm
        if self._ranks > 1 and norm is not None and norm.weight.numel() != self.head_dim:
            raise ParameterError(
                f"tensor_parallel_size={self._ranks} would cut the norms of queries and keys, which this family takes "
                f"over all heads of a token; set it to 1 and serve more replicas."
            )
        # An unset name stands for transformers' eager attention, which masks of booleans, as below, are not for.
        config._attn_implementation = self.family.attention_implementation
        self.prefix, self.kv_cache = prefix, torch.empty(0)
        layers[prefix] = self
        # What runs between the pieces of a model that vLLM captures; by default it names its own attention.
        between = vllm_config.compilation_config.splitting_ops
        if between and _OPERATOR not in between:
            between.append(_OPERATOR)
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
        # The padding of a captured step has no slot; block 0 is nobody's.
        slots = batch.slots.clamp_min(0)
        cache[slots // cache.shape[1], slots % cache.shape[1]] = rows
        latents = (exact[0] if self.joint else torch.cat(exact, dim=-1))[0, 0]
        if self.window is not None:
            self.window.write(latents, self.window_columns)
        inputs = decoded = self._decode(query[0], cache, batch) if batch.decoding else None
        if inputs is None or not batch.single:
            inputs = query.new_empty(batch.tokens, self.o_proj.in_features)
            if decoded is not None:
                inputs[batch.places] = decoded
            for request, (start, end) in enumerate(itertools.pairwise(batch.starts)):
                if end - start > (decoded is not None):
                    recent = None
                    if self.window is not None:
                        before = self.window.before(request, self.window_columns, latents.dtype)
                        recent = torch.cat([before, latents[start:end]])[None, None]
                    own = cache, batch.table[request], batch.seen[request], recent
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

    @functools.cached_property
    def kernels(self) -> bool:
        """Whether the Triton kernels decode: on a device that has them, once they got a trial step right."""
        reason = why_not(self)
        if reason is None:
            self.kernels = True
            self.prepare(self.shared.tiled(self.slots), self._reach)
            reason = why_wrong(self)
        if reason is not None and self.k_proj.weight.device.type != "cpu":
            _log.warning_once("Decoding in plain torch, a request at a time: %s.", reason)
        return reason is None

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        """Called by vLLM once the weights are there: kernels are chosen before requests come."""
        _ = self.kernels

    def _rows(self, z_k: Tensor, z_v: Tensor) -> tuple[Tensor, Tensor]:
        return super()._rows(z_k, z_v) if self.kernels else LatentAttention._rows(self, z_k, z_v)

    def _by_kernel(self, query: Tensor, cached: Cached, mask: Any) -> bool:
        return self.kernels and super()._by_kernel(query, cached, mask)

    def _decode(self, query: Tensor, cache: Tensor, batch: LatentBatch) -> Tensor | None:
        """What the output projection reads of requests with one new token, all at once.

        None where that cannot be done.
        """
        query, (lengths, blocks) = query[batch.places, None], batch.decoded
        keys, values = cache.split(list(self._columns), dim=-1)
        recent = None if self.window is None else self.window.newest(self.window_columns, query.dtype)
        if self.kernels:
            from recalkv.kernels.attention import latent_attention

            # Shapes do not come from lengths, which a captured step does not know; nor does anything wait for these.
            plan = self._layer_plan()
            return latent_attention(
                query, keys, None if self.joint else values, plan, self.tile_rotary, None, lengths,
                self.scaling, self.key_bias, self.key_norm, joint=self._joint,
                pages=blocks[:, : -(-batch.reach // cache.shape[1])], window=self.sliding_window or ALL_SLOTS,
                recent=recent,
            )[:, 0]  # fmt: skip
        loops = compiled_loops() if query.device.type == "cpu" else None
        if loops is None:
            return None
        seen = [batch.seen[request] for request in batch.decoding]
        output: Tensor | None = loops.paged_output(self, query, keys, values, blocks, seen, recent)
        return None if output is None else output[:, 0]

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
        return self._attend(query, Cached(z_k, z_v, seen, offset, False, recent), nothing, mask, {})


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


@dataclass
class _Shared:
    """What the layers of a process have in common.

    Attributes
    ----------
    whole, parts
        Of the whole model, and of each process.
    slots
        Rotary tables of the layers.
    tiles
        The kernels' own, by the identity of those they are made of.
    """

    whole: LatentSpec
    parts: list[LatentSpec]
    slots: list[SlotRotary]
    tiles: dict[int, TileRotary]

    @classmethod
    def of(cls, config: Any, layers: dict[str, Any], longest: int) -> "_Shared":
        """An earlier layer's, or made for the first."""
        for layer in layers.values():
            if isinstance(layer, ServedAttention):
                return layer.shared
        whole, ranks = LatentSpec.from_config(config), get_tensor_model_parallel_world_size()
        slots = layer_slots(config, family_of(config).rotary(config))
        for each in slots:
            # By vLLM's own rule: cached states of a prefix must not depend on what follows.
            each.longest = longest
        return cls(whole, [shard(whole, rank, ranks) for rank in range(ranks)], slots, {})

    def tiled(self, slots: SlotRotary) -> TileRotary:
        """The kernels' tables, of all layers that turn alike."""
        return self.tiles.setdefault(id(slots), TileRotary(slots))
