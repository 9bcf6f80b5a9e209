"""Storage of codec moments."""

import torch

from recalkv.codec.moments import LayerMoments
from recalkv.codec.rope import Rotation
from recalkv.store.stores import StoreReader, StoreWriter, layer_name

_SIDES = ("key", "value")


def put_codec_moments(store: StoreWriter, moments: dict[int, LayerMoments]) -> None:
    """Write the moments of all attention layers."""
    store.put("layers_that_attend", torch.tensor(sorted(moments), dtype=torch.int64))
    for index, own in moments.items():
        name = layer_name(index)
        for side, *parts in zip(_SIDES, own.means, own.states, own.gradients, strict=True):
            for part, tensor in zip(("mean", "states", "gradients"), parts, strict=True):
                store.put(f"{name}/{side}_{part}", tensor)
        store.put(f"{name}/pairs", own.rotation.pairs)
        store.put(f"{name}/frequencies", own.rotation.frequencies)


def get_codec_moments(store: StoreReader) -> dict[int, LayerMoments]:
    """Read the output of :func:`put_codec_moments`."""
    found = {}
    for index in store.get("layers_that_attend").tolist():
        name = layer_name(index)
        means, states, gradients = (
            (store.get(f"{name}/key_{part}"), store.get(f"{name}/value_{part}"))
            for part in ("mean", "states", "gradients")
        )
        rotation = Rotation(store.get(f"{name}/pairs"), store.get(f"{name}/frequencies"))
        found[index] = LayerMoments(means, states, gradients, rotation)
    return found
