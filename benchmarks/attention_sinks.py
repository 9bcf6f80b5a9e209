"""How much of the gradient energy the first token of a window carries, layer by layer, on the dense model.

    python -m benchmarks.attention_sinks

Needs the stages `model` and `sample` (DATA/model, DATA/sample.zarr). The reason for calibration.sink_tokens.
"""

from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM

from recalkv.model.source import read_reference
from recalkv.store.stores import open_store


def main(data: Path = Path("data"), windows: int = 2) -> None:
    """Print the first token's share of the squared gradients at keys and values, and how alike its inputs are."""
    model = AutoModelForCausalLM.from_pretrained(read_reference(data / "model").folder, dtype=torch.float32).eval()
    model.requires_grad_(False)
    ids = open_store(data / "sample.zarr", "sample").get("windows")[:windows]
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def keep(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name], outputs[name] = args[0].detach(), output

        return keep

    for index, layer in enumerate(model.model.layers):
        layer.self_attn.k_proj.register_forward_hook(watch(f"{index} key"))
        layer.self_attn.v_proj.register_forward_hook(watch(f"{index} value"))
    embedded = model.get_input_embeddings()(ids).requires_grad_(True)
    logits = model(inputs_embeds=embedded).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    gradients = dict(zip(outputs, torch.autograd.grad(loss, list(outputs.values())), strict=True))
    print(
        f"{windows} x {ids.shape[1]} tokens; shares of the squared gradients, and cosine of two windows' first inputs"
    )
    print(f"{'layer':>5}{'keys':>9}{'values':>9}{'cosine':>9}")
    for index in range(len(model.model.layers)):
        energies = (gradients[f"{index} {part}"].square().sum(dim=-1) for part in ("key", "value"))
        shares = [float(energy[:, 0].sum() / energy.sum()) for energy in energies]
        read = inputs[f"{index} key"]
        alike = float(torch.cosine_similarity(read[0, 0], read[-1, 0], dim=0))
        print(f"{index:>5}{shares[0]:>9.3f}{shares[1]:>9.3f}{alike:>9.3f}")


if __name__ == "__main__":
    typer.run(main)
