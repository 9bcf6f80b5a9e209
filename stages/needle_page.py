"""Step 9e: needle-in-a-haystack results of all forms of cache, as one table and one plot."""

import json

import typer

from recalkv.params import public_name
from recalkv.reports.needle import page, report
from recalkv.reports.plots import needle_heat_maps
from stages.common import Stage, stage, write_json


@stage(default=False)
def needle_page(run: Stage) -> None:
    """Gather DATA/cells/needle; write REPORTS/suites/needle.json (`rows`, `places`), needle.md and needle.png.

    Forms of cache without cells are kept from an earlier run.
    """
    cells = {path.stem: json.loads(path.read_text()) for path in (run.data / "cells/needle").glob("*.json")}
    folder = run.reports / "suites"
    path = folder / "needle.json"
    found = report(cells, json.loads(path.read_text()) if path.exists() else {})
    write_json(path, found)
    needle_heat_maps(folder / "needle.png", found["places"])
    (folder / "needle.md").write_text(page(found, run.params.needle, public_name(run.model().name)))


if __name__ == "__main__":
    typer.run(needle_page)
