"""Storage of the moments of the loss-aware metric."""

import torch

from recalkv.statistics.loss_metric import LossMoments
from recalkv.store.stores import StoreReader, StoreWriter


def put_loss_moments(store: StoreWriter, name: str, moments: LossMoments) -> None:
    """Write one layer's moments of the loss-aware metric."""
    store.put(f"{name}/gram", moments.gram)
    store.put(f"{name}/key_gradient", moments.key_gradient)
    store.put(f"{name}/value_gradient", moments.value_gradient)
    store.put(f"{name}/tokens", torch.tensor(moments.tokens))
    store.put(f"{name}/mean", moments.mean)


def get_loss_moments(store: StoreReader, name: str, device: torch.device | None = None) -> LossMoments:
    """Read the output of :func:`put_loss_moments` to a device."""
    gram, key, value, mean = (
        store.get(f"{name}/{part}").to(device) for part in ("gram", "key_gradient", "value_gradient", "mean")
    )
    return LossMoments(gram, key, value, int(store.get(f"{name}/tokens")), mean)
