"""Step 9: all methods and quantizers on one page, divergence from the dense model by bits per element."""

import json
from pathlib import Path
from typing import Annotated

import typer

from recalkv.errors import StoreError
from recalkv.params import public_name
from recalkv.reports.frontier import Row, draw, page, rows_of
from stages.common import Stage, stage, write_json


@stage(default=False)
def frontier(
    run: Stage, name: Annotated[str, typer.Argument(help="Name of the set; its cells are in DATA/cells/NAME.")]
) -> None:
    """Gather the cells; write REPORTS/NAME.json, NAME.md and NAME.png."""
    wanted, calibration = run.params.evaluation, run.params.calibration
    text, cells = public_name(wanted.text), run.data / "cells" / name
    rows = _rows(cells, text)
    if not rows:
        raise StoreError(f"{cells} holds no cells; run `make frontier`.")
    write_json(run.reports / f"{name}.json", {"rows": rows})
    draw(run.reports / f"{name}.png", rows)
    setting = (
        f"{public_name(run.model().name)}; latents are calibrated, unless stated otherwise, on {calibration.in_words}, "
        f"the codec on the first {run.params.codec.samples} of these windows; {wanted.max_windows} windows of "
        f"{wanted.window} tokens of each text."
    )
    (run.reports / f"{name}.md").write_text(page(rows, setting, f"{name}.png"))


def _rows(folder: Path, text: str) -> list[Row]:
    """Return the rows of a folder's cells, by decreasing bits."""
    cells = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    rows = [row for name, cell in cells.items() for row in rows_of(name, cell, text)]
    return sorted(rows, key=lambda row: (-row["bits_per_element"], row["method"], row["text"]))


if __name__ == "__main__":
    typer.run(frontier)
