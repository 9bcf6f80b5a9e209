"""The wheel: its contents, and that its base requirements alone suffice to load and compress models."""

import email
import os
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import recalkv
from tests import tiny
from tests.conftest import ROOT, copy_parts, process

# One xdist worker builds the wheel and its environment.
pytestmark = pytest.mark.xdist_group("packaging")
PARTS = ("recalkv", "recalkv_command.py", "stages", "tests", "benchmarks", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that nothing is left in the project."""
    folder = tmp_path_factory.mktemp("wheel")
    copy_parts(PARTS, folder, "__pycache__")
    process(sys.executable, "-c", "from setuptools.build_meta import build_wheel; build_wheel('dist')", cwd=folder)
    (path,) = (folder / "dist").glob("*.whl")
    return path


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_wheel_holds_the_library_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    own = {"recalkv", "recalkv_command.py", f"recalkv-{recalkv.__version__}.dist-info"}
    assert {name.split("/")[0] for name in names} == own
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "recalkv").rglob("*.py")} | {"recalkv_command.py"}
    assert {name for name in names if name.endswith(".py")} == sources
    assert {"recalkv/presets/presets.yaml", "recalkv/py.typed"} <= set(names)


def test_metadata(wheel: Path) -> None:
    facts = metadata(wheel)
    assert (facts["Name"], facts["Version"]) == ("recalkv", recalkv.__version__)
    assert facts["License-Expression"] == "Apache-2.0" and facts["License-File"] == "LICENSE"
    assert "Apache License" in (ROOT / "LICENSE").read_text() and facts["Author"] == "The ReCalKV developers"
    assert set(facts.get_all("Provides-Extra")) == {"pipeline", "eval", "kernels", "quantizers", "vllm", "dev"}
    assert f"## [{recalkv.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def requirements(wheel: Path) -> set[str]:
    """Return the distributions that the wheel's base requirements resolve to."""
    found: set[str] = set()
    left = [Requirement(line) for line in metadata(wheel).get_all("Requires-Dist")]
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        if wanted.marker is not None and not any(wanted.marker.evaluate({"extra": e}) for e in ("", *wanted.extras)):
            continue
        if name not in found:
            found.add(name)
            left += map(Requirement, distribution(name).requires or [])
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an environment with the wheel and its base requirements, linked from this one; return its interpreter."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    interpreter = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--quiet", "--python", interpreter, "install", "--no-deps", "--no-index"]
    process(*install, wheel)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in requirements(wheel):
        own = distribution(name)
        for top in {Path(file).parts[0] for file in own.files or []} - {"..", "__pycache__"}:
            target = Path(str(own.locate_file(top)))
            # Namespace packages belong to several distributions.
            if target.exists() and not (packages / top).exists():
                (packages / top).symlink_to(target)
    return interpreter


def test_base_requirements_hold_nothing_of_the_extras(wheel: Path) -> None:
    assert not requirements(wheel) & {"dvc", "zarr", "datasets", "matplotlib", "gguf", "lm-eval", "triton", "pytest"}


def test_base_requirements_are_enough(
    python: Path, tiny_folder: Path, tiny_texts: tuple[Path, Path], tmp_path: Path
) -> None:
    compressed = tiny.compressed_pair("llama-gqa")[1]
    compressed.save_pretrained(tmp_path / "checkpoint")
    prompt = tiny.windows(1, 12)
    expected = compressed.generate(prompt, max_new_tokens=8, do_sample=False)[0].tolist()
    code = f"""
import recalkv
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
import torch
prompt = torch.tensor({prompt.tolist()})
loaded = AutoModelForCausalLM.from_pretrained("checkpoint")
print(loaded.generate(prompt, max_new_tokens=8, do_sample=False)[0].tolist())
dense = AutoModelForCausalLM.from_pretrained({str(tiny_folder)!r})
tokenizer = AutoTokenizer.from_pretrained({str(tiny_folder)!r})
texts = [Path({str(tiny_texts[0])!r}).read_text()]
smaller = recalkv.compress(dense, tokenizer, texts, samples=4, length=32, ratio=0.5, bits=16)
cache = smaller(prompt).past_key_values
full = dense(prompt).past_key_values
print(sum(t.numel() for layer in cache.layers for t in (layer.keys, layer.values) if t is not None)
      <= 0.5 * sum(t.numel() for layer in full.layers for t in (layer.keys, layer.values)))
smaller.save_pretrained("smaller")
from recalkv.text.documents import load_documents
try:
    load_documents("wikitext2", split="train")
except recalkv.errors.MissingPackageError as error:
    print(error)
print(recalkv.__file__)
"""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    output = process(python, "-c", code, cwd=tmp_path, env=environment).stdout.splitlines()
    assert output[0] == str(expected) and output[1] == "True" and "datasets" in output[2]
    assert "pip install '.[pipeline]'" in output[2] and Path(output[3]).is_relative_to(python.parent.parent)
    assert (tmp_path / "smaller" / "model.safetensors").exists()


def test_command_is_installed(python: Path, tmp_path: Path) -> None:
    assert "default" in process(python.parent / "recalkv", "preset", "list", cwd=tmp_path).stdout
