"""Compile the shipped configurations for GPUs that need not be present, and check the compiled kernels.

``python -m tests.compiling`` prints one line per kernel, geometry and architecture: shared memory, registers, bytes
spilled, resident programs per SM, tensor-core instructions (wgmma of warp groups and mma.sync of warps, counted
separately) and asynchronous copies. The exit status is 1 if a kernel would not launch, spills heavily, multiplies
matrices without tensor cores, or reads latents in small pieces although their ranks are multiples of eight. Names of
configurations may follow; all of them take minutes. Run it in a separate process only: Triton cannot interpret
kernels any more once this module was imported first.
"""

import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Triton reads this variable on import; here kernels are compiled, whatever the tests do.
os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from recalkv.kernels import plan
from recalkv.kernels.contexts import combine_kernel, values_kernel
from recalkv.kernels.launch import resident_programs
from recalkv.kernels.scores import scores_kernel

SHARED_LIMITS = {80: 166_912, 90: 232_448}
"""Bytes of shared memory available to one program, by architecture (163 KB on A100, 227 KB on H100 and H200)."""

SPILL_LIMIT = 256
"""Largest number of spilled bytes per thread."""


@dataclass(frozen=True)
class Configuration:
    """Geometry of one layer: what determines the constants of the kernels."""

    name: str
    head_dim: int
    query_heads_per_kv: int
    key_rank: int
    value_rank: int
    value_heads: int
    queries: int = 1
    dtype: str = "bf16"
    norm: bool = False
    bias: bool = False
    fused: bool = False

    @property
    def rows(self) -> int:
        """Number of rows: query heads per KV head x queries."""
        return self.query_heads_per_kv * self.queries


Launch = tuple[str, Any, dict[str, str], dict[str, Any], int, int]
"""Name, kernel, argument types, constants, warps and stages."""

CONFIGURATIONS = (
    # Joint latents of keys and values in groups of one or two heads, 50 % and 70 %; the same for grouped queries.
    Configuration("llama-2-7b joint s=2 50%", 128, 1, 256, 256, 2),
    Configuration("llama-2-7b joint s=2 70%", 128, 1, 160, 160, 2),
    Configuration("llama-2-7b joint s=1 50%", 128, 1, 128, 128, 1, dtype="fp16"),
    Configuration("mistral-7b joint s=2 50%", 128, 4, 256, 256, 2),
    Configuration("mistral-7b joint s=2 70%", 128, 4, 160, 160, 2),
    Configuration("mistral-7b joint s=2 70%, 8 queries", 128, 4, 160, 160, 2, queries=8),
    # The paper's layout: keys in groups of four heads, one latent for all values.
    Configuration("llama-2-7b s=4 50%", 128, 1, 256, 2048, 32),
    Configuration("llama-2-7b s=4 70%", 128, 1, 160, 1232, 32),
    Configuration("llama-2-7b joint s=4 50% (streamed)", 128, 1, 512, 512, 4),
    Configuration("llama-3.1-8b s=4 70%", 128, 4, 160, 304, 8),
    Configuration("qwen3 joint s=2 50%", 128, 2, 256, 256, 2, norm=True),
    Configuration("qwen2 joint s=2 50%", 64, 7, 128, 128, 2, bias=True),
    Configuration("smollm2-135m joint s=2 50%", 64, 3, 128, 128, 2),
    Configuration("head dimension 256", 256, 2, 256, 256, 1),
    Configuration("any rank", 128, 1, 154, 307, 8, fused=True),
)


@dataclass(frozen=True)
class Compiled:
    """One kernel of one configuration on one architecture.

    Attributes
    ----------
    shared
        Bytes of shared memory per program.
    registers, spilled
        Registers and bytes of stack per thread.
    wide, narrow
        Tensor-core instructions of a warp group (wgmma) and of a warp (mma.sync).
    async_copies
        Asynchronous copy instructions (cp.async) of 4 to 16 bytes each.
    """

    kernel: str
    configuration: Configuration
    architecture: int
    shared: int
    registers: int
    spilled: int
    wide: int
    narrow: int
    async_copies: int
    warps: int

    @property
    def resident(self) -> int:
        """Number of programs that fit on an SM at once."""
        return resident_programs(self.registers, self.shared, self.warps, SHARED_LIMITS[self.architecture] + 1024)


