"""dvc.yaml against the code: dependencies follow imports, parameters exist, commands parse."""

import ast
import importlib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from recalkv.cli import STAGES, app
from recalkv.params import Params, load_params

ROOT = Path(__file__).resolve().parent.parent
PIPELINE = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]

# Modules that cannot change what a stage computes: messages, parameter descriptions (the values are
# tracked by DVC themselves), time keeping, and the plumbing around the call. A changed store format is
# refused by its schema version instead.
UNTRACKED = {"recalkv/errors.py", "recalkv/params.py", "recalkv/resources.py", "stages/common.py"}
# Statistics that no compression parameter may invalidate.
BEFORE_ALLOCATION = ("model", "sample", "whiten", "fisher", "baseline")


def imported_modules(path: str) -> set[str]:
    """Project files that a file imports, directly."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from package import module` and `from module import name` look alike.
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if node.module == "recalkv":
                names.remove("recalkv")
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            file = name.replace(".", "/")
            for candidate in (f"{file}.py", f"{file}/__init__.py"):
                if name.split(".")[0] in {"recalkv", "stages"} and (ROOT / candidate).exists():
                    found.add(candidate)
    return found


def closure(path: str) -> set[str]:
    """A file and all project files that it needs."""
    seen, todo = set(), [path]
    while todo:
        current = todo.pop()
        if current not in seen and current not in UNTRACKED:
            seen.add(current)
            todo += imported_modules(current)
    return seen


def test_every_stage_of_the_command_line_is_in_the_pipeline() -> None:
    assert set(PIPELINE) == set(STAGES)


@pytest.mark.parametrize("stage", PIPELINE)
def test_dependencies_are_the_modules_a_stage_imports(stage: str) -> None:
    listed = {dep for dep in PIPELINE[stage]["deps"] if dep.endswith(".py")}
    assert listed == closure(f"stages/{stage}.py")


@pytest.mark.parametrize("stage", PIPELINE)
def test_stage_is_described_and_runs_its_own_module(stage: str) -> None:
    assert PIPELINE[stage]["desc"]
    assert PIPELINE[stage]["cmd"] == f"python -m stages.{stage}"
    assert f"data/timings/{stage}.json" in PIPELINE[stage]["outs"]
    assert callable(importlib.import_module(f"stages.{stage}").main)


@pytest.mark.parametrize("stage", PIPELINE)
def test_every_tracked_parameter_exists(stage: str) -> None:
    parameters = load_params(ROOT / "params.yaml").model_dump()
    for name in PIPELINE[stage].get("params", []):
        section, _, key = name.partition(".")
        assert section in parameters and (not key or key in parameters[section]), name


@pytest.mark.parametrize("stage", BEFORE_ALLOCATION)
def test_statistics_do_not_depend_on_compression(stage: str) -> None:
    assert not [p for p in PIPELINE[stage].get("params", []) if p.startswith(("compression", "compare"))]


def test_params_file_is_complete_and_has_the_defaults_of_the_library() -> None:
    parameters = load_params(ROOT / "params.yaml")
    assert set(parameters.model_dump()) == set(Params.model_fields)


@pytest.mark.parametrize("command", [*STAGES, "compress", "preset", "cache-size"])
def test_help_of_every_command(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage" in result.output
