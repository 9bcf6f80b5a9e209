"""The codec's kernels compile for GPUs that are not present, with tensor cores and next to no spills.

``python tests/test_codec_compile.py`` prints a line per geometry and architecture: shared memory, registers, bytes
spilled, and tensor-core instructions of warp groups and of warps.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

SPILLED = 16
"""Maximum bytes of stack per thread: four registers."""

GEOMETRIES: dict[str, tuple[int, int]] = {
    # Queries of a group, and width of a code.
    "smollm2-135m, 3 heads": (9, 192),
    "qwen2.5-coder-0.5b, 2 heads": (14, 128),
    "llama-3.1-8b, 2 heads": (8, 256),
    "llama-2-7b, 1 head": (1, 128),
    "gemma-3, head dimension 256": (4, 256),
    "mqa": (71, 64),
}
WAYS = {"": (False, False), "paged, soft-capped": (True, True)}
SOME = ["qwen2.5-coder-0.5b, 2 heads"]
"""One geometry with all features, compiled for the newest architecture; ``-m slow`` compiles all geometries."""


def main(some: Sequence[str] = ()) -> int:
    """Compile the given geometries, or all; return 1 if one spills, lacks tensor cores or would not launch."""
    from recalkv.runtime.triton_decode import STAGES, attend_kernel, combine_kernel, constants
    from recalkv.trellis.triton_pack import pack_kernel
    from tests.compiling import SHARED_LIMITS, compiled_for

    names = ("rows", "pages", "table", "places", "query", "mean", "anchors", "within", "first", "length", "offset",
             "partial", "most", "sum")  # fmt: skip
    types: dict[str, str] = {f"{name}_ptr": "*fp32" for name in names} | {"rows_ptr": "*u8", "query_ptr": "*fp16"}
    types |= {f"{name}_ptr": "*i32" for name in ("pages", "table", "places", "first", "length", "offset")}
    types |= {"block_stride": "i64", "tile_stride": "i64", "softcap": "fp32"}
    for name in ("pages_stride", "columns", "key_width", "value_width", "queries", "pairs", "capacity", "per_block"):
        types[name] = "i32"
    types = {name: types[name] for name in attend_kernel.arg_names if name in types}
    launches: list[tuple[str, Any, dict[str, str], dict[str, Any]]] = [
        (f"{name} {way}", attend_kernel, types, constants(*GEOMETRIES[name], *ways))
        for name in some or GEOMETRIES
        for way, ways in list(WAYS.items())[1 if some else 0 :]
    ]
    types = {f"{name}_ptr": "*fp32" for name in ("partial", "most", "sum", "out", "lse")}
    types |= {"value_width": "i32", "runs": "i32"}
    own = {"BLOCK_R": 128, "COLUMNS": 32, "num_warps": 4, "num_stages": STAGES}
    launches.append(("combine, 128 runs", combine_kernel, types, own))
    types = {f"{name}_ptr": "*fp32" for name in ("coefficients", "levels")} | {"rows_ptr": "*u8"}
    types |= {f"{name}_ptr": "*i32" for name in ("segments", "trail", "codes")}
    types |= dict.fromkeys(("tokens", "width", "octets_of_row"), "i32")
    types = {name: types[name] for name in pack_kernel.arg_names if name in types}
    own = {
        "FITTED": 3, "FIRST": -3, "FIRST_FITTED": -6, "STEPS": 8, "ZERO": 128, "TRIALS": 8, "TOKENS": 4, "OCTETS": 32,
        "num_warps": 1, "num_stages": STAGES,
    }  # fmt: skip
    launches.append(("packing", pack_kernel, types, own))
    wrong = 0
    for name, kernel, types, own in launches:
        warps, stages = own.pop("num_warps"), own.pop("num_stages")
        for architecture, limit in ({90: SHARED_LIMITS[90]} if some else SHARED_LIMITS).items():
            compiled = compiled_for(kernel, types, own, architecture, warps, stages)
            shared, registers, spilled, wide, narrow, _ = compiled
            faults = [f"{shared} bytes of shared memory, limit {limit}"] * (shared > limit)
            faults += [f"{spilled} bytes spilled"] * (spilled > SPILLED)
            faults += ["no tensor cores"] * (kernel is attend_kernel and not wide + narrow)
            wrong += len(faults)
            found = f"{shared:>9,}{registers:>5}{spilled:>6}{wide:>5}{narrow:>5}"
            print(f"{name:<48}{architecture:>4}{found}", "; ".join(faults), flush=True)
    return int(wrong > 0)


@pytest.mark.parametrize("names", [SOME, pytest.param([], marks=pytest.mark.slow)], ids=["some", "all"])
def test_kernels_compile_within_limits(fresh_python: Path, names: list[str]) -> None:
    """All kernels compile within limits, in a separate process: kernels that are interpreted cannot be compiled."""
    from tests.conftest import process

    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = process(fresh_python, __file__, *names, env=environment)
    compiled = len(names) + 2 if names else 2 * (len(GEOMETRIES) * len(WAYS) + 2)
    assert len(done.stdout.splitlines()) == compiled


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
