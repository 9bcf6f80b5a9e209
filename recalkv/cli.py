"""The console script `recalkv`: every stage, and the tools that need no pipeline."""

import sys
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from recalkv.errors import ParameterError
from recalkv.model.spec import LatentSpec
from recalkv.params import parse_params
from stages.common import STAGES, ParamsOption, user_errors

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
for _name in STAGES:
    app.command(_name, rich_help_panel="Stages, in order")(import_module(f"stages.{_name}").main)


def preset_names() -> list[str]:
    """Names of the presets that come with the package."""
    return sorted(p.name.removesuffix(".yaml") for p in files("recalkv.presets").iterdir() if p.name.endswith(".yaml"))


def apply_preset(base: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a full parameter mapping: ``base`` with the preset's values in place of its own."""
    if name not in preset_names():
        raise ParameterError(f"preset {name!r} does not exist; choose one of: {', '.join(preset_names())}.")
    overlay = yaml.safe_load((files("recalkv.presets") / f"{name}.yaml").read_text())
    merged = {section: {**base[section], **overlay.get(section, {})} for section in base}
    parse_params(merged, f"preset {name}")
    return merged


@app.command(rich_help_panel="Tools")
def preset(
    name: Annotated[str, typer.Argument(help="Name of the preset; `list` shows them.")],
    params: ParamsOption = Path("params.yaml"),
    ratio: Annotated[float | None, typer.Option(help="Fraction of the cache's bytes to remove.")] = None,
) -> None:
    """Rewrite the parameter file with the settings of a known model; then run `dvc repro`."""
    with user_errors():
        if name == "list":
            print("\n".join(preset_names()))
            return
        merged = apply_preset(yaml.safe_load(params.read_text()), name)
        if ratio is not None:
            merged["compression"]["ratio"], merged["compare"]["ratios"] = ratio, [ratio]
            parse_params(merged, f"preset {name}")
        params.write_text(yaml.safe_dump(merged, sort_keys=False))
        print(f"{params} now holds preset {name}; run `dvc repro`.")


@app.command(rich_help_panel="Tools")
def compress(
    model: Annotated[str, typer.Argument(help="`embedded`, a Hugging Face id, or a local folder.")],
    out: Annotated[Path, typer.Option(help="Folder for the compressed checkpoint.")],
    ratio: Annotated[float, typer.Option(help="Fraction of the dense cache's bytes to remove, in [0, 1).")] = 0.5,
    method: Annotated[str, typer.Option(help="loss-aware, recalkv, palu or svd.")] = "loss-aware",
    group_size: Annotated[int | None, typer.Option(help="Heads per group; default 4, or all if fewer.")] = None,
    bits: Annotated[str, typer.Option(help="Per cached element: 16, 8, 4, 3, 2 or mixed.")] = "16",
    scales: Annotated[str, typer.Option(help="Below 16 bits: per token, or channel (and block; KIVI).")] = "token",
    block: Annotated[int, typer.Option(help="Tokens of a block with --scales channel, a multiple of 8.")] = 32,
    text: Annotated[str, typer.Option(help="Calibration text, as calibration.text in params.yaml.")] = "embedded",
    samples: Annotated[int, typer.Option(help="Calibration windows.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of the choice of windows.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
) -> None:  # fmt: skip
    """Compress a model in one call, without the pipeline, and save the checkpoint."""
    import tempfile

    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from recalkv.compression import compress as run
    from recalkv.model.source import resolve_model
    from recalkv.store.stores import writing_folder
    from recalkv.text.documents import load_documents
    from stages.common import device_of

    with user_errors(), tempfile.TemporaryDirectory(prefix="recalkv-") as scratch:
        where = device_of(device)
        reference = resolve_model(model, None, Path(scratch))
        dense = AutoModelForCausalLM.from_pretrained(reference.folder, dtype="auto").to(where)
        tokenizer = AutoTokenizer.from_pretrained(reference.folder, trust_remote_code=False)
        bar: Any = tqdm(unit="layer", file=sys.stderr, mininterval=1.0)

        def advance(step: str, done: int, total: int) -> None:
            if done == 1:
                bar.reset(total)
                bar.set_description(step)
            bar.update()

        with bar:
            compressed = run(
                dense, tokenizer, load_documents(text, split="train"), ratio=ratio, method=method,
                group_size=group_size, samples=samples, length=length, seed=seed, progress=advance, text_name=text,
                bits=int(bits) if bits.isdigit() else bits, scales=scales, block=block,
            )  # fmt: skip
        with writing_folder(out) as folder:
            compressed.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        kept = 1 - LatentSpec.from_config(compressed.config).removed
        print(f"{out}: caches {kept:.2%} of the bytes per token of the dense model in 16 bits")


@app.command(rich_help_panel="Tools")
def push(
    repo: Annotated[str, typer.Argument(help="Repository on the hub, OWNER/NAME.")],
    folder: Annotated[Path, typer.Option(help="Compressed checkpoint.")] = Path("data/compressed"),
    reports: Annotated[Path, typer.Option(help="Reports with the checkpoint's figures.")] = Path("reports"),
    private: Annotated[bool, typer.Option(help="Make a new repository private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be uploaded.")] = False,
) -> None:
    """Upload a checkpoint with a model card that has its measured figures."""
    import tempfile

    from huggingface_hub import HfApi

    from recalkv.model.card import CARD
    from stages.upload import measured_card

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


@app.command(rich_help_panel="Tools")
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

            import recalkv  # noqa: F401  (registers the compressed classes)

            loaded = AutoConfig.from_pretrained(config)
            sizes = ModelSizes.from_config(loaded)
            own = LatentSpec.from_config(loaded).cached_bytes_per_token() if getattr(loaded, "recalkv", None) else None
            tables = [(Path(config).name, sizes, table(sizes, group_size, own))]
        else:
            sizes = known_sizes(config, "--config (no folder with a config.json)")
            tables = [(config, sizes, table(sizes, group_size))]
        print("\n".join(markdown(*each) for each in tables))


if __name__ == "__main__":
    app()
