"""Real models on one page: codec, latents, the paper's methods, and caches that engines ship, by bits."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import typer
from transformers import AutoConfig

from recalkv.codec.context import cached_tokens
from recalkv.evaluation.quantizers import QUANTIZERS, quantizer
from recalkv.evaluation.uncertainty import standard_error
from recalkv.params import public_name
from recalkv.reports.frontier import Row, draw, rows_of
from recalkv.reports.models import CONTEXT, page
from recalkv.reports.tables import bits_at_context
from stages.common import Stage, stage, write_json


@stage(default=False)
def models_page(run: Stage) -> None:
    """Gather the cells of all models; write REPORTS/models.json, models.md, and a plot of each model in models/.

    Results whose files are missing (cells, suites, settings) are kept from an earlier run.
    """
    path = run.reports / "models.json"
    earlier = json.loads(path.read_text()) if path.exists() else {"models": {}}
    cells = (run.data / "cells" / "models").glob("*/*.json")
    measured = {
        folder.name: _beside(earlier["models"].get(folder.name), _model(run, folder))
        for folder in sorted({path.parent for path in cells})
    }
    found = dict(sorted((earlier["models"] | measured).items(), key=lambda each: int(each[1]["hidden"])))
    own = _further(run)
    earlier["answers"] = _comparable(earlier.get("answers", {}), own["answers"])
    _keep_longer(earlier["answers"], own["answers"])
    further = {kind: _merged(earlier.get(kind, {}), each) for kind, each in own.items()}
    write_json(path, {"models": found, **further})
    (run.reports / "models").mkdir(parents=True, exist_ok=True)
    for name, model in found.items():
        draw(run.reports / "models" / f"{name}.png", model["rows"])
    wanted = run.params.evaluation
    (run.reports / "models.md").write_text(page(found, wanted.window, public_name(wanted.text), further))


def _beside(earlier: dict[str, Any] | None, own: dict[str, Any]) -> dict[str, Any]:
    """Merge a model's cells and timings into those of an earlier run."""
    rows = {(row["method"], row["text"]): row for row in [*(earlier or {}).get("rows", ()), *own["rows"]]}
    ordered = sorted(rows.values(), key=lambda row: (-row["bits_per_element"], row["method"], row["text"]))
    return own | {"rows": ordered, "timings": (earlier or {}).get("timings", {}) | own["timings"]}


def _merged(earlier: Any, own: Any) -> Any:
    """Merge new results into earlier ones, key by key; the record of one measurement is replaced as a whole."""
    if not (isinstance(earlier, dict) and isinstance(own, dict)) or own.keys() & {"rows", "kl", "items", "texts"}:
        return own
    return dict(sorted((earlier | {key: _merged(earlier.get(key), value) for key, value in own.items()}).items()))


