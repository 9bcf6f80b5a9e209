"""Stage 9c: every method side by side at equal bytes, from the same statistics and windows.

Cells that are done are kept in DATA/cells and not measured again, as long as neither the code nor
anything that they depend on has changed: an interrupted sweep goes on where it stopped.
"""

import copy
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import typer
from tqdm import tqdm

from recalkv.compression import CompressedLayers, assemble, factorize_layers, reestimate
from recalkv.evaluation.perplexity import cache_bytes_per_token, excess_loss, fill_cache, perplexity
from recalkv.method.bits import DENSE_BITS
from recalkv.method.methods import resolve_method
from recalkv.method.refit import install
from recalkv.method.svd import group_columns
from recalkv.model.loading import load_model
from recalkv.model.source import checkpoint_dtype
from recalkv.params import CompressionParams
from recalkv.reports.plots import perplexity_against_bytes
from stages.common import DataOption, ParamsOption, ReportsOption, Stage, running, write_json
from stages.finished import code_fingerprint
from stages.inputs import Statistics
from stages.texts import further_texts, main_text, measured_losses

# The baselines, the paper's ablation (its Table 3), and ours with one choice taken back at a time.
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("svd", {"method": "svd"}),
    ("palu", {"method": "palu"}),
    ("recalkv (neither)", {"method": "recalkv", "grouping": "neighbours", "refit": "none"}),
    ("recalkv (HSR)", {"method": "recalkv", "refit": "none"}),
    ("recalkv (OVC)", {"method": "recalkv", "grouping": "neighbours"}),
    ("recalkv (HSR + OVC)", {"method": "recalkv"}),
    ("loss-aware (separate latents)", {"method": "loss-aware", "joint": False}),
    ("loss-aware (no refit)", {"method": "loss-aware", "refit": "none"}),
    ("loss-aware", {"method": "loss-aware"}),
)

# What the pipeline's own checkpoint may have changed; here every method is as it is meant.
AS_MEANT: dict[str, Any] = {
    **dict.fromkeys(("metric", "joint", "centre", "grouping", "allocation", "refit", "refit_target"), "auto"),
    "bits": 16,
}


def main(
    params: ParamsOption = Path("params.yaml"),
    data: DataOption = Path("data"),
    reports: ReportsOption = Path("reports"),
) -> None:
    """Compress with each method at compare.ratios and measure perplexity; write REPORTS/comparison.json."""
    with running("compare", params, data) as stage:
        comparison, wanted = Comparison(stage), stage.params.compare
        cells = [
            (name, {**AS_MEANT, **fields, "ratio": ratio, "group_size": size})
            for ratio in wanted.ratios
            for size in wanted.group_sizes
            for name, fields in VARIANTS
        ]
        result = comparison.run(cells)
        write_json(reports / "comparison.json", result)
        perplexity_against_bytes(reports / "comparison.png", result)
        print(table(result))


