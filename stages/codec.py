"""Codec, step 2: compute bases and bits from the moments, and write the side-car."""

import typer

from recalkv.store.folders import writing_folder
from stages.common import Stage, stage
from stages.stored_codec import stored_codec


@stage
def codec(run: Stage) -> None:
    """Allocate codec.bits over all layers; write the side-car DATA/codec."""
    with writing_folder(run.data / "codec") as folder:
        stored_codec(run, run.params.codec.bits).write(folder)


if __name__ == "__main__":
    typer.run(codec)
