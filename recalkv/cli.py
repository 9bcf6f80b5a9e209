"""ReCalKV: low-rank latent KV caches for pretrained language models, without training.

These tools need no pipeline; its stages are `python -m stages.NAME`, or all of them `dvc repro`.
"""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import BaseModel

from recalkv.errors import ParameterError, user_errors
from recalkv.params import CalibrationParams, CompressionParams, ModelParams, RuntimeParams, parse_section
from recalkv.presets import describe, is_rendered, preset_names, render
from recalkv.presets import preset as parameters_of

# Modules that need torch are imported where they are used: help is not to wait for them.

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False
)

_COMPRESSION, _CALIBRATION = CompressionParams(), CalibrationParams()


def _option(section: type[BaseModel], name: str) -> Any:
    """Option with a parameter's description."""
    return typer.Option(help=describe(section.model_fields[name]))


@app.command()
def compress(
    source: Annotated[str, typer.Argument(help=describe(ModelParams.model_fields["id"]))],
    out: Annotated[Path, typer.Option(help="New folder for the compressed checkpoint.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the folder, if it holds a compressed checkpoint.")
    ] = False,
    revision: Annotated[str | None, _option(ModelParams, "revision")] = None,
    method: Annotated[str, _option(CompressionParams, "method")] = _COMPRESSION.method,
    ratio: Annotated[float, _option(CompressionParams, "ratio")] = _COMPRESSION.ratio,
    group_size: Annotated[int, _option(CompressionParams, "group_size")] = _COMPRESSION.group_size,
    bits: Annotated[str, _option(CompressionParams, "bits")] = str(_COMPRESSION.bits),
    text: Annotated[list[str], _option(CalibrationParams, "text")] = _CALIBRATION.text,
    samples: Annotated[int, _option(CalibrationParams, "samples")] = _CALIBRATION.samples,
    length: Annotated[int, _option(CalibrationParams, "length")] = _CALIBRATION.length,
    seed: Annotated[int, _option(CalibrationParams, "seed")] = _CALIBRATION.seed,
    device: Annotated[str, _option(RuntimeParams, "device")] = RuntimeParams().device,
) -> None:
    """Compress a model in one call, without the pipeline, and save the checkpoint."""
    given = {"method": method, "ratio": ratio, "group_size": group_size, "bits": yaml.safe_load(bits)}
    sampling = {"text": text, "samples": samples, "length": length, "seed": seed}
    with user_errors():
        parameters = parse_section(CompressionParams, given, "recalkv compress")
        calibration = parse_section(CalibrationParams, sampling, "recalkv compress")

        from recalkv.model.source import EMBEDDED
        from recalkv.store.folders import check_output, writing_folder

        check_output(out, Path(source) if source != EMBEDDED and Path(source).exists() else None, overwrite)

        from tqdm import tqdm

        from recalkv.cache.codebooks import UNIFORM_CODES
        from recalkv.compression import compress_checkpoint
        from recalkv.method.methods import resolve_method
        from recalkv.model.device import device_of
        from recalkv.model.source import resolve_model
        from recalkv.text.corpora import calibration_documents

        resolved = resolve_method(parameters)
        if resolved.bits in UNIFORM_CODES and resolved.allocation == "water-filling":
            typer.echo(f"--bits {bits}: mixed bits lose less at the same bytes (docs/quantisation.md)", err=True)
        where = device_of(device)
        documents = calibration_documents(calibration)
        # The folder first, so that one that cannot be written is known before the work.
        with tempfile.TemporaryDirectory(prefix="recalkv-") as scratch, writing_folder(out.resolve()) as folder:
            reference = resolve_model(source, revision, Path(scratch))
            with tqdm(unit="layer", mininterval=1.0) as bar:

                def advance(step: str, done: int, total: int) -> None:
                    if done == 1:
                        bar.reset(total)
                        bar.set_description(step)
                    bar.update()

                spec = compress_checkpoint(reference, documents, calibration, parameters, where, folder, advance)
        print(f"{out}: caches {1 - spec.removed:.2%} of the bytes per token of the dense model in 16 bits")


@app.command()
def preset(
    name: Annotated[str, typer.Argument(help="Name of the preset; `list` shows them.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("params.yaml"),
    ratio: Annotated[float | None, _option(CompressionParams, "ratio")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file even if it was changed by hand.")
    ] = False,
) -> None:
    """Write a parameter file: the defaults, a named setting, or those of a model. Then run `dvc repro`."""
    with user_errors():
        if name == "list":
            print("\n".join(preset_names()))
            return
        content = render(parameters_of(name, ratio))
        if out.exists() and not overwrite and not is_rendered(out.read_text()):
            raise ParameterError(
                f"{out} is no preset as it was written, so something in it would be lost; --overwrite."
            )
        out.write_text(content)
        print(f"{out} now holds preset {name}; run `dvc repro`.")


@app.command()
def families() -> None:
    """List the language models of the installed transformers by model type: supported, or why not."""
    from recalkv.model.family import known_families

    for name, reason in known_families().items():
        print(f"{name}: {'supported' if reason is None else f'refused, as it {reason}'}")
    print("A multimodal model is what the language model in its text_config is.")


@app.command()
def push(
    repo: Annotated[str, typer.Argument(help="Repository on the hub, OWNER/NAME.")],
    folder: Annotated[Path, typer.Option(help="Compressed checkpoint.")] = Path("data/compressed"),
    reports: Annotated[Path, typer.Option(help="Reports with the checkpoint's figures.")] = Path("reports"),
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be uploaded.")] = False,
) -> None:
    """Upload a checkpoint with a model card that has its measured figures."""
    from huggingface_hub import HfApi

    from recalkv.model.card import CARD
    from recalkv.reports.card import measured_card

    with user_errors(), tempfile.TemporaryDirectory(prefix="recalkv-") as scratch:
        card = Path(scratch) / CARD
        card.write_text(measured_card(folder, reports, repo))
        files = {path.name: path for path in sorted(folder.iterdir())} | {CARD: card}
        for name, path in files.items():
            print(f"{path.stat().st_size:>15,}  {name}")
        if dry_run:
            print(card.read_text())
            return
        api = HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=[CARD])
        api.upload_file(repo_id=repo, path_or_fileobj=card, path_in_repo=CARD)
        print(f"uploaded to {repo}")


@app.command()
def cache_size(
    config: Annotated[
        str, typer.Option(help="Folder with a config.json, dense or compressed, or a preset's name; default all known.")
    ] = "",
    group_size: Annotated[int, typer.Option(help="Key heads per group.", min=1)] = 4,
) -> None:
    """Print how large the cache is, dense and compressed, and how much of it fits beside the weights."""
    from recalkv.cache.size import markdown, table
    from recalkv.model.sizes import KNOWN, ModelSizes, known_sizes

    with user_errors():
        if not config:
            tables = [(name, sizes, table(sizes, group_size)) for name, sizes in KNOWN.items()]
        elif (Path(config) / "config.json").exists():
            from transformers import AutoConfig

            from recalkv.model.modeling import register
            from recalkv.model.spec import LatentSpec

            register()
            loaded = AutoConfig.from_pretrained(config)
            sizes = ModelSizes.from_config(loaded)
            own = LatentSpec.from_config(loaded).cached_bytes_per_token() if hasattr(loaded, "recalkv") else None
            tables = [(Path(config).name, sizes, table(sizes, group_size, own))]
        else:
            sizes = known_sizes(config, "--config (no folder with a config.json)")
            tables = [(config, sizes, table(sizes, group_size))]
        print("\n".join(markdown(*each) for each in tables))


if __name__ == "__main__":
    app()
