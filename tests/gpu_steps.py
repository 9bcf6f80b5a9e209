"""Steps with every possible ending, for tests/test_gpu_runs.py."""

import os
import signal
import time

from benchmarks.gpu.runner import Emit, Setting, Step


def _good(setting: Setting, emit: Emit) -> None:
    emit(what="number", value=1.5)


def _fault(setting: Setting, emit: Emit) -> None:
    emit(what="number", value=2.5)
    print("about to fault", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def _raise(setting: Setting, emit: Emit) -> None:
    raise RuntimeError("the kernel said no")


def _hang(setting: Setting, emit: Emit) -> None:
    time.sleep(600)


def steps(setting: Setting) -> list[Step]:
    return [
        Step("good", _good), Step("fault", _fault), Step("raise", _raise), Step("hang", _hang, 1.0),
        Step("long", _good, 4000.0), Step("good again", _good),
    ]  # fmt: skip
