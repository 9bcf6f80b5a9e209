"""CPU seconds and peak memory of whitening, Fisher scores and decomposition at 32 x 1024 tokens.

The public releases' own code takes about 850 s of one core and 4.2 GB on SmolLM2-135M for the same
steps and calibration, patched to run on a CPU in float32. The stages run here one after the other in a
temporary folder; the time of starting Python and importing libraries is left out, as it is there.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import typer
import yaml

STEPS = ("model", "sample", "whiten", "fisher", "reorder", "allocate", "factorize", "calibrate")
COUNTED = STEPS[2:]
RELEASE_CPU_SECONDS, RELEASE_PEAK_MIB = 850.0, 4.2e9 / 2**20


def main(params: Path = Path("params.yaml"), samples: int = 32, length: int = 1024) -> None:
    """Run the statistics and the factors, and print the cost of each step."""
    parameters = yaml.safe_load(params.read_text())
    parameters["calibration"] |= {"samples": samples, "length": length}
    with tempfile.TemporaryDirectory(prefix="recalkv-") as scratch:
        changed, data = Path(scratch) / "params.yaml", Path(scratch) / "data"
        changed.write_text(yaml.safe_dump(parameters))
        for step in STEPS:
            options = ["--params", str(changed), "--data", str(data), "--reports", scratch]
            command = [sys.executable, "-m", f"stages.{step}", *options]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        timings = json.loads((Path(scratch) / "timings.json").read_text())
    costs = {step: timings[step] for step in COUNTED}
    print(f"{samples} x {length} calibration tokens, {os.cpu_count()} cores")
    print(f"{'step':<12}{'wall s':>9}{'CPU s':>9}{'peak MiB':>10}")
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
