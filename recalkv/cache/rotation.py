"""Random rotations, which give values the same distribution in every direction before quantization."""

import torch
from torch import Tensor


def random_rotation(size: int, seed: int, *place: int) -> Tensor:
    """Return a random orthogonal matrix, (size, size) float64, determined by size, seed and place.

    Unlike a Hadamard matrix, it can have any size; folded into the factors, it costs nothing at run time.
    """
    mixed = seed
    for number in (size, *place):
        mixed = (mixed * 1000003 + number + 1) % (1 << 63)
    generator = torch.Generator().manual_seed(mixed)
    gaussian = torch.randn(size, size, generator=generator, dtype=torch.float64, device="cpu")
    rotation, triangle = torch.linalg.qr(gaussian)
    return rotation * torch.sign(triangle.diagonal())
