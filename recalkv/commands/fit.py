"""`recalkv fit`: fit a codec to a model with a calibration text."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from recalkv.commands.options import check_revision, option, step_bar
from recalkv.errors import ParameterError, user_errors
from recalkv.params import CalibrationParams, CodecParams, ModelParams, RuntimeParams, parse_section
from recalkv.presets import describe

_CODEC, _CALIBRATION = CodecParams(), CalibrationParams()
_SAMPLES = _CODEC.samples
_CONTEXT = 2048
_TARGET = (
    "Budget in place of --bits: the ratio of bytes to remove, GIB@CONTEXT such as 4GiB@128K, bytes_per_token=N, or "
    "max_excess=NATS, the smallest cache within this KL divergence from the dense model on held-out windows."
)

_HEADS = "KV heads per code; must divide the KV heads of each tensor-parallel rank."


def fit(
    source: Annotated[str, typer.Argument(metavar="MODEL", help=describe(ModelParams.model_fields["id"]))],
    out: Annotated[Path, typer.Option(help="New folder for the codec, a side-car of the model.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder, if it holds a codec.")] = False,
    revision: Annotated[str | None, option(ModelParams, "revision", "its default branch")] = None,
    bits: Annotated[float | None, option(CodecParams, "bits", str(_CODEC.bits))] = None,
    target: Annotated[str | None, typer.Option(help=_TARGET)] = None,
    context: Annotated[int | None, option(CodecParams, "context", "the model's own")] = None,
    text: Annotated[list[str], option(CalibrationParams, "text")] = _CALIBRATION.text,
    split: Annotated[str, option(CalibrationParams, "split")] = _CALIBRATION.split,
    field: Annotated[str, option(CalibrationParams, "field")] = _CALIBRATION.field,
    samples: Annotated[int, typer.Option(help="token windows; few are enough for a codec")] = _SAMPLES,
    length: Annotated[int, option(CalibrationParams, "length")] = _CALIBRATION.length,
    seed: Annotated[int, option(CalibrationParams, "seed")] = _CALIBRATION.seed,
    heads: Annotated[int | None, typer.Option(help=_HEADS, show_default="as many as fit 256 elements")] = None,
    device: Annotated[str, option(RuntimeParams, "device")] = RuntimeParams().device,
) -> None:
    """Fit a codec to a model; its weights stay unchanged."""
    sampling = {
        "text": text, "split": split, "field": field, "samples": samples, "length": length,
        "seed": seed,
    }  # fmt: skip
    with user_errors():
        own = parse_section(CodecParams, {"context": context} | ({} if bits is None else {"bits": bits}), "recalkv fit")
        calibration = parse_section(CalibrationParams, sampling, "recalkv fit")
        if heads is not None and heads < 1:
            raise ParameterError(f"--heads {heads} must be positive: the KV heads of a layer that share a code.")
        if target is not None and bits is not None:
            raise ParameterError(f"--target {target} and --bits {bits:g} are both given; give one of them.")

        from recalkv.method.target import Target

        goal = own.bits if target is None else Target.of(target)

        from recalkv.model.source import local_folder
        from recalkv.store.folders import CODEC, check_output, writing_folder

        check_revision(source, revision)
        check_output(out, local_folder(source), overwrite, CODEC)

        from recalkv.cache.residual_window import SLACK
        from recalkv.fitting import fit_loaded, load_dense
        from recalkv.model.device import device_of
        from recalkv.text.corpora import calibration_documents

        where = device_of(device)
        documents = calibration_documents(calibration)
        # Open the folder first, so that an unwritable one fails before the work.
        with (
            tempfile.TemporaryDirectory(prefix="recalkv-") as scratch,
            writing_folder(out.resolve(), overwrite) as folder,
        ):
            model, tokenizer = load_dense(source, revision, Path(scratch), where)
            with step_bar("window") as advance:
                codec = fit_loaded(model, tokenizer, documents, calibration, goal, own.context, advance, heads)
            codec.write(folder)
        size = sum(file.stat().st_size for file in out.iterdir())
        kept = codec.window + codec.sinks
        print(
            f"{out}: {size / 1e6:,.1f} MB, for contexts of {codec.context:,} tokens; caches {codec.bytes_per_token:,} "
            f"bytes per token, dense {codec.dense_bytes_per_token:,} in 16 bits"
        )
        if min(codec.cached_tokens(codec.context).values()) < codec.context:
            mean = codec.sequence_bytes(codec.context) / codec.context
            print(f"  {mean:,.0f} bytes per token of {codec.context:,}: layers with a sliding window cache no more")
        print(
            f"  {codec.bits_per_element(_CONTEXT):.2f} bits per element at {_CONTEXT:,} tokens: rows of "
            f"{codec.bits_per_element(_CONTEXT, exact=False):.2f}, plus {kept} exact tokens per sequence "
            f"({kept + SLACK} in transformers)"
        )
        print(f'use it: recalkv.use_codec(model, "{out}"), then model.generate() as always')