class Comparison:
    """Statistics and evaluation windows that all cells share.

    Parameters
    ----------
    stage
        The running stage.
    windows
        Use the first so many windows of each text; None for all.
    """

    def __init__(self, stage: Stage, windows: int | None = None) -> None:
        self._stage = stage
        self._source = stage.source()
        # The dense model's: a cell with a schedule of its own takes its statistics again.
        self._statistics, baseline = Statistics(stage, reestimated=False), stage.read("baseline")
        self._calibration = stage.read("sample").get("windows")
        self._text = main_text(baseline).first(windows)
        self._further = {name: text.first(windows) for name, text in further_texts(baseline).items()}
        self.windows, self.dense_losses = self._text.windows, self._text.dense_losses
        self._dtype = checkpoint_dtype(stage.model().folder)
        params = stage.params
        self._shared = {
            "code": code_fingerprint(),
            "model": stage.model().fingerprint,
            "calibration": params.calibration.model_dump(mode="json"),
            "evaluation": params.evaluation.model_dump(mode="json", exclude={"batch_size"}),
            **({} if windows is None else {"windows": windows}),
            # Parameters name texts; their content may change under the same name.
            "content": _digest(
                self._calibration, self.windows, self.dense_losses, *(text.windows for text in self._further.values())
            ),
        }

    def run(self, cells: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        """Measure every (name, compression fields) cell that has not been measured; all rows, and the dense model's."""
        rows = []
        for name, fields in tqdm(list(cells), desc="compare", unit="cell", file=sys.stderr):
            row = self.kept(fields, functools.partial(self.measure, fields))
            parameters = self._stage.params.compression.model_copy(update=fields)
            rows.append({"method": name, "ratio": parameters.ratio, "group_size": parameters.group_size, **row})
        return {
            "perplexity_dense": perplexity(self.dense_losses),
            "windows": len(self.windows),
            "tokens_per_window": self.windows.shape[1],
            "rows": rows,
        }

    def kept(self, fields: dict[str, Any] | None, compute: Callable[[], dict[str, Any]], **what: Any) -> dict[str, Any]:
        """Return a finished cell, or compute and keep it.

        ``fields`` are those of the compression, None for the dense model; ``what`` is measured, where that
        is not the perplexity.
        """
        content = {**self._shared, **what}
        if fields is not None:
            content["compression"] = self._stage.params.compression.model_copy(update=fields).model_dump(mode="json")
        key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]
        path = self._stage.data / "cells" / f"{key}.json"
        if not path.exists():
            write_json(path, compute())
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    def window_counts(self) -> dict[str, int]:
        """Windows of each text, the main one first."""
        main = Path(self._stage.params.evaluation.text).name
        return {main: len(self.windows), **{name: len(text.windows) for name, text in self._further.items()}}

    def dense(self) -> Any:
        """Load the dense model."""
        folder = self._stage.model().folder
        return load_model(folder, self._stage.device, self._dtype, self._stage.params.runtime.device_map)

    def dense_figures(self) -> dict[str, Any]:
        """Figures of the dense model, in the form of the cells' in a grid."""
        geometry = self._source.geometry
        texts = {name: perplexity(text.dense_losses) for name, text in self._further.items()}
        main = Path(self._stage.params.evaluation.text).name
        return {
            "perplexity": {main: perplexity(self.dense_losses), **texts},
            "excess_nats": 0.0,
            "excess_standard_error_nats": 0.0,
            "bytes_per_token": 2 * geometry.layers * geometry.kv_width * DENSE_BITS / 8,
            "removed": 0.0,
        }

    def losses(self, model: Any) -> torch.Tensor:
        """Losses of a model on the shared windows."""
        return measured_losses(self._stage, model, self.windows)

    def compressed(self, fields: dict[str, Any]) -> tuple[Any, CompressedLayers]:
        """Compress with one set of fields; the model, and its layers."""
        parameters = self._stage.params.compression.model_copy(update=fields)
        result = self._compress(parameters)
        provenance: dict[str, str | None] = {"name": None, "revision": None, "fingerprint": None}
        return assemble(self._source, result, parameters, self._dtype, provenance).to(self._stage.device), result

    def _compress(self, parameters: CompressionParams) -> CompressedLayers:
        shared = (self._source, self._calibration, self._stage.params.calibration)
        statistics, scores = reestimate(*shared, self._statistics, self._statistics.scores, parameters)
        return factorize_layers(*shared, statistics, scores, parameters)

    def by_layer(self, fields: dict[str, Any]) -> list[dict[str, float]]:
        """Compress one layer at a time, the others dense: predicted and measured rise of the loss, nats per token.

        The dense model takes the layer's reconstructed weights; ranks are those of the whole model's budget.
        """
        parameters = self._stage.params.compression.model_copy(update=fields)
        result = self._compress(parameters)
        model, rows = self.dense(), []
        d_h = self._source.geometry.head_dim
        for index, layer in enumerate(tqdm(model.model.layers, desc="layers", unit="layer", file=sys.stderr)):
            dense, layer.self_attn = layer.self_attn, copy.deepcopy(layer.self_attn)
            order = torch.cat(group_columns([result.permutations[index]], d_h))
            install(layer, result.keys[index], result.values[index], result.outputs[index], order)
            losses = self.losses(model)
            layer.self_attn = dense
            rows.append(
                {
                    "layer": index,
                    "predicted_rise_nats": result.predicted_rises[index],
                    "excess_nats": float((losses - self.dense_losses).mean()),
                    "elements_per_token": result.ranks[index].cached_elements,
                }
            )
        return rows

    def measure(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Compress with one set of fields and measure it."""
        parameters = self._stage.params.compression.model_copy(update=fields)
        model, result = self.compressed(fields)
        losses = self.losses(model)
        spec = model.config.recalkv
        # Scales per channel are only there once a block is complete.
        cache = fill_cache(model, self.windows[:1, : max(16, spec["block"] or 0)])
        rise, error = excess_loss(losses, self.dense_losses)
        further = {
            name: text.against_dense(measured_losses(self._stage, model, text.windows))
            for name, text in self._further.items()
        }
        return {
            **({"further_texts": further} if further else {}),
            "perplexity": perplexity(losses),
            "excess_nats": rise,
            "excess_standard_error_nats": error,
            # Other metrics do not count in nats.
            "predicted_rise_nats": sum(result.predicted_rises) if resolve_method(parameters).metric == "loss" else None,
            "cache_bytes_per_token": cache_bytes_per_token(cache),
            "bytes_per_token_16bit": spec["cached_bits_per_token"] / 8,
            **({"window_bytes_16bit": 2 * spec["window_elements_per_sequence"]} if spec["block"] else {}),
            "dense_cache_bytes_per_token": spec["dense_elements_per_token"] * _element_size(model),
            "compression_ratio": 1 - spec["cached_bits_per_token"] / DENSE_BITS / spec["dense_elements_per_token"],
        }


def table(result: dict[str, Any]) -> str:
    """All cells as one table for a terminal."""
    width = max(len(row["method"]) for row in result["rows"]) + 2
    lines = [f"{'method':<{width}}{'group':>6}{'removed':>9}{'bytes/token':>13}{'perplexity':>12}{'excess (nats)':>15}"]
    lines.append(f"{'dense':<{width}}{'':>6}{0:>9.2%}{'':>13}{result['perplexity_dense']:>12.2f}{0:>15.3f}")
    for row in result["rows"]:
        lines.append(
            f"{row['method']:<{width}}{row['group_size']:>6}{row['compression_ratio']:>9.2%}"
            f"{row['cache_bytes_per_token']:>13,.0f}{row['perplexity']:>12.2f}{row['excess_nats']:>15.3f}"
        )
    return "\n".join(lines)


def _digest(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _element_size(model: Any) -> int:
    return torch.empty(0, dtype=next(model.parameters()).dtype).element_size()


if __name__ == "__main__":
    typer.run(main)
