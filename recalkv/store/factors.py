"""Factors of a projection in stores."""

from collections.abc import Sequence

import torch
from torch import Tensor

from recalkv.method.lowrank import LowRank
from recalkv.store.stores import StoreReader, StoreWriter


def put_factors(store: StoreWriter, name: str, factors: LowRank) -> None:
    """Write one projection's factors as float32: ``down`` side by side, ``up`` per group."""
    store.put(f"{name}/down", torch.cat(factors.down, dim=1).float())
    put_matrices(store, f"{name}/up", factors.up)


def get_factors(store: StoreReader, name: str) -> LowRank:
    """Read what :func:`put_factors` wrote."""
    down, up = store.get(f"{name}/down"), get_matrices(store, f"{name}/up")
    return LowRank(list(down.split([part.shape[0] for part in up], dim=1)), up)


def put_matrices(store: StoreWriter, name: str, matrices: Sequence[Tensor]) -> None:
    """Write a matrix of each group as float32."""
    for number, matrix in enumerate(matrices):
        store.put(f"{name}_{number}", matrix.float())


def get_matrices(store: StoreReader, name: str) -> list[Tensor]:
    """Read what :func:`put_matrices` wrote."""
    found = list[Tensor]()
    while (matrix := store.find(f"{name}_{len(found)}")) is not None:
        found.append(matrix)
    return found
