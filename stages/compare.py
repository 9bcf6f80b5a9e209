"""Stage 9c: every method side by side at one budget, from the same statistics and windows."""

import sys
from pathlib import Path
from typing import Any

import typer
from tqdm import tqdm

from recalkv.evaluate import perplexity, window_losses
from recalkv.fisher import FisherScores
from recalkv.oneshot import assemble, factorize_layers
from recalkv.source import checkpoint_dtype
from recalkv.whitening import InputMoments
from stages.common import DataOption, ParamsOption, ReportsOption, Stage, running, write_json

# The paper's ablation (its Table 3) and the two baselines.
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("svd", {"method": "svd"}),
    ("palu", {"method": "palu"}),
    ("recalkv (neither)", {"method": "recalkv", "hsr": False, "ovc": False}),
    ("recalkv (HSR)", {"method": "recalkv", "hsr": True, "ovc": False}),
    ("recalkv (OVC)", {"method": "recalkv", "hsr": False, "ovc": True}),
    ("recalkv (HSR + OVC)", {"method": "recalkv", "hsr": True, "ovc": True}),
)


def main(
    params: ParamsOption = Path("params.yaml"),
    data: DataOption = Path("data"),
    reports: ReportsOption = Path("reports"),
) -> None:
    """Compress with each method at compare.ratio and measure perplexity; write REPORTS/comparison.json."""
    with running("compare", params, data) as stage:
        comparison = _Comparison(stage)
        cells = [(size, name, fields) for size in stage.params.compare.group_sizes for name, fields in VARIANTS]
        rows = []
        for size, name, fields in tqdm(cells, desc="compare", unit="method", file=sys.stderr):
            rows.append({"method": name, "group_size": size, **comparison.measure(size, fields)})
        write_json(
            reports / "comparison.json",
            {
                "ratio": stage.params.compare.ratio,
                "perplexity_dense": perplexity(comparison.dense_losses),
                "windows": len(comparison.windows),
                "tokens_per_window": comparison.windows.shape[1],
                "rows": rows,
            },
        )
        print(_table(rows, perplexity(comparison.dense_losses), stage.params.compare.ratio))


class _Comparison:
    """Statistics shared by all variants."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._source = stage.source()
        fisher, whiten, baseline = stage.read("fisher"), stage.read("whiten"), stage.read("baseline")
        self._scores = FisherScores(fisher.get("key"), fisher.get("value"), fisher.get("window_loss"))
        self._whiten = whiten
        self._tokens = whiten.attributes["parameters"]["tokens"]
        self._calibration = stage.read("sample").get("windows")
        self.windows, self.dense_losses = baseline.get("windows"), baseline.get("losses")
        self._dtype = checkpoint_dtype(stage.model().folder)

    def measure(self, group_size: int, fields: dict[str, Any]) -> dict[str, float]:
        """Compress with one variant and measure it."""
        ratio = self._stage.params.compare.ratio
        base = self._stage.params.compression
        parameters = base.model_copy(update={**fields, "ratio": ratio, "group_size": group_size})
        result = factorize_layers(
            self._source,
            self._calibration,
            self._stage.params.calibration.batch_size,
            self._moments,
            self._scores,
            parameters,
        )
        provenance: dict[str, str | None] = {"name": None, "revision": None, "fingerprint": None}
        model = assemble(self._source, result, parameters, self._dtype, provenance).to(self._stage.device)
        losses = window_losses(model, self.windows)
        spec = model.config.recalkv
        return {
            "perplexity": perplexity(losses),
            "excess_nats": float((losses - self.dense_losses).mean()),
            "compression_ratio": 1 - spec["cached_elements_per_token"] / spec["dense_elements_per_token"],
        }

    def _moments(self, index: int) -> InputMoments:
        prefix = f"layers/{index:03d}"
        return InputMoments(self._whiten.get(f"{prefix}/gram"), self._whiten.get(f"{prefix}/mean"), self._tokens)


def _table(rows: list[dict[str, Any]], dense: float, ratio: float) -> str:
    lines = [f"{'method':<22}{'group':>6}{'ratio':>9}{'perplexity':>12}{'excess (nats)':>15}"]
    lines.append(f"{'dense':<22}{'':>6}{0.0:>9.4f}{dense:>12.2f}{0.0:>15.3f}")
    for row in rows:
        lines.append(
            f"{row['method']:<22}{row['group_size']:>6}{row['compression_ratio']:>9.4f}"
            f"{row['perplexity']:>12.2f}{row['excess_nats']:>15.3f}"
        )
    return f"all methods at {ratio:.0%} compression\n" + "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
