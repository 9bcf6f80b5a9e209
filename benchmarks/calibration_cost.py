"""CPU seconds and peak memory of whitening, Fisher scores and decomposition, from a finished pipeline.

The public releases' own code takes about 850 s of one core and 4.2 GB on SmolLM2-135M for the same
steps at 32 x 1024 calibration tokens, patched to run on a CPU in float32.
"""

import json
from pathlib import Path

import typer

from recalkv.store import open_store

STEPS = ("whiten", "fisher", "reorder", "allocate", "factorize", "calibrate")
RELEASE_CPU_SECONDS, RELEASE_PEAK_MIB = 850.0, 4.2e9 / 2**20


def main(data: Path = Path("data")) -> None:
    """Print the cost of each step; calibrate is the decomposition of values with OVC's forward pass."""
    samples, length = open_store(data / "sample.zarr", "sample").get("windows").shape
    print(f"{samples} x {length} calibration tokens")
    print(f"{'step':<12}{'wall s':>9}{'CPU s':>9}{'peak MiB':>10}")
    costs = {step: json.loads((data / "timings" / f"{step}.json").read_text()) for step in STEPS}
    for step, cost in costs.items():
        print(f"{step:<12}{cost['wall_seconds']:>9.1f}{cost['cpu_seconds']:>9.1f}{cost['peak_resident_mib']:>10.0f}")
    without_ovc = sum(cost["cpu_seconds"] for step, cost in costs.items() if step != "calibrate")
    total = sum(cost["cpu_seconds"] for cost in costs.values())
    peak = max(cost["peak_resident_mib"] for cost in costs.values())
    print(
        f"statistics and key factors: {without_ovc:.0f} CPU s, {without_ovc / RELEASE_CPU_SECONDS:.2f} of the releases'"
    )
    print(f"with value calibration:     {total:.0f} CPU s, {total / RELEASE_CPU_SECONDS:.2f} of the releases'")
    print(f"peak: {peak:.0f} MiB, {peak / RELEASE_PEAK_MIB:.2f} of the releases'")


if __name__ == "__main__":
    typer.run(main)
