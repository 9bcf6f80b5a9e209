"""Cache sizes of known models, dense and compressed, and what fits beside the weights: arithmetic.

    python -m benchmarks.cache_sizes

Writes ``cache_sizes.md`` and ``cache_sizes.json``; `recalkv cache-size --config FOLDER` has one model's table.
"""

import json
from pathlib import Path

import typer

from recalkv.cache.size import markdown, table
from recalkv.model.sizes import KNOWN


def main(out: Path = Path("reports/scale"), group_size: int = 4) -> None:
    """Write the tables of all known models."""
    tables = {name: table(sizes, group_size) for name, sizes in KNOWN.items()}
    out.mkdir(parents=True, exist_ok=True)
    (out / "cache_sizes.json").write_text(json.dumps(tables, indent=2, sort_keys=True) + "\n")
    lines = [
        "# Cache sizes",
        "",
        "Written by `python -m benchmarks.cache_sizes`; arithmetic, nothing was run. Per cent are elements removed, at",
        f"uniform ranks: keys in groups of {group_size} heads, values in one latent a layer. 4 bits include a scale of",
        "one byte per token and latent. Beside the weights nothing else is counted: activations and the runtime take",
        "memory as well.",
        "",
        *(markdown(name, KNOWN[name], rows) for name, rows in tables.items()),
    ]
    (out / "cache_sizes.md").write_text("\n".join(lines))
    print(out / "cache_sizes.md")


if __name__ == "__main__":
    typer.run(main)
