"""RoPE for tiles of cache slots: angles of tile starts and of places within a tile, exact at any distance.

Scores depend on the distance of query and key only. For a tile that starts at slot ``a``, the query is
turned back by the angle of ``a`` and keys are turned by their place in the tile, so that one small table
serves all tiles and no angle is larger than float64 can tell apart: at slot 100,000 a float32 product of
slot and frequency is wrong by up to 0.004 rad.
"""

from typing import Any

import torch
from torch import Tensor

from recalkv.kernels.plan import TILE

__all__ = ["TileRotary"]


class TileRotary:
    """Cos and sin of tile starts and of places within a tile, shared by all layers of a model.

    Parameters
    ----------
    rotary
        The model's rotary module, of fixed frequencies: ``inv_freq`` (d_h / 2,) and ``attention_scaling``.
    """

    def __init__(self, rotary: Any) -> None:
        self._frequencies: Tensor = rotary.inv_freq.detach().double().cpu()
        self.scaling = float(rotary.attention_scaling)
        self._anchors: dict[tuple[int, torch.device], Tensor] = {}
        self._offsets: dict[tuple[int, torch.device], Tensor] = {}
        self._outgrown: list[Tensor] = []

    def offsets(self, tile: int, device: torch.device) -> Tensor:
        """Angles of the places within a tile, (tile, 2, d_h / 2) float32: cos, sin."""
        key = (tile, device)
        if key not in self._offsets:
            self._offsets[key] = self._table(torch.arange(tile), device)
        return self._offsets[key]

    def anchors(self, tile: int, slots: int, device: torch.device) -> Tensor:
        """Angles of the starts of tiles, (>= slots / tile, 2, d_h / 2) float32; grown by doubling."""
        key, tiles = (tile, device), -(-slots // tile)
        if key not in self._anchors or len(self._anchors[key]) < tiles:
            size = max(16, 1 << (tiles - 1).bit_length())
            # A captured graph may still read the shorter table.
            self._outgrown += [self._anchors[key]] if key in self._anchors else []
            self._anchors[key] = self._table(torch.arange(size) * tile, device)
        return self._anchors[key]

    def rotate(self, states: Tensor, positions: Tensor, slots: int) -> Tensor:
        """Turn (batch, heads, tokens, d_h) states by these slots, all below ``slots``; float32.

        The angle is that of a tile's start plus that of the place within it, one rotation after the other.
        """
        anchors, offsets = self.anchors(TILE, slots, states.device), self.offsets(TILE, states.device)
        turned = _turn(states.float(), anchors[positions // TILE])
        return _turn(turned, offsets[positions % TILE])

    def _table(self, positions: Tensor, device: torch.device) -> Tensor:
        angles = positions.double()[:, None] * self._frequencies
        # The table outlives the call: made in inference mode, it could not serve a backward pass later.
        with torch.inference_mode(False):
            return torch.stack([angles.cos(), angles.sin()], dim=1).float().to(device)


def _turn(states: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs (i, i + d_h / 2) of (..., tokens, d_h) by (tokens, 2, d_h / 2) cos and sin."""
    left, right = states.chunk(2, dim=-1)
    cos, sin = angles[:, 0], angles[:, 1]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
