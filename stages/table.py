"""A grid's cells as one table and one plot."""

import json
from pathlib import Path
from typing import Annotated

import typer

from recalkv.errors import StoreError
from recalkv.params import public_name
from recalkv.reports.grid import grid_page
from recalkv.reports.paper import paper_rows
from recalkv.reports.plots import against_bytes
from stages.common import Stage, stage, write_json


@stage(default=False)
def table(
    run: Stage,
    name: Annotated[str, typer.Argument(help="Name of the grid; its cells are in DATA/cells/NAME.")],
    title: Annotated[str, typer.Option(help="Title of the page.")],
) -> None:
    """Gather a grid's cells; write REPORTS/grids/NAME.json (metrics by cell), NAME.md and NAME.png."""
    cells = {path.stem: json.loads(path.read_text()) for path in sorted((run.data / "cells" / name).glob("*.json"))}
    if not cells:
        raise StoreError(f"{run.data / 'cells' / name} holds no cells; run `make grid NAME={name}`.")
    folder = run.reports / "grids"
    write_json(folder / f"{name}.json", cells)
    against_bytes(folder / f"{name}.png", list(cells.values()))
    paper = paper_rows(Path("reports/paper.json"), run.params.model.id)
    calibration, evaluation = run.params.calibration, run.params.evaluation
    setting = (
        f"{public_name(run.model().name)}; calibrated, unless said otherwise, on {calibration.in_words}; "
        f"windows of {evaluation.window} tokens of "
        f"`{public_name(evaluation.text)}`; "
        f"groups of up to {run.params.compression.group_size} KV heads unless said otherwise."
    )
    (folder / f"{name}.md").write_text(grid_page(title, setting, f"{name}.png", cells, evaluation.text, paper))


if __name__ == "__main__":
    typer.run(table)
