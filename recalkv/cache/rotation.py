"""Random rotations, which make what is rounded look alike in every direction."""

import torch
from torch import Tensor


def random_rotation(size: int, seed: int, *place: int) -> Tensor:
    """Random orthogonal matrix, (size, size) float64; the same for the same seed and place.

    Any size, unlike a Hadamard matrix; folded into the factors, it costs nothing at run time.
    """
    mixed = seed
    for number in (size, *place):
        mixed = (mixed * 1000003 + number + 1) % (1 << 63)
    generator = torch.Generator().manual_seed(mixed)
    gaussian = torch.randn(size, size, generator=generator, dtype=torch.float64, device="cpu")
    rotation, triangle = torch.linalg.qr(gaussian)
    return rotation * torch.sign(triangle.diagonal())
