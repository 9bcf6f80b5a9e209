"""RoPE for tiles of cache slots: angles of tile starts and of offsets within a tile, exact at any distance.

Scores depend only on the distance between query and key. For a tile that starts at slot ``a``, the query is rotated
back by the angle of ``a`` and keys are rotated by their offset in the tile, so that one small table serves all tiles.
The query itself is rotated by the start of its tile and then by its offset in it. All angles are computed in float64:
at slot 100,000 a float32 product of slot and frequency is wrong by up to 0.004 rad.
"""

from typing import Any

import torch
from torch import Tensor


class TileRotary:
    """Cos and sin of tile starts and of offsets within a tile, shared by all layers of a model.

    Parameters
    ----------
    rotary
        The model's rotary module with fixed frequencies: ``inv_freq`` (d_h / 2,) and ``attention_scaling``.
    """

    def __init__(self, rotary: Any) -> None:
        self._frequencies: Tensor = rotary.inv_freq.detach().double().cpu()
        self.scaling = float(rotary.attention_scaling)
        self._anchors: dict[tuple[int, torch.device], Tensor] = {}
        self._offsets: dict[tuple[int, torch.device], Tensor] = {}
        self._outgrown: list[Tensor] = []

    def tables(self, tile: int, slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles of tile starts and of the offsets within a tile.

        Returns
        -------
        anchors : (>= slots / tile, 2, d_h / 2) float32
            Grown by doubling.
        offsets : (tile, 2, d_h / 2) float32
        """
        key, tiles = (tile, device), -(-slots // tile)
        if key not in self._offsets:
            self._offsets[key] = self._table(torch.arange(tile), device)
        anchors = self._anchors.get(key)
        if anchors is None or len(anchors) < tiles:
            size = max(16, 1 << (tiles - 1).bit_length())
            # A captured graph may still read the shorter table.
            self._outgrown += [] if anchors is None else [anchors]
            self._anchors[key] = anchors = self._table(torch.arange(size) * tile, device)
        return anchors, self._offsets[key]

    def has(self, tile: int, slots: int, device: torch.device) -> bool:
        """Whether the tables exist already, as compiled models require."""
        key = (tile, device)
        return key in self._anchors and len(self._anchors[key]) * tile >= slots

    def _table(self, positions: Tensor, device: torch.device) -> Tensor:
        angles = positions.double()[:, None] * self._frequencies
        # The table outlives the call: an inference tensor could not be used in a later backward pass.
        with torch.inference_mode(False):
            return torch.stack([angles.cos(), angles.sin()], dim=1).float().to(device)
