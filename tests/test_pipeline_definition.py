"""dvc.yaml against the code: dependencies match imports and reads, and changes rerun the right stages."""

import ast
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from recalkv.params import Params
from stages import forms
from tests.conftest import ROOT, Finished
from tests.pipeline import STAGES, STATISTICS
from tests.test_layers_of_code import imported

PIPELINE: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
GRIDS = {
    f"{file} {name}": stage.get("do", stage)
    for file in ("grids/dvc.yaml", "grids/frontier/dvc.yaml", "grids/models/dvc.yaml")
    for name, stage in yaml.safe_load((ROOT / file).read_text())["stages"].items()
}
# Code that cannot change what a stage computes: messages, parameter descriptions (DVC tracks the values themselves),
# time measurement, and the code around the call.
UNTRACKED = {
    "recalkv/__init__.py",  # registers classes with transformers
    "recalkv/errors.py",
    "recalkv/params.py",
    "recalkv/model/precision.py",  # its decision is recorded in the stores
    "recalkv/evaluation/resources.py",
    "stages/common.py",
}
# Nothing depends on these outputs: costs of the runs, and the layer inputs kept from the whitening to the Fisher pass.
LEFT_BEHIND = ("reports/timings.json", "data/activations")


def module_of(stage: str) -> str:
    """Return the file of the module that a stage's command runs."""
    command = next(each for each in as_list(PIPELINE[stage]["cmd"]))
    return "stages/" + command.split("python -m stages.")[1].split()[0] + ".py"


