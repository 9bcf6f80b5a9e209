"""ReCalKV: KV cache compression for pretrained language models, without training.

`fit` fits a codec to the unchanged model; `compress` writes a checkpoint that caches latents. Neither needs the
pipeline (`dvc repro`).
"""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from recalkv import __version__
from recalkv.commands.compress import compress
from recalkv.commands.evaluate import evaluate
from recalkv.commands.fit import fit
from recalkv.commands.generate import chat, generate
from recalkv.errors import ParameterError, user_errors
from recalkv.params import CompressionParams
from recalkv.presets import describe, is_rendered, preset_names, render
from recalkv.presets import preset as parameters_of
from recalkv.store.folders import write_whole

# Modules that need torch are imported where they are used, so that help does not wait for them.

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help=__doc__,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback(help=__doc__)
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    # Turn SIGTERM into an exception, so that half-written and temporary folders are removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


app.command()(fit)
app.command()(compress)
app.command(name="eval")(evaluate)
app.command()(generate)
app.command()(chat)


@app.command()
def preset(
    name: Annotated[str, typer.Argument(help="Name of the preset; `list` shows them.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("params.yaml"),
    ratio: Annotated[float | None, typer.Option(help=describe(CompressionParams.model_fields["ratio"]))] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file even if it is no preset of this version.")
    ] = False,
) -> None:
    """Write params.yaml from a preset (`list` shows them)."""
    with user_errors():
        if name == "list":
            print("\n".join(preset_names()))
            return
        content = render(parameters_of(name, ratio))
        try:
            if out.exists() and not overwrite and not is_rendered(out.read_text(errors="replace")):
                raise ParameterError(
                    f"{out} differs from every preset of this version; give --overwrite to replace it."
                )
            write_whole(out, content)
        except OSError as error:
            raise ParameterError(
                f"--out {out} cannot be written ({error.strerror}); name a file in a folder that exists."
            ) from error
        print(f"{out} now holds preset {name}" + ("; run `dvc repro`." if out.name == "params.yaml" else "."))


@app.command()
def families() -> None:
    """List the models that `compress` supports, and why others are refused."""
    from recalkv.model.families import known_families

    for name, reason in known_families().items():
        print(f"{name}: {'supported' if reason is None else f'refused, as it {reason}'}")
    print("For a multimodal model, look up the model_type of its text_config.")


@app.command()
def cache_size(
    config: Annotated[
        str,
        typer.Option(
            help="Dense or compressed model: a folder or a hub id, or a name such as llama-2-7b; default all names."
        ),
    ] = "",
) -> None:
    """Print KV-cache sizes and how many sequences fit."""
    from recalkv.model.sizes import KNOWN, ModelSizes, known_sizes
    from recalkv.reports.cache_size import markdown, table

    with user_errors():
        if not config:
            tables = [(name, sizes, table(sizes)) for name, sizes in KNOWN.items()]
        elif (folder := _config_folder(config)) is not None:
            from recalkv.model.modeling import register
            from recalkv.model.source import load_config
            from recalkv.model.spec import LatentSpec

            register()
            loaded = load_config(folder, config)
            sizes = ModelSizes.from_config(loaded)
            own = None
            if hasattr(loaded, "recalkv"):
                own = [layer.cached_bytes() for layer in LatentSpec.from_config(loaded).layers]
            tables = [(Path(config.removesuffix("/config.json")).name, sizes, table(sizes, own))]
        else:
            sizes = known_sizes(config, "--config (no folder with a config.json, and no OWNER/NAME of the hub)")
            tables = [(config, sizes, table(sizes))]
        print("\n".join(markdown(*each) for each in tables))


def _config_folder(name: str) -> Path | None:
    """Return the folder of a local config.json, or fetch that of a hub id; None for other names."""
    path = Path(name)
    if (path / "config.json").exists() or (path.name == "config.json" and path.exists()):
        return path.parent if path.name == "config.json" else path
    if path.name == "config.json" or name.count("/") != 1 or name.startswith("paper/") or path.exists():
        return None
    from recalkv.model.source import hub_config

    return hub_config(name)


if __name__ == "__main__":
    app()
