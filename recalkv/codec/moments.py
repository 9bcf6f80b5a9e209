"""Second moments of the keys and values passed to attention, and of the loss gradients at them.

To second order, an error e in a key or value raises the divergence from the dense model by ``e F e^T / 2``. F is the
Fisher information for labels sampled from *the model*: labels from the text would give surprising tokens too much
weight (Kunstner et al., 2019). Each token's row has its own scale, so its error is proportional to its norm, and tokens
that receive much attention have small keys or values and large gradients. Hence, with ``w_n = |x_n|^2 / E|x|^2``,

    X = E[x x^T / w],    G = E[w g g^T],    error = tr(distortion of X, in the metric G).

Keys are centered by their mean before RoPE. Their moments are taken before RoPE and then averaged over the rotations at
all positions of the context to be served: in short windows, slow pairs of dimensions have a preferred direction that
vanishes over a long context. The first tokens of a sequence (attention sinks) are kept exact at run time and excluded
from all moments. Only the diagonal blocks of the matrices are kept, for heads that may share a code.
"""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recalkv.codec.probe import watching
from recalkv.codec.rope import Rotation, measured_rotations, no_rotation
from recalkv.errors import DataError, NonFiniteError, ParameterError, UnsupportedModelError
from recalkv.params import Progress, silent

SINKS = 4
"""Number of tokens at the start of a sequence that are kept exact: the attention sinks."""

SHARED = 256
"""Maximum number of elements per code: KV heads share a code up to this width; a single wider head is allowed."""

_ROWS = 256
"""Tokens whose labels are sampled at once, which takes a second copy of their probabilities."""

_CHECKPOINTED = 300_000_000
"""Model size in parameters above which activations are recomputed in the backward pass instead of kept."""

_CHECKPOINTING = {
    "training": True,
    "gradient_checkpointing": True,
    "_gradient_checkpointing_func": functools.partial(checkpoint, use_reentrant=False),
}
"""Attributes that switch on gradient checkpointing in a layer of transformers."""


def heads_per_code(kv_heads: int, head_dim: int) -> int:
    """Return the number of KV heads per code: the largest divisor that stays within :data:`SHARED` elements, or 1."""
    return max(
        size for size in range(1, kv_heads + 1) if kv_heads % size == 0 and (size == 1 or size * head_dim <= SHARED)
    )


@dataclass(frozen=True)
class LayerMoments:
    """Calibration statistics of one layer's keys (``[0]``, before RoPE) and values (``[1]``), in head order.

    Attributes
    ----------
    means : two of (kv heads, d) float32
    states, gradients : two of (blocks, n, n) float64
        ``X`` and ``G`` of each block: consecutive heads that may share a code, concatenated.
    rotation
        RoPE rotation of the keys.
    """

    means: tuple[Tensor, Tensor]
    states: tuple[Tensor, Tensor]
    gradients: tuple[Tensor, Tensor]
    rotation: Rotation

    @property
    def kv_heads(self) -> int:
        """Number of KV heads."""
        return self.means[0].shape[0]


