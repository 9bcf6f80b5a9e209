"""Measure how a model rotates its keys: pairs of dimensions and their frequencies, layer by layer.

In a one-token sequence, attention returns the token's value, so hidden states do not depend on the position and keys
differ only by the rotation: ``k_n = R_n k_0``. Keys of a few tokens at positions 0, 1, 2, 4, 8, ... thus show which
dimensions rotate together and at what frequency, whatever the architecture calls its tables: half-split or interleaved
pairs, partial rotation, YaRN, Llama 3 scaling, LongRoPE, and layers without RoPE.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recalkv.codec.probe import watching
from recalkv.errors import ParameterError

_TOKENS = 6
_SAME = 1e-3
"""Rotations whose angles differ by less than this many radians count as equal."""
_PRECISE, _ROUNDED = 2e-3, 2e-2
"""Largest relative change of a pair's squared norm that still counts as a rotation: 32-bit and 16-bit keys."""


@dataclass(frozen=True)
class Rotation:
    """RoPE rotation of keys: at position n, pair i is rotated by the angle ``n frequencies[i]``.

    Attributes
    ----------
    pairs : (2, d / 2) int64
        Dimensions of each pair; dimensions that do not rotate form pairs with a frequency of zero.
    frequencies : (d / 2,) float64
        Radians per position.
    """

    pairs: Tensor
    frequencies: Tensor

    @functools.cached_property
    def halves(self) -> bool:
        """Whether dimension i is paired with dimension i + d / 2."""
        return bool((self.pairs.flatten() == torch.arange(self.pairs.numel(), device=self.pairs.device)).all())

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines (..., d / 2) float64 at positions (...)."""
        angles = positions[..., None].double() * self.frequencies.to(positions.device)
        return angles.cos(), angles.sin()

    def rotated(self, states: Tensor, positions: Tensor, sign: int = 1) -> Tensor:
        """Rotate states (..., tokens, d) to positions (tokens,), or back with ``sign=-1``; keeps their dtype."""
        cos, sin = (table.to(states) for table in self.tables(positions))
        first, second = (states[..., index] for index in self.pairs.to(states.device))
        out = torch.empty_like(states)
        out[..., self.pairs[0]] = first * cos - sign * second * sin
        out[..., self.pairs[1]] = second * cos + sign * first * sin
        return out

    def averaged(self, moment: Tensor, context: int) -> Tensor:
        """Return the mean of ``R_n M R_n^T`` over positions n below ``context``.

        Parameters
        ----------
        moment : (..., heads d, heads d) float64
            Second moment M of keys before RoPE, with the heads concatenated.
        """
        size, order = 2 * len(self.frequencies), self.pairs.flatten()
        heads, half = moment.shape[-1] // size, size // 2
        products = torch.zeros(4, half, half, dtype=torch.float64, device="cpu")
        for part in torch.arange(context, device="cpu").split(8192):
            cos, sin = self.tables(part)
            for total, (left, right) in zip(products, ((cos, cos), (sin, sin), (cos, sin), (sin, cos)), strict=True):
                total += left.T @ right / context
        cc, ss, cs, sc = (each[:, None].to(moment.device) for each in products)
        places = (torch.arange(heads, device="cpu")[:, None] * size + order).flatten().to(moment.device)
        whole = moment.view(-1, *moment.shape[-2:])
        parts = whole[:, places][:, :, places].view(-1, heads, 2, half, heads, 2, half)
        a, b, c, d = (parts[:, :, i, :, :, j] for i in (0, 1) for j in (0, 1))
        rotated = torch.stack(
            [
                torch.stack([cc * a - cs * b - sc * c + ss * d, cs * a + cc * b - ss * c - sc * d], 4),
                torch.stack([sc * a - ss * b + cc * c - cs * d, ss * a + sc * b + cs * c + cc * d], 4),
            ],
            2,
        ).reshape(whole.shape)
        result = torch.empty_like(whole)
        result[:, places[:, None], places] = rotated
        return result.view(moment.shape)


def no_rotation(size: int) -> Rotation:
    """Return the identity rotation, for keys of a layer without RoPE."""
    half = size // 2
    pairs = torch.arange(2 * half, device="cpu").view(2, half)
    return Rotation(pairs, torch.zeros(half, dtype=torch.float64, device="cpu"))


@torch.no_grad()
def measured_rotations(model: Any, context: int, known: Mapping[int, Rotation] | None = None) -> dict[int, Rotation]:
    """Measure the rotation of each attention layer's keys within ``context`` positions.

    Layers whose keys depend on the position in another way, such as learned positions, count as not rotated.

    Parameters
    ----------
    known
        Rotations within a longer context, whose pairs are reused: 16-bit keys at few positions do not show slow pairs.

    Raises
    ------
    ParameterError
        If the model's learned positions end before the context does.
    """
    last = max(context - 1, 1)
    places = [0]
    while places[-1] < last:
        places.append(min(max(1, 2 * places[-1]), last))
    positions = torch.tensor(places, device=model.device).repeat(_TOKENS)[:, None]
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(1, _TOKENS + 1, device=model.device) * (vocabulary // (_TOKENS + 2))
    keys: dict[int, Tensor] = {}
    limits: dict[int, float] = {}

    def keep(layer: int, key: Tensor, value: Tensor) -> None:
        keys.setdefault(layer, key[:, :, 0].detach().double().cpu())
        limits[layer] = _PRECISE if key.element_size() >= 4 else _ROUNDED

    try:
        with watching(model, keep):
            model(input_ids=ids.repeat_interleave(len(places))[:, None], position_ids=positions, use_cache=False)
    except IndexError as error:
        # The table of learned positions is too short.
        most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        raise ParameterError(
            f"codec: context={context} exceeds the model's {most} positions; use at most {most}."
        ) from error
    found: dict[int, Rotation] = {}
    for layer, key in keys.items():
        states = key.unflatten(0, (_TOKENS, -1))
        own = _rotation(states, places, limits[layer]) if known is None else _same_pairs(states, places, known[layer])
        # Rounding makes equal rotations differ slightly between layers; layers of equal rotation share one object.
        found[layer] = next((each for each in found.values() if _alike(each, own, last)), own)
    return found


def _alike(one: Rotation, other: Rotation, last: int) -> bool:
    """Return whether two rotations have the same pairs, and the same angles up to position ``last``."""
    if not torch.equal(one.pairs, other.pairs):
        return False
    return float((one.frequencies - other.frequencies).abs().max()) * last < _SAME


def _rotation(keys: Tensor, places: list[int], limit: float = _PRECISE) -> Rotation:
    """Measure the rotation from keys (tokens, positions, kv heads, d) of the same tokens at several positions."""
    size = keys.shape[-1]
    still, scale = no_rotation(size), keys.square().mean().sqrt()
    changed = (keys - keys[:, :1]).abs().amax((0, 1, 2)) > 1e-5 * scale
    if size % 2 or not bool(changed.any()):
        return still
    where = changed.nonzero().flatten()
    first, last = int(where[0]), int(where[-1]) + 1
    best, found = limit, still.pairs
    for start, width in {
        (0, size),
        (first, size - first),
        (first, last - first),
        (first, 2 * ((last - first + 1) // 2)),
    }:
        inside = torch.arange(start, min(start + width // 2 * 2, size), device="cpu")
        if len(inside) % 2:
            continue
        for pairs in (inside.view(2, -1), inside.view(-1, 2).T):
            length = keys[..., pairs[0]].square() + keys[..., pairs[1]].square()
            change = (length - length[:, :1]).abs().mean((0, 1, 2)) / length.mean((0, 1, 2)).clamp_min(1e-30)
            if float(change.max()) < best:
                best, found = float(change.max()), pairs
    if best == limit:
        return still
    frequencies = _frequencies(keys, places, found)
    rest = [i for i in range(size) if i not in set(found.flatten().tolist())]
    pairs = torch.cat([found, torch.tensor(rest, dtype=torch.int64, device="cpu").view(2, -1)], 1)
    still_pairs = torch.zeros(len(rest) // 2, dtype=torch.float64, device="cpu")
    return Rotation(pairs, torch.cat([frequencies, still_pairs]))


def _same_pairs(keys: Tensor, places: list[int], known: Rotation) -> Rotation:
    """Measure the rotation of keys whose pairs are known."""
    return Rotation(known.pairs, torch.where(known.frequencies == 0, 0.0, _frequencies(keys, places, known.pairs)))


def _frequencies(keys: Tensor, places: list[int], pairs: Tensor) -> Tensor:
    """Measure the frequencies (pairs,) float64 from keys (tokens, positions, kv heads, d) of the same tokens."""
    numbers = torch.view_as_complex(torch.stack([keys[..., pairs[0]], keys[..., pairs[1]]], -1))
    angles = (numbers * numbers[:, :1].conj()).sum((0, 2)).angle()  # (positions, pairs), between -pi and pi
    frequencies = torch.zeros(pairs.shape[1], dtype=torch.float64, device="cpu")
    for place, angle in zip(places[1:], angles[1:], strict=True):
        expected = frequencies * place
        frequencies = (angle + ((expected - angle) / (2 * torch.pi)).round() * 2 * torch.pi) / place
    return frequencies
