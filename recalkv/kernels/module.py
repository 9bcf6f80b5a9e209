"""The attention module that decodes by the kernels, and how a model gets it."""

import importlib.util
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from recalkv.attention import LatentAttention
from recalkv.errors import ParameterError
from recalkv.kernels.plan import MAX_ROWS, LayerPlan
from recalkv.kernels.rotary import TileRotary

__all__ = ["KERNELS", "KernelAttention", "use_kernels", "why_not"]

KERNELS = ("torch", "triton", "auto")

_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_HEAD_DIMS = range(2, 257, 2)


class KernelAttention(LatentAttention):
    """:class:`LatentAttention` whose short queries over a filled cache go through the kernels.

    Prompts, more than a few queries, gradients, autocast, compiled models, eager attention and masks that are not
    boolean stay with the parent. Factors written by other means than torch's operations, which count them
    (``parameter.data``), need a new :func:`use_kernels`.
    """

    _plan: LayerPlan | None = None
    _plan_of: tuple[Any, ...] = ()
    tile_rotary: TileRotary

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend (batch, queries, m) hidden states to the cache and themselves."""
        if past_key_values is None or not self._by_kernel(hidden_states, attention_mask, past_key_values):
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        length = hidden_states.shape[1]
        query, z_k, z_v = self._new_states(hidden_states)
        # Both must be read before the update: static layers count in place.
        slots, offset = past_key_values.get_mask_sizes(length, self.layer_idx)
        start = past_key_values.get_seq_length(self.layer_idx)
        first = self._first_slot(start - offset, query.device)
        z_k, z_v = past_key_values.update(z_k, z_v, self.layer_idx)
        z_k = z_k[:, 0]
        places = first + torch.arange(length, device=query.device)
        from recalkv.kernels.attention import latent_attention

        turned = self.tile_rotary.rotate(query, places, slots)
        contexts = latent_attention(
            turned,
            z_k,
            z_k if self.joint else z_v[:, 0],
            self._layer_plan(),
            self.tile_rotary,
            None if attention_mask is None else attention_mask[..., :slots],
            first,
            self.scaling,
            self.key_bias,
            None if self.k_norm is None else (self.k_norm.weight, self.k_norm.variance_epsilon),
        )
        return self.o_proj(self._merged(contexts)), None

    def _by_kernel(self, states: Tensor, mask: Any, cache: Cache) -> bool:
        length = states.shape[1]
        if self.key_blocks is not None:
            return False
        # Compiled models and autocast keep to plain torch, and so does whatever needs a gradient.
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(states.device.type):
            return False
        if torch.is_grad_enabled() and (states.requires_grad or self.k_proj.weight.requires_grad):
            return False
        if length * self.num_key_value_groups > MAX_ROWS:
            return False
        slots, _ = cache.get_mask_sizes(length, self.layer_idx)
        start = cache.get_seq_length(self.layer_idx)
        fresh = isinstance(start, int) and start == 0 and slots == length
        readable = mask is None or (isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape[1] == 1)
        return not fresh and readable and self._mode(length, slots, mask) == "latent"

    @staticmethod
    def _first_slot(first: int | Tensor, device: torch.device) -> Tensor:
        """As a tensor, and a new one, since a static cache counts in place; no copy from the host, for CUDA graphs."""
        if isinstance(first, Tensor):
            return first.reshape(1).to(device).clone()
        return torch.full((1,), first, dtype=torch.int64, device=device)

    def _layer_plan(self) -> LayerPlan:
        """Made once, and again when the factors have moved or changed."""
        state = tuple((up.data_ptr(), up._version) for up in self.key_up)
        if self._plan is None or self._plan_of != state:
            ups = [up.detach() for up in self.key_up]
            self._plan = LayerPlan(
                ups, self.key_heads, self.value_ranks, self.value_heads, self.head_dim, self.key_rows, self.value_rows
            )
            self._plan_of = state
        return self._plan


def why_not(model: nn.Module) -> str | None:
    """Why the kernels cannot serve a model where it is; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    layers = [module for module in model.modules() if isinstance(module, LatentAttention)]
    if not layers:
        return "the model has no latent attention; compress it first"
    if any(layer.key_blocks is not None for layer in layers):
        return "its keys have scales per channel, and the kernels read scales per token; set compression.scales=token"
    import triton.knobs

    device, dtype = layers[0].k_proj.weight.device, layers[0].k_proj.weight.dtype
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"the model is on {device}, and the kernels need a CUDA device"
    if dtype not in _TYPES:
        return f"the weights are {dtype}, and the kernels take float16, bfloat16 or float32"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has no bfloat16 tensor cores; the kernels need an A100 or newer"
    if layers[0].head_dim not in _HEAD_DIMS:
        return f"heads have {layers[0].head_dim} dimensions, and the kernels take even numbers up to 256"
    return None


def use_kernels(model: Any, kernel: str = "triton") -> Any:
    """Choose how a compressed model decodes; returns the model.

    Parameters
    ----------
    model
        A model of :mod:`recalkv.modeling`, on its device.
    kernel
        ``triton`` uses the kernels and raises where they cannot serve; ``auto`` uses them where they can, with
        one warning where they cannot; ``torch`` goes back to plain torch.

    Raises
    ------
    ParameterError
        If ``kernel`` is unknown, or is ``triton`` and cannot be had.
    """
    if kernel not in KERNELS:
        raise ParameterError(f"kernel={kernel!r} must be one of: {', '.join(KERNELS)}.")
    reason = why_not(model) if kernel != "torch" else None
    if reason is not None:
        if kernel == "triton":
            raise ParameterError(f"kernel=triton cannot be used: {reason}. Use kernel=torch, or auto.")
        warnings.warn(f"decoding in plain torch: {reason}.", stacklevel=2)
        kernel = "torch"
    wanted = LatentAttention if kernel == "torch" else KernelAttention
    rotary = TileRotary(model.model.rotary_emb) if wanted is KernelAttention else None
    for module in model.modules():
        if isinstance(module, LatentAttention):
            module.__class__ = wanted
            module.__dict__.pop("_plan", None)
            if rotary is not None:
                assert isinstance(module, KernelAttention)
                module.tile_rotary = rotary
    return model
