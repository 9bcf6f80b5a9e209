"""Check that loss targets are met on text that neither calibration nor the search has seen.

    python -m benchmarks.loss_targets

Compresses the embedded model to each target on each text, and measures the increase of the loss on the text's test
documents, with its standard error over documents. Writes reports/loss_targets.json.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import AutoTokenizer

import recalkv
from recalkv.evaluation.perplexity import over_documents, window_losses
from recalkv.evaluation.timing import environment
from recalkv.model.loading import load_model
from recalkv.model.source import EMBEDDED, resolve_model
from recalkv.model.spec import LatentSpec
from recalkv.params import EvaluationParams
from recalkv.text.corpora import main_windows
from stages.common import write_json

TEXTS, TARGETS = ("embedded", "embedded-code"), (0.005, 0.02, 0.1)
WINDOW, CPU = 512, torch.device("cpu")


def main(samples: int = 8, length: int = 512, test_windows: int = 20) -> None:
    """Measure with SAMPLES calibration windows of LENGTH tokens, on TEST_WINDOWS windows."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        dense = resolve_model(EMBEDDED, None, Path(scratch))
        tokenizer = AutoTokenizer.from_pretrained(dense.folder)
        for text in TEXTS:
            wanted = EvaluationParams(text=text, window=WINDOW, max_windows=test_windows)
            windows = main_windows(tokenizer, wanted)
            reference = window_losses(load_model(dense.folder, CPU, torch.float32), windows.tokens)
            for target in TARGETS:
                out, start, spent = Path(scratch) / f"{text}-{target}", time.monotonic(), time.process_time()
                goal = f"max_excess={target}"
                with torch.inference_mode(False):
                    recalkv.compress(EMBEDDED, dataset=text, target=goal, samples=samples, length=length, out=out)
                seconds, cpu = time.monotonic() - start, time.process_time() - spent
                model = load_model(out, CPU, torch.float32)
                excess, error = over_documents(window_losses(model, windows.tokens) - reference, windows.documents)
                spec = LatentSpec.from_config(model.config)
                rows.append(
                    {
                        "text": text,
                        "target": target,
                        "excess_nats": excess,
                        "standard_error_nats": error,
                        "bytes_per_token": spec.cached_bits_per_token / 8,
                        "dense_bytes_per_token": 2 * spec.dense_elements_per_token,
                        "seconds": seconds,
                        "cpu_seconds": cpu,
                    }
                )
                print(
                    f"{text:14s} target {target:.3f}: {excess:.4f} +- {error:.4f} nats, "
                    f"{rows[-1]['bytes_per_token']:,.0f} bytes of {rows[-1]['dense_bytes_per_token']:,}, "
                    f"{seconds:.0f} s ({cpu:.0f} s of CPU)",
                    flush=True,
                )
    settings = {"samples": samples, "length": length, "window": WINDOW, "test_windows": test_windows}
    write_json(Path("reports/loss_targets.json"), {"rows": rows, "settings": settings, "environment": environment(CPU)})


if __name__ == "__main__":
    typer.run(main)
