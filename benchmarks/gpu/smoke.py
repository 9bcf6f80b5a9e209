"""Smoke test of a machine: packages, peak bandwidth and throughput, and the tests that need a GPU."""

import functools
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import torch

from benchmarks.gpu.runner import Emit, Setting, Step
from recalkv.evaluation.timing import time_calls

PACKAGES = ("numpy", "numba", "pydantic", "zarr", "typer", "pytest", "xdist", "matplotlib", "dvc", "lm_eval")
MODULES = ("recalkv", "recalkv.kernels.decoder", "recalkv.kernels.attention", "recalkv.runtime.triton_decode",
           "recalkv.compression", "tests.conftest")  # fmt: skip
COMPILED = ("mistral-7b joint s=2 70%",)
"""Configurations of ``tests.compiling``."""

KERNEL_TESTS, CODEC_TESTS = "tests/test_gpu_kernels.py", "tests/test_codec_triton.py"
SANITIZED = {
    "memcheck": (CODEC_TESTS, "CUDA and unequal and paged"),
    "racecheck": (CODEC_TESTS, "CUDA and blocks and contiguous"),
    "memcheck, latents": (KERNEL_TESTS, "test_attention and gqa and separate and bfloat16"),
}
"""Tools of compute-sanitizer, and the tests to run under them."""


def _environment(setting: Setting, emit: Emit) -> None:
    tools = {name: shutil.which(name) is not None for name in ("nvidia-smi", "compute-sanitizer", "ncu", "nvcc")}
    memory = torch.cuda.mem_get_info()[1] if setting.kind == "gpu" else None
    emit(what="environment", packages={name: importlib.util.find_spec(name) is not None for name in PACKAGES},
         tools=tools, cuda=torch.version.cuda, device_bytes=memory, processors=os.cpu_count(),
         system=platform.platform())  # fmt: skip


def _imports(setting: Setting, emit: Emit) -> None:
    """Import each module in a separate process, as one import may hide what another lacks; all in parallel."""
    commands = [[sys.executable, "-c", f"import {module}"] for module in MODULES]
    processes = [subprocess.Popen(each, stderr=subprocess.PIPE, text=True) for each in commands]
    for module, process in zip(MODULES, processes, strict=True):
        _, output = process.communicate()
        wrong = {"failed": [f"import {module}"], "tail": output[-1000:]} if process.returncode else {}
        emit(what="import", module=module, **wrong)


def _ceilings(setting: Setting, emit: Emit) -> None:
    size, side = (1 << 16, 64) if setting.tiny else (1 << 31, 8192)
    source = torch.empty(size, dtype=torch.uint8, device=setting.device).random_()
    target = torch.empty_like(source)
    time = functools.partial(time_calls, device=setting.device, repeats=10)
    emit(what="copy", gb_per_s=2 * size / time([lambda: target.copy_(source)]).median / 1e9, bytes=size)
    half = torch.randn(2, side, side, device=setting.device).to(torch.bfloat16)
    seconds = time([lambda: half[0] @ half[1]]).median
    emit(what="bfloat16 product", tflop_per_s=2 * side**3 / seconds / 1e12, side=side)


def _tests(setting: Setting, emit: Emit, *arguments: str, before: tuple[str, ...] = (), marked: bool = True) -> None:
    """Run tests and record their numbers by outcome, and the messages of failed tests."""
    # Every pytest worker compiles; a process pool in each would exceed the number of processors.
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if before:
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if setting.kind == "gpu":
        environment.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory(prefix="recalkv-tests-") as folder:
        report = Path(folder) / "report.xml"
        command = [*before, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}"]
        if setting.kind == "gpu" and marked:
            command += ["-m", "gpu"]
        if importlib.util.find_spec("pytest_timeout") is not None:
            # A test that hangs is named, and the others continue.
            command += ["--timeout=100", "--timeout-method=thread"]
        # Print test names as they finish, as the process's output is kept: a run that is stopped has no report.
        done = subprocess.run([*command, "-v", *arguments], env=environment, check=False)
        if not report.exists():
            raise RuntimeError(f"exit code {done.returncode}, no report")
        cases = list(ElementTree.parse(report).iter("testcase"))
    wrong = [(case, part) for case in cases for part in case if part.tag in ("failure", "error")]
    skipped = sum(part.tag == "skipped" for case in cases for part in case)
    failed = [f"{case.get('name')}: {(part.get('message') or '')[:300]}" for case, part in wrong]
    if not failed and (done.returncode or len(cases) == skipped):
        failed = [f"exit code {done.returncode}, {len(cases)} tests"]
    emit(what="tests", arguments=list(arguments), passed=len(cases) - skipped - len(wrong), skipped=skipped,
         failed=failed[:20])  # fmt: skip


def _sanitize(tool: str, tests: str, names: str, setting: Setting, emit: Emit) -> None:
    found = shutil.which("compute-sanitizer")
    if found is None:
        emit(what="sanitizer", reason="compute-sanitizer is not here")
        return
    options = ("--tool", tool, "--error-exitcode", "9", "--print-limit", "5")
    _tests(setting, emit, tests, "-k", names, before=(found, *options), marked=tests == KERNEL_TESTS)


def _compile_gate(setting: Setting, emit: Emit) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compiling", *COMPILED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wrong = {"failed": ["compile gate"], "tail": (done.stdout + done.stderr)[-2500:]} if done.returncode else {}
    emit(what="compile gate", configurations=COMPILED, lines=len(done.stdout.splitlines()), **wrong)


def steps(setting: Setting) -> list[Step]:
    """List the steps, the most important first."""

    def tests(name: str, *arguments: str, seconds: float = 120.0, marked: bool = True) -> Step:
        return Step(name, lambda setting, emit: _tests(setting, emit, *arguments, marked=marked), seconds)

    first = [Step("environment", _environment), Step("imports", _imports, 120.0)]
    interpreted = tests("interpreter", "tests/test_kernels.py", "-k", "geometries and gqa", seconds=240.0)
    if setting.kind == "none":
        return [*first, interpreted, Step("compile", _compile_gate, 240.0)]
    if setting.kind == "cpu":
        return [first[0], Step("ceilings", _ceilings)]
    spread = ("-n", "8") if importlib.util.find_spec("xdist") else ()
    sanitized = [
        Step(f"sanitizer, {name}", functools.partial(_sanitize, name.split(",")[0], *which), 90.0)
        for name, which in SANITIZED.items()
    ]
    return [
        *first,
        Step("ceilings", _ceilings),
        tests("kernels", KERNEL_TESTS, "-k", "attention", *spread),
        tests("codec, compiled", CODEC_TESTS, "-m", "not slow", *spread, marked=False),
        *sanitized[:2],
        tests("kernels, compiled", KERNEL_TESTS, "-k", "compiled", *spread, seconds=240.0),
        tests("compression", "tests/test_gpu_compression.py", *spread, seconds=150.0),
        tests("all kernel tests, compiled", "tests/test_kernels.py", *spread, seconds=180.0, marked=False),
        *sanitized[2:],
        tests("devices", "tests/test_refit.py", "tests/test_device_map.py", *spread),
    ]  # fmt: skip
