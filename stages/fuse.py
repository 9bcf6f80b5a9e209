"""Step 8: fold permutation, biases and value reconstruction into the weights and write the checkpoint."""

import typer
from transformers import AutoTokenizer

from recalkv.method.fusion import fuse_layer, stored_latents
from recalkv.model.export import compressed_config, copy_generation_config, decoder_layers, save_checkpoint
from recalkv.model.source import checkpoint_dtype
from recalkv.store.folders import writing_folder
from recalkv.store.stores import layer_name
from stages.common import Stage, stage
from stages.stored import Stored


@stage
def fuse(run: Stage) -> None:
    """Write DATA/compressed, a Hugging Face folder that loads after `import recalkv`."""
    wanted, reference, stored = run.params.compression, run.model(), Stored(run)
    source, refitted = stored.source, run.read("calibrate")
    permutations = [stored.permutation(index) for index in range(source.num_layers)]
    provenance = {"name": reference.name, "revision": reference.revision, "fingerprint": reference.fingerprint}
    # The statistics may come from another machine, on which `auto` chose another precision.
    precision = run.read("whiten").attributes["parameters"]["precision"]
    calibration = run.params.calibration.model_copy(update={"precision": precision})
    latents = stored_latents(source, stored.specs(), permutations, wanted, provenance, calibration)
    specs, config = latents.layers, compressed_config(source, latents)
    dtype = checkpoint_dtype(reference.folder)
    means = (refitted.find(f"{layer_name(index)}/input_mean") for index in range(len(specs)))
    layers = (
        fuse_layer(source, index, spec, stored.refit(refitted, index), mean, dtype)
        for index, (spec, mean) in enumerate(zip(specs, means, strict=True))
    )
    with writing_folder(run.data / "compressed") as folder:
        whole = decoder_layers(source, run.progress(layers, len(specs)))
        save_checkpoint(folder, config, source.stored_others(), whole, dtype)
        AutoTokenizer.from_pretrained(reference.folder, trust_remote_code=False).save_pretrained(folder)
        copy_generation_config(reference.folder, folder)


if __name__ == "__main__":
    typer.run(fuse)