class _Side:
    """Accumulated sums over one layer's keys or values."""

    def __init__(self) -> None:
        self.mean: Tensor = torch.zeros(0, device="cpu")
        self.count, self.energy, self.width = 0, 0.0, 0
        self.states: Tensor = torch.zeros(0, device="cpu")
        self.gradients: Tensor = torch.zeros(0, device="cpu")

    def add_mean(self, states: Tensor) -> None:
        """Add states (batch, heads, tokens, d) without the sinks to the sums for the mean."""
        total = states.double().sum((0, 2)).cpu()
        self.mean = self.mean + total if self.count else total
        self.energy += float(states.double().square().sum())
        self.count += states.shape[0] * states.shape[2]

    def finish_mean(self, heads: int) -> None:
        """Finish the mean and start the second moments, in blocks of ``heads`` heads."""
        self.mean = self.mean / self.count
        self.energy = max(self.energy / self.count - float(self.mean.square().sum()), 1e-30)
        self.width, self.count = heads * self.mean.shape[1], 0
        shape = (self.mean.numel() // self.width, self.width, self.width)
        self.states, self.gradients = (torch.zeros(shape, dtype=torch.float64, device="cpu") for _ in range(2))

    def add(self, states: Tensor, gradient: Tensor) -> None:
        """Add states (batch, heads, tokens, d), which are centered here, and the gradients at them."""
        centered = states.float() - self.mean.to(states.device, torch.float32)[:, None]
        x, g = (each.float().transpose(1, 2).flatten(2).flatten(0, 1) for each in (centered, gradient))
        weight = (x.square().sum(1, keepdim=True) / self.energy).clamp_min(1e-6)
        for number, (own, at) in enumerate(zip(x.split(self.width, 1), g.split(self.width, 1), strict=True)):
            self.states[number] += ((own / weight).T @ own).double().cpu()
            self.gradients[number] += ((at * weight).T @ at).double().cpu()
        self.count += len(x)


def take_moments(
    model: Any,
    windows: Tensor,
    context: int,
    seed: int = 0,
    progress: Progress = silent,
    heads: int | None = None,
    precision: str = "float32",
    rotations: dict[int, Rotation] | None = None,
) -> dict[int, LayerMoments]:
    """Return the moments of every layer that passes keys and values to the attention interface.

    Half of the windows are run forward for the means, then all forward and backward, one window at a time.

    Parameters
    ----------
    windows : (samples, length) int64
        Calibration windows.
    context
        Number of positions over which moments of keys are averaged.
    seed
        Seed for sampling labels.
    progress
        Called with the name of the step, windows done and total windows.
    heads
        KV heads per block; None for :func:`heads_per_code`.
    precision
        With ``bfloat16``, matrix products of a float32 model run in bfloat16 under autocast, except when rotations are
        measured.
    rotations
        Rotation of each layer's keys; None to measure them (:func:`recalkv.codec.rope.measured_rotations`).

    Raises
    ------
    ParameterError
        If ``heads`` does not divide a layer's number of KV heads.
    NonFiniteError
        If states, logits or gradients have NaN or infinity; the message says where.
    UnsupportedModelError
        If a layer's keys have an odd size, or if no gradient reaches a layer's keys or values.
    DataError
        If windows have no token after the sinks that predicts another.
    """
    samples, length = windows.shape
    if length < SINKS + 2:
        raise DataError(
            f"codec: calibration.length={length} must be at least {SINKS + 2}: two tokens after the {SINKS} sinks; use "
            f"longer windows (--length)."
        )
    at_length, at_context = (rotations, rotations) if rotations is not None else _measured(model, length, context)
    mixed = precision == "bfloat16" and next(model.parameters()).dtype is torch.float32
    sums, prior = _Sums(at_length), max(1, (samples + 1) // 2)
    with watching(model, sums.add_means), torch.no_grad():
        for number, window in enumerate(windows[:prior]):
            _forward(model, window, mixed)
            progress("means", number + 1, prior)
    if not sums.sides:
        raise UnsupportedModelError(
            f"codec: no layer of {type(model).__name__} passes keys and values to transformers' attention interface; "
            f"use the dense cache."
        )
    sums.finish_means(heads)
    sampler = torch.Generator("cpu").manual_seed(seed)
    with watching(model, sums.add_moments), _gradients_of_inputs(model), torch.enable_grad():
        for number, window in enumerate(windows):
            _backward(model, window, sampler, mixed)
            sums.check_gradients(model)
            progress("moments", number + 1, samples)
    # Free each layer's sums as its moments are made: they are large for wide models.
    return {layer: _finished(sums.sides.pop(layer), at_context.get(layer), context) for layer in sorted(sums.sides)}


def _measured(model: Any, length: int, context: int) -> tuple[dict[int, Rotation], dict[int, Rotation]]:
    """Measure rotations for the window length and for the context: LongRoPE and dynamic scaling make them differ."""
    longest = max(length, context)
    longer = measured_rotations(model, longest)
    own, served = (longer if each >= longest else measured_rotations(model, each, longer) for each in (length, context))
    return own, served


class _Sums:
    """Sums over the keys and values of all layers, with the watchers of the attention function that fill them.

    Parameters
    ----------
    rotations
        Rotation of each layer's keys at the window length.

    Attributes
    ----------
    sides
        Sums over each layer's keys and values.
    failed
        Layers whose gradients were not finite; recorded because an exception in a hook would end the process.
    """

    def __init__(self, rotations: dict[int, Rotation]) -> None:
        self.rotations, self.sides, self.failed = rotations, dict[int, tuple[_Side, _Side]](), list[int]()

    def before_rope(self, layer: int, states: Tensor) -> Tensor:
        """Undo RoPE on keys, or on gradients at keys, and drop the sinks."""
        rotation = self.rotations.get(layer) or no_rotation(states.shape[-1])
        wide = states.float() if states.element_size() < 4 else states
        positions = torch.arange(SINKS, states.shape[2], device=states.device)
        return rotation.rotated(wide[:, :, SINKS:], positions, -1)

    def add_means(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Watch a forward pass and add keys and values to the means."""
        pair = self.sides.setdefault(layer, (_Side(), _Side()))
        if key.shape[-1] % 2:
            raise UnsupportedModelError(
                f"codec: keys of layer {layer} have {key.shape[-1]} numbers, and only even sizes can be coded; "
                f"use the dense cache."
            )
        for side, states in zip(pair, (self.before_rope(layer, key), value[:, :, SINKS:]), strict=True):
            if not bool(torch.isfinite(states).all()):
                raise _not_finite(layer, "keys or values")
            side.add_mean(states)

    def finish_means(self, heads: int | None) -> None:
        """Finish the means and start the second moments, in blocks of ``heads`` heads.

        Raises
        ------
        ParameterError
            If ``heads`` does not divide a layer's number of KV heads.
        """
        for layer, pair in self.sides.items():
            if heads and len(pair[0].mean) % heads:
                raise ParameterError(
                    f"codec: {heads} heads per code do not divide the {len(pair[0].mean)} KV heads of layer {layer}; "
                    f"choose a number that does."
                )
            # From the size of the keys: values with another head size use the same groups of heads.
            size = heads or heads_per_code(*pair[0].mean.shape)
            for side in pair:
                side.finish_mean(size)

    def add_moments(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Watch a forward pass and add moments when its backward pass yields the gradients."""
        if not torch.is_grad_enabled():
            return
        for number, states in enumerate((key, value)):
            if states.requires_grad:
                states.register_hook(functools.partial(self._add, layer, number, states.detach()))

    def _add(self, layer: int, number: int, states: Tensor, gradient: Tensor) -> None:
        pair = [self.before_rope(layer, x) if number == 0 else x[:, :, SINKS:] for x in (states, gradient)]
        if bool(torch.isfinite(pair[1]).all()):
            self.sides[layer][number].add(*pair)
        else:
            self.failed.append(layer)

    def check_gradients(self, model: Any) -> None:
        """Refuse gradients that were not finite, or that did not reach the keys or the values of a layer.

        Raises
        ------
        NonFiniteError
        UnsupportedModelError
        """
        if self.failed:
            raise _not_finite(max(self.failed), "gradients")
        for layer, pair in sorted(self.sides.items()):
            for side, name in zip(pair, ("keys", "values"), strict=True):
                if not side.count:
                    raise UnsupportedModelError(
                        f"codec: no gradient reaches the {name} of layer {layer} of {type(model).__name__}, as where "
                        f"quantized weights run in a kernel without a backward pass; fit to the model before "
                        f"quantization."
                    )


def _finished(pair: tuple[_Side, _Side], rotation: Rotation | None, context: int) -> LayerMoments:
    rotation = rotation or no_rotation(pair[0].mean.shape[-1])
    states, gradients = ([], [])  # type: ignore[var-annotated]
    for number, side in enumerate(pair):
        for result, total in ((states, side.states), (gradients, side.gradients)):
            matrix = (total + total.mT) / (2 * side.count)
            result.append(rotation.averaged(matrix, context) if number == 0 else matrix)
    means = (pair[0].mean.float(), pair[1].mean.float())
    return LayerMoments(means, (states[0], states[1]), (gradients[0], gradients[1]), rotation)


def _forward(model: Any, window: Tensor, mixed: bool) -> Any:
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=mixed):
        return model(input_ids=window[None].to(model.device), use_cache=False)


def _backward(model: Any, window: Tensor, sampler: torch.Generator, mixed: bool) -> None:
    """Backpropagate the summed loss of labels sampled from the model; its logit gradient is ``softmax - onehot``."""
    logits = _forward(model, window, mixed).logits
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteError(
            "codec: NaN or infinity in the logits during calibration, after the last layer's attention; fit in "
            "float32, and check the model's weights."
        )
    if not logits.requires_grad:
        return  # no layer gets a gradient, which the caller refuses
    at_logits = logits.detach().float().softmax(-1)[0]
    # Inverse CDF sampling on the logits' device, with one random number per token from a CPU generator.
    places = torch.rand(len(at_logits), 1, generator=sampler, dtype=torch.float32, device="cpu").to(at_logits.device)
    labels = torch.cat(
        [_drawn(part, own) for part, own in zip(at_logits.split(_ROWS), places.split(_ROWS), strict=True)]
    )
    at_logits.scatter_add_(1, labels, torch.full_like(at_logits[:, :1], -1))
    at_logits[-1] = 0  # the last token's label is outside the window
    logits.backward(at_logits[None].to(logits.dtype))


def _drawn(likely: Tensor, places: Tensor) -> Tensor:
    """Return the label at each row's quantile between 0 and 1 of its probabilities, (rows, 1) int64."""
    summed = likely.cumsum(-1)
    return torch.searchsorted(summed, places * summed[:, -1:], right=True).clamp_max(likely.shape[1] - 1)


@contextlib.contextmanager
def _gradients_of_inputs(model: Any) -> Iterator[None]:
    """Let gradients flow from the embeddings on, with none for weights, and checkpoint activations of large models."""
    trained = [each for each in model.parameters() if each.requires_grad]
    large = sum(each.numel() for each in model.parameters()) > _CHECKPOINTED
    before: list[tuple[Any, dict[str, Any]]] = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, __, out: out.requires_grad_(True).clone())
    try:
        for each in trained:
            each.requires_grad_(False)
        # Set by hand because `gradient_checkpointing_enable()` would leave a hook on the embeddings. Layers checkpoint
        # only in training mode; dropout stays off in submodules and, as in OPT, in attributes of the layer itself.
        for layer in [each for each in model.modules() if large and hasattr(each, "gradient_checkpointing")]:
            rates = {name: 0.0 for name, value in vars(layer).items() if "drop" in name and isinstance(value, float)}
            before.append((layer, {name: getattr(layer, name, None) for name in _CHECKPOINTING | rates}))
            vars(layer).update(_CHECKPOINTING | rates)
        yield
    finally:
        hook.remove()
        for layer, attributes in before:
            vars(layer).update(attributes)
        for each in trained:
            each.requires_grad_(True)


def _not_finite(layer: int, what: str) -> NonFiniteError:
    return NonFiniteError(
        f"codec: NaN or infinity in the {what} of layer {layer} during calibration; fit in float32, and check the "
        f"model's weights."
    )
