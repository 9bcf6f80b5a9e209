"""Factors of a projection in stores."""

import torch
from torch import Tensor

from recalkv.method.lowrank import LowRank
from recalkv.store.stores import StoreReader, StoreWriter

__all__ = ["get_factors", "put_factors"]


def put_factors(store: StoreWriter, name: str, factors: LowRank) -> None:
    """Write one projection's factors as float32: ``down`` side by side, ``up`` per group."""
    store.put(f"{name}/down", torch.cat(factors.down, dim=1).float())
    for number, up in enumerate(factors.up):
        store.put(f"{name}/up_{number}", up.float())


def get_factors(store: StoreReader, name: str) -> LowRank:
    """Read what :func:`put_factors` wrote."""
    down, up = store.get(f"{name}/down"), list[Tensor]()
    while (part := store.find(f"{name}/up_{len(up)}")) is not None:
        up.append(part)
    return LowRank(list(down.split([part.shape[0] for part in up], dim=1)), up)
