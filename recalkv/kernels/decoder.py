"""Decoding with the kernels, and their installation in the layers of a model."""

import importlib.util
import warnings
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from recalkv.errors import ParameterError
from recalkv.kernels.plan import MAX_ROWS, LayerPlan, joined
from recalkv.kernels.rotary import TileRotary
from recalkv.model.attention import Cached, LatentAttention

KERNELS = ("torch", "triton", "auto")

_TYPES = (torch.float16, torch.bfloat16, torch.float32)
_HEAD_DIMS = range(2, 257, 2)
_TRITON = (3, 6)

_PREPARED_SLOTS = 1 << 20
"""Maximum number of slots for which rotary tables are built in advance: 8 MB at head size 128, once for all layers."""


class KernelDecoder:
    """Computes a layer's attention of a few queries over a filled cache with the kernels.

    Plain torch handles prefill, more than a few queries, gradients, autocast, eager attention and non-boolean masks,
    and in compiled models more than one query. The factors are views of one buffer, so in-place changes are seen. A
    replaced factor (``parameter.data = ...``, ``load_state_dict`` with ``assign``) is detected by its address, but not
    in a compiled model: compile after replacing it. The kernels do not support packed latents (:func:`why_not`).

    Parameters
    ----------
    layer
        The layer.
    rotary
        Tables shared by all layers with the same rotations.
    slots
        Slots for which the tables of single queries are built in advance, as compiled models cannot build them.
    """

    def __init__(self, layer: LatentAttention, rotary: TileRotary, slots: int) -> None:
        self.layer, self._rotary, self._slots = layer, rotary, slots
        self._plan: LayerPlan | None = None
        self._plan_of: list[int] = []
        self.follow()

    def follow(self) -> None:
        """Build the tables of single queries on the device of the weights."""
        self._plan = None
        step = self.plan().step(self.layer.num_key_value_groups)
        self._rotary.tables(step.launch.tile, self._slots, self.layer.k_proj.weight.device)

    def attend(self, query: Tensor, cached: Cached, mask: Tensor | None) -> Tensor:
        """Return the input of the output projection, (batch, queries, input features)."""
        from recalkv.kernels.attention import latent_attention

        layer, slots = self.layer, cached.z_k.shape[2]
        return latent_attention(
            query,
            cached.z_k[:, 0],
            None if layer.joint else cached.z_v[:, 0],
            self.plan(),
            self._rotary,
            None if mask is None else mask[..., :slots],
            cached.seen,
            layer.scaling,
            layer.key_bias,
            layer.key_norm,
            cached.offset,
        )

    def takes(self, query: Tensor, cached: Cached, mask: Any) -> bool:
        """Whether the kernels support these queries."""
        layer, length, slots = self.layer, query.shape[1], cached.z_k.shape[2]
        # Autocast and gradients need plain torch.
        if cached.fresh or torch.is_autocast_enabled(query.device.type):
            return False
        # The model may have moved since the kernels were installed.
        served = query.is_cuda or torch.compiler.is_compiling() or _interprets()
        if query.dtype not in _TYPES or not served:
            return False
        given = (query, layer.k_proj.weight, cached.z_k, cached.z_v)
        if torch.is_grad_enabled() and any(each.requires_grad for each in given):
            return False
        if length * layer.num_key_value_groups > MAX_ROWS:
            return False
        if torch.compiler.is_compiling() and not self._prepared(length, slots, query.device):
            return False
        readable = mask is None or (isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape[1] == 1)
        return readable and layer.over_latents(length, slots, mask)

    def _prepared(self, length: int, slots: int, device: torch.device) -> bool:
        rows = length * self.layer.num_key_value_groups
        if self._plan is None or not self._plan.has(rows) or self._plan.key_up.device != device:
            return False
        return self._rotary.has(self._plan.step(rows).launch.tile, slots, device)

    def plan(self) -> LayerPlan:
        """Return the layer's plan, rebuilt when the address of a factor has changed."""
        if torch.compiler.is_compiling():
            assert self._plan is not None
            return self._plan
        layer = self.layer
        value_up = [] if layer.value_up is None else list(layer.value_up)
        places = [up.data_ptr() for up in (*layer.key_up, *value_up)]
        if self._plan is None or self._plan_of != places:
            from recalkv.kernels.launch import shared_limit

            keys, values = joined(list(layer.key_up)), joined(value_up) if value_up else None
            limit = shared_limit(keys.device)
            self._plan = LayerPlan(
                keys, values, layer.key_ranks, layer.key_heads, layer.value_ranks, layer.value_heads, layer.head_dim,
                limit,
            )  # fmt: skip
            self._plan_of = [up.data_ptr() for up in (*layer.key_up, *value_up)]
        return self._plan


def is_compressed(model: nn.Module) -> bool:
    """Whether a model has latent attention, so that :func:`use_kernels` applies."""
    return any(isinstance(module, LatentAttention) for module in model.modules())