def as_list(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


@functools.cache
def imported_modules(path: str) -> set[str]:
    """Return the project files that a file imports directly, anywhere in it."""
    found = set()
    for module, member in imported(ast.parse((ROOT / path).read_text()), types=True):
        # `from package import module` and `from module import name` look alike.
        for place in (module.replace(".", "/"), f"{module}.{member}".replace(".", "/")):
            found |= {file for file in (f"{place}.py", f"{place}/__init__.py") if has_code(ROOT / file)}
    return found


@functools.cache
def has_code(path: Path) -> bool:
    """Whether a file exists and contains more than a docstring, unlike most packages' ``__init__.py``."""
    return path.exists() and len(ast.parse(path.read_text()).body) > 1


def closure(path: str) -> set[str]:
    """Return a file and all project files that it needs."""
    seen, todo = set(), [path]
    while todo:
        current = todo.pop()
        if current not in seen and current not in UNTRACKED:
            seen.add(current)
            todo += imported_modules(current)
    return seen


def tracked(path: str, dependencies: Iterable[str]) -> bool:
    return any(path == dep or path.startswith(f"{dep}/") for dep in dependencies)


@pytest.mark.parametrize("stage", PIPELINE)
def test_code_dependencies_are_what_a_stage_imports(stage: str) -> None:
    code = [dep for dep in PIPELINE[stage]["deps"] if dep.startswith(("recalkv", "stages"))]
    needed = closure(module_of(stage))
    assert sorted(path for path in needed if not tracked(path, code)) == []
    assert [dep for dep in code if not any(tracked(path, [dep]) for path in needed)] == []


@pytest.mark.parametrize("stage", GRIDS)
def test_code_dependencies_of_grids_are_what_they_import(stage: str) -> None:
    command = " ".join(as_list(GRIDS[stage]["cmd"]))
    modules = [f"stages/{name}.py" for name in re.findall(r"python -m stages\.(\w+)", command)]
    modules += [f"recalkv/commands/{name}.py" for name in re.findall(r"\brecalkv (\w+) ", command)]
    needed = set().union(*map(closure, modules))
    if "recalkv fit" in command:
        needed.add("recalkv/params.py")  # the command's defaults come from here, not from params.yaml
    code = [dep for dep in GRIDS[stage]["deps"] if dep.startswith(("recalkv", "stages"))]
    assert sorted(path for path in needed if not tracked(path, code)) == []
    assert [dep for dep in code if not any(tracked(path, [dep]) for path in needed)] == []


def in_pipeline(stage: str) -> dict[str, Any]:
    """Return the definition of a stage; that of a cell is the one of the paper's method."""
    return PIPELINE["paper" if stage == "cell" else stage]


def outputs(stage: dict[str, Any]) -> list[str]:
    """Return everything that a stage writes."""
    listed = [*as_list(stage.get("outs", [])), *as_list(stage.get("metrics", []))]
    return [next(iter(each)) if isinstance(each, dict) else each for each in listed]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_tracks_the_parameters_that_it_reads_and_no_others(stage: str, finished: Finished) -> None:
    sections = {each.partition(".")[0] for each in in_pipeline(stage).get("params", [])}
    read = finished.seen[stage]["params"] & set(Params.model_fields)
    # Where a stage runs changes results only by rounding, but latency measures just that, and machine records it.
    assert sections == {"latency": read, "machine": read | {"runtime"}}.get(stage, read - {"runtime"})


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_tracks_the_files_that_it_reads_and_no_others(stage: str, finished: Finished) -> None:
    definition, read = in_pipeline(stage), finished.seen[stage]["files"]
    own = [*outputs(definition), *(f"{out}.partial" for out in outputs(definition)), *LEFT_BEHIND]
    dependencies = [dep for dep in definition["deps"] if dep.startswith(("data/", "reports/"))]
    assert sorted(path for path in read if not tracked(path, [*dependencies, *own])) == []
    unread = [dep for dep in dependencies if not any(tracked(path, [dep]) for path in read)]
    # The paper's figures are for the paper's models only.
    assert unread == (["reports/paper.json"] if stage == "report" else [])


def test_stages_leave_nothing_that_is_no_output(finished: Finished) -> None:
    declared = [out for stage in PIPELINE.values() for out in outputs(stage)]
    known = [*declared, *LEFT_BEHIND, "reports/paper.json"]
    left = [path.relative_to(finished.folder) for path in finished.folder.rglob("*") if path.is_file()]
    assert sorted(str(path) for path in left if len(path.parts) > 1 and not tracked(str(path), known)) == []
    assert [out for out in declared if not (finished.folder / out).exists()] == []


def rerun_by(section: str) -> set[str]:
    """Return the stages that a change in a section of params.yaml reruns, directly or through dependencies."""
    found: set[str] = set()
    left: set[str] = set()
    for name, stage in PIPELINE.items():
        if any(each.partition(".")[0] == section for each in stage.get("params", [])) or any(
            tracked(out, [dep]) for out in left for dep in stage["deps"]
        ):
            found.add(name)
            left |= set(outputs(stage))
    return found


def test_what_reruns_follows_from_the_graph() -> None:
    everything, statistics, codec = set(PIPELINE), set(STATISTICS), {"moments", "codec", "codec_cell"}
    after_statistics = everything - statistics - codec - {"baseline", "quantizer", "machine"}
    assert rerun_by("model") == everything - {"machine"}
    assert rerun_by("calibration") == everything - {"model", "baseline", "quantizer", "machine"}
    assert rerun_by("compression") == after_statistics and rerun_by("codec") == codec | {"report"}
    assert rerun_by("evaluation") == {"baseline", "evaluate", "paper", "quantizer", "codec_cell", "report"}
    assert rerun_by("latency") == {"latency", "report"}
    assert rerun_by("zeroshot") == rerun_by("needle") == rerun_by("longbench") == set()
    for name, stage in PIPELINE.items():
        assert not [dep for dep in stage["deps"] if "timings" in dep], name


def test_what_a_cell_is_kept_by_is_what_its_stage_depends_on() -> None:
    """A cell is keyed by all code that its stage depends on; otherwise figures from other code would be kept."""
    code = {dep.removeprefix("recalkv/") for dep in GRIDS["grids/models/dvc.yaml cells"]["deps"] if "recalkv/" in dep}
    # Stores and texts are identified by their content.
    assert set().union(*forms._CODE.values()) | {"evaluation/perplexity.py"} == code - {"store", "text"}
