"""Inputs: find the dense model; the embedded default is converted to safetensors."""

import typer

from recalkv.model.source import resolve_model, write_reference
from recalkv.store.folders import writing_folder
from stages.common import Stage, stage


@stage
def model(run: Stage) -> None:
    """Resolve model.id to a folder of safetensors weights and record it in DATA/model."""
    wanted = run.params.model
    with writing_folder(run.data / "model") as folder:
        write_reference(resolve_model(wanted.id, wanted.revision, folder), folder)


if __name__ == "__main__":
    typer.run(model)
