"""Command line of :mod:`benchmarks.gpu`."""

import argparse
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import benchmarks.gpu
from benchmarks.gpu.packages import unpack_missing

BUDGETS = {"codec": 240.0, "smoke": 420.0, "kernels": 520.0, "models": 480.0}
"""Time budget of each part in seconds, below the ten minutes that some machines allow per command."""

NEEDED = ("pydantic", "zarr", "pytest")
"""Packages that an image with torch, triton and transformers may lack."""


def main() -> int:
    """Run parts, or write the page; return 1 if a step failed."""
    if sys.argv[1:2] == ["child"]:
        from benchmarks.gpu.runner import child

        module, path, first, end, *rest = sys.argv[2:]
        child(module, Path(path), int(first), float(end), rest == ["--cpu"])
        return 0
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=benchmarks.gpu.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join([*BUDGETS, 'page'])}; the first four by default")
    parser.add_argument("--out", type=Path, default=Path("reports/gpu"))
    parser.add_argument("--budget", type=float, help="seconds of a part; by default 4, 7, 8.7 and 8 minutes")
    parser.add_argument("--wheels", type=Path, default=Path("wheels"), help="folder of wheels that may be missing here")
    parser.add_argument("--steps", help="regular expression: only steps whose names it finds")
    parser.add_argument("--cpu", action="store_true", help="run on a CPU, at tiny sizes")
    options = parser.parse_args()
    parts = options.parts or list(BUDGETS)
    if parts != ["page"] and (unknown := set(parts) - set(BUDGETS)):
        parser.error(f"{', '.join(sorted(unknown))}: the parts are {', '.join(BUDGETS)}, and page by itself")
    if parts == ["page"]:
        from benchmarks.gpu.page import write_page

        write_page(options.out)
        return 0
    from benchmarks.gpu.runner import STEPS, Setting, run

    setting, failed = Setting.of(options.cpu), 0
    if options.steps is not None:
        os.environ[STEPS] = options.steps
    if setting.kind == "none":
        print("no CUDA device here: imports, Triton's interpreter and the compile gate are all that is checked")
    out = options.out if setting.kind == "gpu" else options.out / "cpu"
    with tempfile.TemporaryDirectory(prefix="recalkv-packages-") as folder:
        print("unpacked:", ", ".join(unpack_missing(options.wheels, Path(folder))) or "nothing", flush=True)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
        sys.path.append(folder)
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if setting.kind == "gpu" and missing:
            parser.error(
                f"{', '.join(missing)}: neither installed nor in {options.wheels}/; run make gpu-wheels where there is "
                f"a package index, and let the folder travel with the tree (git ignores it)"
            )
        for part in parts:
            budget = BUDGETS[part] if options.budget is None else options.budget
            failed += run(f"benchmarks.gpu.{part}", out / f"{part}.jsonl", budget, options.cpu)
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())