def compile_all(configurations: Sequence[Configuration]) -> Iterator[Compiled]:
    """Compile every kernel of every configuration; kernels with equal constants are compiled once."""
    done: dict[Any, tuple[int, int, int, int, int, int]] = {}
    for each in configurations:
        for architecture in SHARED_LIMITS:
            launches = _scores(each, architecture), _values(each, architecture), _combine(each)
            for name, kernel, types, constants, warps, stages in launches:
                key = (name, architecture, warps, stages, tuple(types.items()), tuple(constants.items()))
                if key not in done:
                    done[key] = compiled_for(kernel, types, constants, architecture, warps, stages)
                yield Compiled(name, each, architecture, *done[key], warps)


def faults(compiled: Compiled) -> list[str]:
    """Return the problems of a compiled kernel."""
    found, limit = [], SHARED_LIMITS[compiled.architecture]
    if compiled.shared > limit:
        found.append(f"{compiled.shared} bytes of shared memory, limit {limit}")
    if compiled.spilled > SPILL_LIMIT:
        found.append(f"{compiled.spilled} bytes spilled, limit {SPILL_LIMIT}")
    if compiled.kernel != "combine" and not compiled.wide + compiled.narrow:
        found.append("no tensor-core instruction")
    aligned = compiled.configuration.key_rank % 8 == compiled.configuration.value_rank % 8 == 0
    if compiled.kernel != "combine" and aligned and not compiled.async_copies:
        found.append("latents are read in small pieces")
    return found


def _scores(c: Configuration, architecture: int) -> Launch:
    rows, half = c.rows, c.head_dim // 2
    launch = plan.scores_launch(c.key_rank, c.head_dim, rows, 2, SHARED_LIMITS[architecture])
    types = {
        "query_ptr": f"*{c.dtype}", "latent_ptr": f"*{c.dtype}", "up_ptr": f"*{c.dtype}",
        "bias_ptr": f"*{c.dtype}" if c.bias else "*i64", "norm_ptr": f"*{c.dtype}" if c.norm else "*i64",
        "anchor_ptr": "*fp32", "offset_ptr": "*fp32", "mask_ptr": "*i64", "seen_ptr": "*i64", "logits_ptr": "*fp32",
        "heads_ptr": "*i32", "latent_batch_stride": "i64", "latent_slot_stride": "i32", "mask_batch_stride": "i32",
        "mask_query_stride": "i32", "logits_stride": "i32", "behind": "i32", "scaling": "fp32", "eps": "fp32",
    }  # fmt: skip
    constants = {
        "ROWS": rows, "BLOCK_M": plan.row_block(rows), "QUERIES": c.queries,
        "HALF": half, "BLOCK_H": max(16, triton.next_power_of_2(half)), "RANK_A": launch.rank_first,
        "RANK_B": launch.rank_second, "RESIDENT": launch.resident, "BLOCK_N": launch.tile,
        "ALIGN": math.gcd(16, c.key_rank), "UP_ALIGN": math.gcd(16, c.head_dim), "HAS_BIAS": c.bias,
        "HAS_NORM": c.norm, "MASK": 0 if c.queries == 1 else 1, "UPCAST": False,
    }  # fmt: skip
    return "scores", scores_kernel, types, constants, launch.warps, plan.STAGES


