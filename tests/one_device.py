"""Run the whole method on the device of :mod:`tests.tagged`, in a separate process (tests/test_one_device.py).

``python -m tests.one_device library`` compresses and decodes in memory; ``stages`` runs the pipeline in the current
folder with its parameters. Both run every method and kind of bits, and exit with status 1 if any of them fails.
"""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from recalkv.compression import assemble, compress_layers
from recalkv.model.layers import ModuleSource
from tests import tiny
from tests.pipeline import COMPRESSION, STATISTICS, invoke, invoke_in_pipeline
from tests.tagged import DEVICE, MixedDevicesError, on_host, tagging

SETTINGS: list[dict[str, Any]] = [
    {"method": "loss-aware", "bits": "mixed"}, {"method": "loss-aware", "bits": 4, "joint": False},
    {"method": "recalkv", "bits": 16}, {"method": "palu", "bits": 3, "refit": "output"}, {"method": "svd", "bits": 16},
]  # fmt: skip
"""Settings with every method, refit and kind of bits, for joint and separate latents."""


def library(setting: dict[str, Any]) -> None:
    """Compress and decode on the device, and check that the same model gives the same tokens on the host."""
    dense = tiny.dense_model("qwen2-bias", num_hidden_layers=2)
    ids, parameters = tiny.windows(), tiny.plain(**({"ratio": 0.6} | setting))
    source, provenance = ModuleSource(dense, DEVICE), dict.fromkeys(("name", "revision", "fingerprint"))
    result = compress_layers(source, ids, tiny.calibration(), parameters)
    model = assemble(source, result, parameters, torch.float32, provenance)
    assert all(parameter.device == DEVICE for parameter in model.parameters())
    there = model.generate(ids[:2, :12].to(DEVICE), max_new_tokens=6, do_sample=False)
    here = model.to("cpu").generate(ids[:2, :12], max_new_tokens=6, do_sample=False)
    assert torch.equal(there.cpu(), here)


def stages(setting: dict[str, Any]) -> None:
    """Run the stages from the head groups on, with another bit width or method than the statistics were taken for."""
    changes = [f"compression.{name}={value}" for name, value in setting.items()]
    on_host.clear()
    for stage in (*COMPRESSION, "evaluate"):
        assert invoke(stage, changes=changes) == 0, stage
    assert not on_host, on_host


def refused() -> None:
    """Check that operands on two devices raise, and that copies, numbers and indices on the host do not."""
    device, host = torch.ones(3, 3, device=DEVICE), torch.ones(3, 3)
    for mixed in (
        lambda: device @ host,
        lambda: device.add_(host),
        lambda: torch.cat([host, device]),
        lambda: host[torch.zeros(2, dtype=torch.int64, device=DEVICE)],
        lambda: torch.where(host > 0, device, 0.0),
    ):
        try:
            mixed()
        except MixedDevicesError:
            continue
        raise AssertionError("operands of two devices were taken")
    host[:] = device
    assert (device * torch.tensor(2.0) + 1)[torch.tensor([0, 2])].cpu().tolist() == [[3.0] * 3] * 2


def main(what: str) -> int:
    """Run every setting, print the failures, and return the exit status."""
    attempts: dict[str, Callable[[], Any]] = {}
    if what == "stages":
        attempts |= {stage: lambda stage=stage: _succeeds(stage) for stage in (*STATISTICS, "baseline")}
    else:
        attempts["refused"] = refused
    try_setting = {"library": library, "stages": stages}[what]
    attempts |= {str(setting): lambda setting=setting: try_setting(setting) for setting in SETTINGS}
    if what == "stages":
        attempts |= {stage: lambda stage=stage: _succeeds(stage) for stage in ("cell", "quantizer")}
    failed = 0
    # Threads of the weight loader would not see the device.
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    with tagging():
        for name, attempt in attempts.items():
            try:
                attempt()
            except Exception:
                failed += 1
                print(name, traceback.format_exc(), sep="\n", file=sys.stderr)
    return 1 if failed else 0


def _succeeds(stage: str) -> None:
    assert invoke_in_pipeline(stage) == 0, stage


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
