"""What a scale per channel and block costs and saves: errors of three forms of it on the default model's latents.

    python -m benchmarks.block_scales --data data

Latents of a few layers of `data/compressed`, in the basis in which they are quantised, on one calibration window;
the mean and the basis come from another. *Ours* is `recalkv.cache.rows.BlockLayout`; *KIVI* has the smallest value
and the step of each channel in 16 bits each; *a byte each* rounds those to a scale level and a multiple of the step.
Errors are fractions of the latents' energy. *At equal bytes* multiplies by 4 for every bit of scales per latent,
which is what a bit of code is worth.
"""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM

import recalkv  # noqa: F401  (registers the compressed classes)
from recalkv.cache.rows import BlockLayout, RowLayout, natural_basis, random_rotation
from recalkv.store.stores import open_store


def kivi(values: Tensor, bits: int) -> Tensor:
    """Round (..., block, width) between each channel's smallest and largest value, kept in 16 bits."""
    low, high, levels = values.amin(-2, keepdim=True), values.amax(-2, keepdim=True), (1 << bits) - 1
    step, low = ((high - low) / levels).half().float().clamp_min(1e-7), low.half().float()
    return ((values - low) / step).round().clamp(0, levels) * step + low


def kivi_bytes(values: Tensor, bits: int) -> Tensor:
    """The same with a byte for the step, on the scale of our levels, and a byte for the smallest value."""
    low, high, levels = values.amin(-2, keepdim=True), values.amax(-2, keepdim=True), (1 << bits) - 1
    step = torch.exp2((((high - low).clamp_min(1e-30) / levels).log2() * 8).ceil() / 8)
    low = (low / step).round().clamp(-128, 127) * step
    return ((values - low) / step).round().clamp(0, levels) * step + low


def ours(values: Tensor, bits: int) -> Tensor:
    """As the cache packs them."""
    layout = BlockLayout([[(values.shape[-1], bits)]], values.shape[-2])
    return layout.unpack(layout.pack(values), torch.float32)


FORMS: dict[str, tuple[Callable[[Tensor, int], Tensor], int]] = {
    "ours": (ours, 8),
    "KIVI": (kivi, 32),
    "a byte each": (kivi_bytes, 16),
}


@torch.no_grad()
def main(
    data: Annotated[Path, typer.Option(help="Folder of a finished default run, 16 bits.")] = Path("data"),
    layers: Annotated[str, typer.Option(help="Layers, separated by commas.")] = "1,8,15,22,29",
    blocks: Annotated[str, typer.Option(help="Tokens of a block, separated by commas.")] = "32,128",
) -> None:
    """Print the errors."""
    model = AutoModelForCausalLM.from_pretrained(data / "compressed", dtype=torch.float32).eval()
    windows = open_store(data / "sample.zarr", "sample").get("windows")[:2]
    errors: dict[tuple[int, str], float] = defaultdict(float)
    overhead: dict[tuple[int, str], float] = {}
    energy = 0.0
    for values in _latents(model, windows, [int(part) for part in layers.split(",")]):
        energy += float(values.square().sum())
        for bits in (2, 3, 4, 8):
            rows = RowLayout([[(values.shape[1], bits)]])
            errors[bits, "per token"] += float((rows.unpack(rows.pack(values), torch.float32) - values).square().sum())
            overhead[bits, "per token"] = 8 / values.shape[1]
            for block in map(int, blocks.split(",")):
                cut = values[: len(values) // block * block].unflatten(0, (-1, block))
                for name, (form, scale_bits) in FORMS.items():
                    key = bits, f"per channel and {block} tokens, {name}"
                    errors[key] += float((form(cut, bits) - cut).square().sum())
                    overhead[key] = scale_bits / block
    print(f"{'bits':>4}  {'scales':<44}{'bits of scales':>14}{'error':>10}{'at equal bytes':>16}")
    for (bits, name), error in sorted(errors.items()):
        extra = overhead[bits, name]
        print(f"{bits:>4}  {name:<44}{extra:>14.3f}{error / energy:>10.5f}{error / energy * 4**extra:>16.5f}")


def _latents(model: Any, windows: Tensor, layers: list[int]) -> list[Tensor]:
    """Latents of each group, (tokens, rank), centred, in the natural basis, of mean variance 1, and rotated."""
    seen: dict[int, list[Tensor]] = defaultdict(list)
    for index in layers:
        project = model.model.layers[index].self_attn.k_proj
        project.register_forward_hook(lambda _, __, output, index=index: seen[index].append(output[0].double()))
    for window in windows:
        model.model(window[None], use_cache=False)
    found = []
    for index in layers:
        module = model.model.layers[index].self_attn
        ups = zip(module.key_up, module.value_up, strict=True)
        pairs = zip(*(states.split(module.key_ranks, dim=-1) for states in seen[index]), strict=True)
        for group, (up, (first, second)) in enumerate(zip(ups, pairs, strict=True)):
            mean, both = first.mean(0), torch.cat([part.double() for part in up], dim=1)
            basis, _ = natural_basis((first - mean).T @ (first - mean) / len(first), both @ both.T)
            size = ((first - mean) @ basis).square().mean().sqrt()
            rotation = random_rotation(len(basis), 0, index, group)
            found.append(((second - mean) @ basis @ rotation / size).float())
    return found


if __name__ == "__main__":
    typer.run(main)
