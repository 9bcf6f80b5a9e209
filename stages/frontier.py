"""Step 9, all methods and quantisers on one page: divergence from the dense model by bits per element."""

import json
from pathlib import Path
from typing import Annotated

import typer

from recalkv.reports.frontier import draw, page, rows_of
from stages.common import Stage, stage, write_json


@stage
def frontier(
    run: Stage, name: Annotated[str, typer.Argument(help="Name of the set; its cells are in DATA/cells/NAME.")]
) -> None:
    """Gather the cells; write REPORTS/NAME.json (`rows`), NAME.md and NAME.png."""
    wanted, calibration = run.params.evaluation, run.params.calibration
    text = Path(wanted.text).name
    cells = sorted((run.data / "cells" / name).glob("*.json"))
    rows = [row for path in cells for row in rows_of(path.stem, json.loads(path.read_text()), text)]
    rows.sort(key=lambda row: (-row["bits_per_element"], row["method"], row["text"]))
    write_json(run.reports / f"{name}.json", {"rows": rows})
    draw(run.reports / f"{name}.png", rows)
    setting = (
        f"{run.model().name}; ours is calibrated, unless said otherwise, on {calibration.in_words}; "
        f"{wanted.max_windows} windows of {wanted.window} tokens of each text."
    )
    (run.reports / f"{name}.md").write_text(page(rows, setting, f"{name}.png"))


if __name__ == "__main__":
    typer.run(frontier)
