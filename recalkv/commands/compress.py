"""`recalkv compress`: compress a model with a calibration text and evaluate the checkpoint briefly."""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from recalkv.commands.evaluate import quick_check
from recalkv.commands.options import check_revision, option, step_bar
from recalkv.errors import ParameterError, user_errors
from recalkv.params import CalibrationParams, CompressionParams, ModelParams, RuntimeParams, parse_section
from recalkv.presets import describe

_COMPRESSION, _CALIBRATION = CompressionParams(), CalibrationParams()
_CLEARLY = 0.05
"""A ratio that exceeds the requested one by more than this is reported; rounding alone stays below."""
_TARGET = (
    "Budget in place of --ratio: a ratio, GIB@CONTEXT such as 4GiB@128K, bytes_per_token=N, or max_excess=NATS, the "
    "smallest cache whose loss on held-out windows rises by no more."
)


def compress(
    source: Annotated[str, typer.Argument(metavar="MODEL", help=describe(ModelParams.model_fields["id"]))],
    out: Annotated[Path, typer.Option(help="New folder for the compressed checkpoint.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the folder, if it holds a compressed checkpoint.")
    ] = False,
    revision: Annotated[str | None, option(ModelParams, "revision", "its default branch")] = None,
    method: Annotated[str, option(CompressionParams, "method")] = _COMPRESSION.method,
    ratio: Annotated[float | None, option(CompressionParams, "ratio", str(_COMPRESSION.ratio))] = None,
    target: Annotated[str | None, typer.Option(help=_TARGET)] = None,
    group_size: Annotated[int, option(CompressionParams, "group_size")] = _COMPRESSION.group_size,
    bits: Annotated[str, option(CompressionParams, "bits")] = str(_COMPRESSION.bits),
    exact_window: Annotated[int, option(CompressionParams, "exact_window")] = _COMPRESSION.exact_window,
    text: Annotated[list[str], option(CalibrationParams, "text")] = _CALIBRATION.text,
    split: Annotated[str, option(CalibrationParams, "split")] = _CALIBRATION.split,
    field: Annotated[str, option(CalibrationParams, "field")] = _CALIBRATION.field,
    samples: Annotated[int, option(CalibrationParams, "samples")] = _CALIBRATION.samples,
    length: Annotated[int, option(CalibrationParams, "length")] = _CALIBRATION.length,
    seed: Annotated[int, option(CalibrationParams, "seed")] = _CALIBRATION.seed,
    batch_size: Annotated[int, option(CalibrationParams, "batch_size")] = _CALIBRATION.batch_size,
    precision: Annotated[str, option(CalibrationParams, "precision")] = _CALIBRATION.precision,
    device: Annotated[str, option(RuntimeParams, "device")] = RuntimeParams().device,
    check: Annotated[
        bool, typer.Option("--eval/--no-eval", help="End with a quick evaluation on held-out windows.")
    ] = True,
) -> None:
    """Compress a model into a checkpoint that caches latents."""
    given: dict[str, Any] = {"method": method, "group_size": group_size, "exact_window": exact_window}
    given["bits"] = int(bits) if bits.isdecimal() else bits
    given |= {} if ratio is None else {"ratio": ratio}
    sampling = {"text": text, "split": split, "field": field, "samples": samples, "length": length}
    sampling |= {"seed": seed, "batch_size": batch_size, "precision": precision}
    with user_errors():
        parameters = parse_section(CompressionParams, given, "recalkv compress")
        calibration = parse_section(CalibrationParams, sampling, "recalkv compress")
        if target is not None and ratio is not None:
            raise ParameterError(f"--target {target} and --ratio {ratio} are both given; give one of them.")

        from recalkv.method.target import Target

        goal = Target(ratio=parameters.ratio) if target is None else Target.of(target)

        from recalkv.model.source import local_folder
        from recalkv.store.folders import check_output, writing_folder

        check_revision(source, revision)
        check_output(out, local_folder(source), overwrite)

        from recalkv.compression import compress_checkpoint
        from recalkv.method.methods import resolve_method
        from recalkv.model.device import device_of
        from recalkv.model.source import resolve_model
        from recalkv.text.corpora import calibration_documents

        resolved = resolve_method(parameters)
        if resolved.bits not in (16, "mixed") and resolved.allocation == "water-filling":
            typer.echo(f"--bits {bits}: mixed bits lose less at the same bytes (docs/quantization.md)", err=True)
        where = device_of(device)
        documents = calibration_documents(calibration)
        # Open the folder first, so that an unwritable one fails before the work.
        with tempfile.TemporaryDirectory(prefix="recalkv-") as scratch:
            with writing_folder(out.resolve(), overwrite) as folder:
                reference = resolve_model(source, revision, Path(scratch))
                with step_bar("layer") as advance:
                    spec = compress_checkpoint(
                        reference, documents, calibration, parameters, where, folder, advance, goal
                    )
            print(f"{out}: caches {1 - spec.removed:.2%} of the bytes per token of the dense 16-bit cache")
            asked = spec.parameters["ratio"]
            if resolved.bits != 16 and goal.max_excess is None and spec.removed > asked + _CLEARLY:
                most = "at most 8 bits" if resolved.bits == "mixed" else f"{resolved.bits} bits"
                print(
                    f"  more than the ratio {asked:.4g} asked for: all ranks are kept, in {most} an element; "
                    f"--bits 16 removes less"
                )
            if others := spec.geometry.others:
                print(f"{others} of {others + spec.geometry.layers} layers keep a recurrent state, as before")
            if check:
                quick_check(out, reference.folder, documents, calibration, where)
