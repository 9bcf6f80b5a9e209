"""Stage 0: find the dense model and, for the embedded default, convert it to safetensors."""

from pathlib import Path

import typer

from recalkv.model.source import resolve_model, write_reference
from recalkv.store.stores import writing_folder
from stages.common import DataOption, ParamsOption, running


def main(params: ParamsOption = Path("params.yaml"), data: DataOption = Path("data")) -> None:
    """Resolve model.id to a folder of safetensors weights and record it in DATA/model."""
    with running("model", params, data) as stage:
        wanted = stage.params.model
        with writing_folder(data / "model") as folder:
            reference = resolve_model(wanted.id, wanted.revision, folder)
            write_reference(reference, folder)


if __name__ == "__main__":
    typer.run(main)
