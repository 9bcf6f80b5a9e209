"""The method's types in stores: factors of a projection, and moments of the loss-aware metric."""

import torch
from torch import Tensor

from recalkv.method.lowrank import LowRank
from recalkv.statistics.loss_metric import LossMoments
from recalkv.store.stores import StoreReader, StoreWriter

__all__ = ["get_factors", "get_loss_moments", "put_factors", "put_loss_moments"]


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


def put_loss_moments(store: StoreWriter, name: str, moments: LossMoments) -> None:
    """Write one layer's moments of the loss-aware metric."""
    store.put(f"{name}/gram", moments.gram)
    store.put(f"{name}/key_gradient", moments.key_gradient)
    store.put(f"{name}/value_gradient", moments.value_gradient)
    store.put(f"{name}/tokens", torch.tensor(moments.tokens))
    store.put(f"{name}/mean", moments.mean)


def get_loss_moments(store: StoreReader, name: str) -> LossMoments:
    """Read what :func:`put_loss_moments` wrote."""
    return LossMoments(
        store.get(f"{name}/gram"),
        store.get(f"{name}/key_gradient"),
        store.get(f"{name}/value_gradient"),
        int(store.get(f"{name}/tokens")),
        store.get(f"{name}/mean"),
    )