def why_not(model: nn.Module) -> str | None:
    """Return why the kernels cannot serve a model on its device; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (it comes with `pip install '.[kernels]'` in a clone of recalkv)"
    layers = [module for module in model.modules() if isinstance(module, LatentAttention)]
    if not layers:
        return "the model has no latent attention; compress it first"
    installed = version("triton")
    if tuple(int(part) for part in installed.split(".")[:2]) < _TRITON:
        return f"triton is {installed}, and the kernels are tested with {'.'.join(map(str, _TRITON))} and newer"
    device, dtype = layers[0].k_proj.weight.device, layers[0].k_proj.weight.dtype
    if device.type != "cuda" and not _interprets():
        return f"the model is on {device}, and the kernels need a CUDA device"
    if dtype not in _TYPES:
        return f"the weights are {dtype}, and the kernels take float16, bfloat16 or float32"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} has no bfloat16 tensor cores; the kernels need an A100 or newer"
    if layers[0].head_dim not in _HEAD_DIMS:
        return f"heads have {layers[0].head_dim} dimensions, and the kernels take even numbers up to 256"
    if not all(layer.by_tiles for layer in layers):
        name = layers[0].family.name
        return f"attention in {name} has soft-capped scores, sink logits, norms over all heads or mixed RoPE"
    packed = next((layer for layer in layers if layer.spec.quantized), None)
    if packed is not None:
        bits = packed.spec.cached_bits / packed.spec.cached_elements
        return (
            f"latents of layer {packed.layer_idx} are packed in {bits:.1f} bits each, and the kernels serve those of "
            f"16 bits; compress with bits=16, or use the codec (recalkv fit), which has kernels for its rows"
        )
    return None


def why_not_best(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why ``auto`` does not use kernels that are supported; None if it uses them."""
    # Full-precision float32 products need more registers than there are.
    return "float32 has no tensor cores here" if device.type == "cuda" and dtype == torch.float32 else None


def choose_kernels(model: Any) -> None:
    """Use the kernels for a compressed model on a GPU where they are supported; leave other models unchanged."""
    if is_compressed(model) and model.device.type != "cpu":
        use_kernels(model, "auto")


def use_kernels(model: Any, kernel: str = "triton") -> Any:
    """Select how a compressed model decodes, and return the model.

    Parameters
    ----------
    model
        A model of :mod:`recalkv.model.modeling`, on its device.
    kernel
        ``triton`` uses the kernels, and raises if they are not supported; ``auto`` uses them if they are supported,
        pass a trial step (:mod:`recalkv.kernels.trial`) and are not slow, as they are in float32 on a GPU; otherwise it
        warns once with the reason; ``torch`` returns to plain torch.

    Raises
    ------
    ParameterError
        If ``kernel`` is unknown, or is ``triton`` and the kernels are not available.
    """
    if kernel not in KERNELS:
        raise ParameterError(f"kernel={kernel!r} must be one of: {', '.join(KERNELS)}.")
    reason = why_not(model) if kernel != "torch" else None
    if reason is not None:
        if kernel == "triton":
            raise ParameterError(f"kernel=triton cannot be used: {reason}. Use kernel=torch, or auto.")
        kernel = "torch"
    elif kernel == "auto":
        weight = next(module for module in model.modules() if isinstance(module, LatentAttention)).k_proj.weight
        reason = why_not_best(weight.device, weight.dtype)
        kernel = kernel if reason is None else "torch"
    _install(model, kernel)
    if kernel == "auto":
        from recalkv.kernels.trial import why_wrong

        layer = next(module for module in model.modules() if isinstance(module, LatentAttention))
        reason = why_wrong(layer)
        if reason is not None:
            _install(model, "torch")
    if reason is not None:
        warnings.warn(f"decoding in plain torch: {reason}.", stacklevel=2)
    return model


def decoder_of(module: nn.Module) -> KernelDecoder | None:
    """Return the kernel decoder of a layer; None if the layer uses plain torch, and for other modules."""
    decoder = module.decoder if isinstance(module, LatentAttention) else None
    return decoder if isinstance(decoder, KernelDecoder) else None


def _install(model: Any, kernel: str) -> None:
    rotaries: dict[int, TileRotary] = {}
    for module in model.modules():
        if isinstance(module, LatentAttention):
            if kernel == "torch":
                module.decoder = None
                continue
            if id(module.slots) not in rotaries:
                rotaries[id(module.slots)] = TileRotary(module.slots)
            slots = min(model.config.max_position_embeddings, _PREPARED_SLOTS)
            module.decoder = KernelDecoder(module, rotaries[id(module.slots)], slots)


def _interprets() -> bool:
    """Whether kernels run in Triton's interpreter, on any device."""
    import triton

    return bool(triton.knobs.runtime.interpret)
