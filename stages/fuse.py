"""Stage 9: fold permutation, biases and value reconstruction into the weights and write the checkpoint."""

from pathlib import Path

import torch
import typer

from recalkv.method.fuse_layer import fuse_layer
from recalkv.model.export import compressed_config, other_tensors, save_checkpoint
from recalkv.model.source import checkpoint_dtype
from recalkv.store.stores import writing_folder
from stages.common import DataOption, ParamsOption, running
from stages.inputs import Inputs


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Write DATA/compressed, a Hugging Face folder that loads after `import recalkv`."""
    from transformers import AutoTokenizer, GenerationConfig

    with running("fuse", params, data) as stage:
        wanted, reference = stage.params.compression, stage.model()
        source, inputs = stage.source(), Inputs(stage)
        refitted = stage.read("calibrate")
        permutations = [inputs.permutation(index) for index in range(source.num_layers)]
        ranks = inputs.ranks()
        provenance = {
            "name": reference.name,
            "revision": reference.revision,
            "fingerprint": reference.fingerprint,
        }
        config = compressed_config(source, permutations, ranks, wanted, provenance, stage.params.calibration)
        dtype = checkpoint_dtype(reference.folder) if wanted.dtype == "auto" else getattr(torch, wanted.dtype)
        layers = (
            fuse_layer(
                source,
                index,
                permutation,
                refitted.get_factors(f"layers/{index:03d}/key"),
                refitted.get_factors(f"layers/{index:03d}/value"),
                refitted.find(f"layers/{index:03d}/output"),
                wanted,
                refitted.find(f"layers/{index:03d}/input_mean"),
            )
            for index, permutation in enumerate(permutations)
        )
        with writing_folder(data / "compressed") as folder:
            save_checkpoint(folder, config, other_tensors(source), stage.progress(layers, source.num_layers), dtype)
            AutoTokenizer.from_pretrained(reference.folder, trust_remote_code=False).save_pretrained(folder)
            if (reference.folder / "generation_config.json").exists():
                GenerationConfig.from_pretrained(reference.folder).save_pretrained(folder)


if __name__ == "__main__":
    typer.run(main)