def _comparable(earlier: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return an earlier run's answers, without those whose dense model scores differently now in the same place."""

    def stale(dense: dict[str, Any], task: str, record: dict[str, Any], now: dict[str, Any]) -> bool:
        again = now.get(task)
        if again is None or again["ran"] != record["paired"]:
            return False
        return any(again[key] != dense[task][key] for key in ("items", "score"))

    kept: dict[str, Any] = {}
    for model, suites in earlier.items():
        for suite, caches in suites.items():
            now = own.get(model, {}).get(suite, {}).get("dense", {})
            for name, tasks in caches.items():
                fresh = {task: each for task, each in tasks.items() if not stale(caches["dense"], task, each, now)}
                if fresh:
                    kept.setdefault(model, {}).setdefault(suite, {})[name] = fresh
    return kept


def _keep_longer(earlier: dict[str, Any], own: dict[str, Any]) -> None:
    """Leave out the dense model's scores on fewer items than elsewhere; differences from them stay."""
    for model, suites in own.items():
        for suite, caches in suites.items():
            known = earlier.get(model, {}).get(suite, {}).get("dense", {})
            for task in [task for task, each in caches["dense"].items() if task in known]:
                if caches["dense"][task]["items"] < known[task]["items"]:
                    del caches["dense"][task]


def _model(run: Stage, cells: Path) -> dict[str, Any]:
    """Return the results of one model, whose cells are in a folder of its name."""
    own, text = run.data / "models" / cells.name, public_name(run.params.evaluation.text)
    config = AutoConfig.from_pretrained(own / "checkpoint", trust_remote_code=False)
    tokens = list(cached_tokens(SimpleNamespace(config=config), CONTEXT).values())
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows: list[Row] = []
    for path in cells.glob("*.json"):
        cell = json.loads(path.read_text())
        bits = _bits(path.stem, cell, tokens, head_dim)
        rows += [row | {"bits_per_element": bits} for row in rows_of(path.stem, cell, text)]
        windows = [text["windows"] for text in cell["further_texts"].values()]
    timings = own / "timings.json"
    return {
        "rows": rows,
        "windows": windows[0] if windows else 0,
        "hidden": config.hidden_size,
        "layers": len(tokens),
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "timings": json.loads(timings.read_text()) if timings.exists() else {},
    }


def _further(run: Stage) -> dict[str, dict[str, Any]]:
    """Return results that exist for some models only, by kind and model."""
    cells, text = run.data / "cells", public_name(run.params.evaluation.text)
    found: dict[str, dict[str, Any]] = {
        kind: {path.stem: json.loads(path.read_text()) for path in sorted((cells / kind).glob("*.json"))}
        for kind in ("biases", "contexts")
    }
    found["written"] = {
        folder.name: {name: rows_of(name, cell, text)[0] for name, cell in _files(folder).items()}
        for folder in sorted((cells / "written").glob("*"))
    }
    for kind in ("calibrations", "languages", "targets"):
        found[kind] = {
            folder.name: {name: rows_of(name, cell, text) for name, cell in _files(folder).items()}
            for folder in sorted((cells / kind).glob("*"))
        }
    found["perplexity"] = {
        folder.name: {name: _perplexities(name, cell) for name, cell in _files(folder).items()}
        for folder in sorted((cells / "perplexity").glob("*"))
    }
    found["answers"] = {
        folder.name: {suite.name: compared(_files(suite)) for suite in sorted(folder.glob("*"))}
        for folder in sorted((cells / "answers").glob("*"))
    }
    return found


def _perplexities(name: str, cell: dict[str, Any]) -> dict[str, Any]:
    """Return the perplexities of a cell whose main text is WikiText-2."""
    further = {Path(text).stem: figures for text, figures in cell["further_texts"].items()}
    main = cell | {"dense": cell["perplexity_dense"], "compressed": cell["perplexity"]}
    return {
        "bits_per_element": rows_of(name, cell, "")[0]["bits_per_element"],
        "windows": next(iter(further.values()))["windows"],
        "texts": {
            text: {key: figures[key] for key in ("dense", "compressed", "excess_nats", "excess_standard_error_nats")}
            for text, figures in {"WikiText-2": main, **further}.items()
        },
    }


def compared(answers: dict[str, Any]) -> dict[str, Any]:
    """Return mean scores by cache and task, and differences from the dense model on the same (first) items."""
    dense = answers["dense"]
    found: dict[str, Any] = {}
    for name, own in answers.items():
        tasks = found[name] = {}
        for task, scores in own["scores"].items():
            gaps = np.subtract(scores, dense["scores"][task][: len(scores)])
            pairs = list(zip(own["texts"].get(task, ()), dense["texts"].get(task, ()), strict=False))
            tasks[task] = {
                "items": len(scores),
                "score": float(np.mean(scores)),
                "difference": float(gaps.mean()),
                "error": float(standard_error(gaps)),
                "ran": own["ran"],
                "paired": dense["ran"],
                "length": own.get("length"),
                "same": sum(text == other for text, other in pairs) / len(pairs) if pairs else None,
            }
    return found


def _files(folder: Path) -> dict[str, Any]:
    """Return the cells of a folder, the dense model's first."""
    cells = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return dict(sorted(cells.items(), key=lambda each: each[0] != "dense"))


def _bits(name: str, cell: dict[str, Any], tokens: list[int], head_dim: int) -> float:
    """Return bits per cached element at :data:`CONTEXT` tokens, of which sliding-window layers cache only some."""
    if name in QUANTIZERS:
        rounding = quantizer(name, head_dim)
        rounded, rounding = rounding.layers(len(tokens)), replace(rounding, exact_layers=0)
        each = [rounding.bits_per_element(count) if layer in rounded else 16 for layer, count in enumerate(tokens)]
        return sum(bits * count for bits, count in zip(each, tokens, strict=True)) / sum(tokens)
    return bits_at_context(cell, tokens)


if __name__ == "__main__":
    typer.run(models_page)