def _values(c: Configuration, architecture: int) -> Launch:
    _, block_rows, block_columns = plan.value_blocks([c.value_rank], [c.value_heads], c.rows)
    types = {
        "logits_ptr": "*fp32", "latent_ptr": f"*{c.dtype}", "partial_ptr": "*fp32", "most_ptr": "*fp32",
        "sum_ptr": "*fp32", "seen_ptr": "*i64", "blocks_ptr": "*i32", "latent_batch_stride": "i64",
        "latent_slot_stride": "i32", "logits_stride": "i32", "all_rows": "i32", "total": "i32", "behind": "i32",
    }  # fmt: skip
    constants = {
        "BLOCK_M": block_rows, "BLOCK_C": block_columns, "BLOCK_N": plan.TILE,
        "ALIGN": math.gcd(16, c.value_rank), "UPCAST": False, "WIDE": architecture >= 90,
    }  # fmt: skip
    return "values", values_kernel, types, constants, plan.VALUE_WARPS, plan.STAGES


def _combine(c: Configuration) -> Launch:
    rows = c.rows
    types = {
        "partial_ptr": "*fp32", "most_ptr": "*fp32", "sum_ptr": "*fp32", "heads_ptr": "*i32", "up_ptr": f"*{c.dtype}",
        "output_ptr": f"*{c.dtype}", "all_rows": "i32", "total": "i32", "inner": "i32", "runs": "i32",
    }  # fmt: skip
    block, runs = plan.combine_blocks(rows)
    constants = {
        "ROWS": rows, "BLOCK_M": block, "QUERIES": c.queries, "HEAD_DIM": c.head_dim,
        "BLOCK_C": plan.COMBINE_COLUMNS, "BLOCK_D": plan.output_block(c.head_dim), "BLOCK_R": runs,
        "ALIGN": math.gcd(16, c.value_rank), "HAS_UP": not c.fused, "UPCAST": False,
    }  # fmt: skip
    return "combine", combine_kernel, types, constants, 4, plan.STAGES


def compiled_for(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], architecture: int, warps: int, stages: int
) -> tuple[int, int, int, int, int, int]:
    signature = types | dict.fromkeys(constants, "constexpr")
    # Allocations and these strides are aligned, and a launch tells the compiler so.
    known = [name for name, type in types.items() if type.startswith("*")]
    known += ["logits_stride"] + (["latent_slot_stride"] if constants.get("ALIGN", 1) % 16 == 0 else [])
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in known}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()}, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    registers, spilled = _resources(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    # "wgmma.mma_async" and "mma.sync" do not contain each other.
    wide, narrow, copies = (ptx.count(name) for name in ("wgmma.mma_async", "mma.sync", "cp.async.c"))
    return compiled.metadata.shared, registers, spilled, wide, narrow, copies


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and stack bytes per thread, from the compiled binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = str(tool) if tool.exists() else shutil.which("cuobjdump")
    if found is None:
        raise FileNotFoundError("cuobjdump is neither in the triton package nor on the path")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([found, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert match, text
    return int(match[1]), int(match[2])


def main(names: Sequence[str] = ()) -> int:
    """Print the table of the named configurations, or of all, and return the exit status."""
    known = {configuration.name: configuration for configuration in CONFIGURATIONS}
    unknown = sorted(set(names) - known.keys())
    if unknown:
        print(f"{', '.join(unknown)}: none of {', '.join(known)}", file=sys.stderr)
        return 2
    wrong, line = 0, "{:<42}{:<9}{:>4}{:>9}{:>11}{:>9}{:>10}{:>7}{:>5}{:>8}  {}"
    titles = "kernel", "sm", "shared", "registers", "spilled", "programs", "wgmma", "mma", "copies"
    print(line.format("configuration", *titles, ""))
    for one in compile_all([known[name] for name in names or known]):
        problems, size = faults(one), f"{one.shared:,}"
        wrong += bool(problems)
        resources = size, one.registers, one.spilled, one.resident, one.wide, one.narrow, one.async_copies
        found = line.format(one.configuration.name, one.kernel, one.architecture, *resources, "; ".join(problems))
        print(found.rstrip(), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
