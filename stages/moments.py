"""Codec, step 1: moments of keys and values, and of their gradients, with labels sampled from the model."""

import torch
import typer

from recalkv.codec.context import cached_tokens, model_context, model_fingerprint, rope_facts, sliding_windows
from recalkv.codec.moments import take_moments
from recalkv.model.language import load_language_model, placement
from recalkv.model.source import checkpoint_dtype
from recalkv.params import advancing, check_length, public_name
from recalkv.store.codec_moments import put_codec_moments
from stages.common import Stage, stage


@stage
def moments(run: Stage) -> None:
    """Collect all layers' moments at the attention function, forward and backward over the first windows."""
    wanted, seed, folder = run.params.codec, run.params.calibration.seed, run.model().folder
    sampled = run.read("sample")
    windows = sampled.get("windows")[: wanted.samples]
    # On a CPU, 16-bit weights would also round the keys; matrix products there use calibration.precision.
    dtype = torch.float32 if run.device.type == "cpu" else checkpoint_dtype(folder)
    model = load_language_model(folder, dtype=dtype, device_map=placement(folder, run.device, dtype))
    context = wanted.context or model_context(model)
    check_length(model.config, "codec.context", context)
    with run.bar(None, "window") as bar:
        found = take_moments(model, windows, context, seed, advancing(bar), precision=run.precision)
    tokens = cached_tokens(model, context)
    record = {
        "context": context, "seed": seed, "shape": list(windows.shape), "fingerprint": model_fingerprint(model),
        "tokens": {str(index): tokens[index] for index in found}, "dtype": str(dtype), "precision": run.precision,
        "sliding_windows": sliding_windows(model),
        "texts": [public_name(text) for text in sampled.attributes["parameters"]["text"]],
        "rope": rope_facts(model.config),
    }  # fmt: skip
    with run.write(record) as store:
        put_codec_moments(store, found)


if __name__ == "__main__":
    typer.run(moments)
