"""Inputs: find the dense model; the embedded default is converted to safetensors."""

import typer

from recalkv.errors import ParameterError
from recalkv.model.source import EMBEDDED, local_folder, resolve_model, write_reference
from recalkv.store.folders import writing_folder
from stages.common import Stage, stage


@stage
def model(run: Stage) -> None:
    """Resolve model.id to a folder of safetensors weights and record it in DATA/model."""
    wanted = run.params.model
    if wanted.revision is not None and (wanted.id == EMBEDDED or local_folder(wanted.id)):
        raise ParameterError(
            f"model.revision={wanted.revision} applies to hub models only, and {wanted.id} is local; leave it null."
        )
    with writing_folder(run.data / "model") as folder:
        write_reference(resolve_model(wanted.id, wanted.revision, folder), folder)


if __name__ == "__main__":
    typer.run(model)
