"""Storage of the low-rank factors of a projection."""

import torch

from recalkv.method.lowrank import LowRank
from recalkv.store.stores import StoreReader, StoreWriter


def put_factors(store: StoreWriter, name: str, factors: LowRank) -> None:
    """Write one projection's factors as float32: ``down`` concatenated over groups, ``up`` per group."""
    store.put(f"{name}/down", torch.cat(factors.down, dim=1).float())
    for number, matrix in enumerate(factors.up):
        store.put(f"{name}/up_{number}", matrix.float())


def get_factors(store: StoreReader, name: str) -> LowRank:
    """Read the output of :func:`put_factors`."""
    down, up = store.get(f"{name}/down"), list[torch.Tensor]()
    while (matrix := store.find(f"{name}/up_{len(up)}")) is not None:
        up.append(matrix)
    return LowRank(list(down.split([part.shape[0] for part in up], dim=1)), up)
