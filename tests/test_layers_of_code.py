"""Who imports whom: what decodes stands by itself, and the rooms of the library depend on each other one way."""

import ast
import functools
import graphlib
import importlib.util
import re
import shutil
import sys
import textwrap
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, process

# Modules of the library, by their dotted names.
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "recalkv").rglob("*.py")
}
DECODING = sorted(
    name
    for name in FILES
    if name.startswith(("recalkv.cache", "recalkv.kernels", "recalkv.trellis"))
    or name in {f"recalkv.model.{each}" for each in ("spec", "families", "rotary", "values", "attention", "modeling")}
)


def imported(tree: ast.AST, types: bool = False) -> Iterator[tuple[str, str | None]]:
    """(module, name) of every import, those in functions too; those for type checkers alone if ``types``."""
    for node in ast.iter_child_nodes(tree):
        if not types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "imports are absolute"
            yield from ((node.module, alias.name) for alias in node.names)
        else:
            yield from imported(node, types)


@functools.cache
def imports(module: str) -> frozenset[str]:
    """What a module imports: modules of the library by their full names, others by their first part."""
    found = set()
    for name, member in imported(ast.parse(FILES[module].read_text())):
        if name.split(".")[0] == "recalkv":
            found.add(f"{name}.{member}" if f"{name}.{member}" in FILES else name)
        else:
            found.add(name.split(".")[0])
    return frozenset(found)


@functools.cache
def reached(module: str) -> dict[str, tuple[str, ...]]:
    """Everything that a module imports in the end, with one way there."""
    ways: dict[str, tuple[str, ...]] = {module: (module,)}
    queue = [module]
    for at in queue:
        for name in imports(at) - ways.keys():
            ways[name] = (*ways[at], name)
            # The package itself offers `compress` lazily, to those who ask for it.
            if name in FILES and name != "recalkv":
                queue.append(name)
    return ways


def room(module: str) -> str:
    """Folder of a module of the library, or the module's own name where it stands outside of them."""
    parts = module.split(".")
    return parts[1] if parts[0] == "recalkv" and len(parts) > 1 else ""


def crossings(module: str, rooms: set[str]) -> list[str]:
    return sorted(" -> ".join(way) for name, way in reached(module).items() if room(name) in rooms)


def test_the_graph_is_seen() -> None:
    """Otherwise the tests below would pass on nothing."""
    assert len(DECODING) > 20 and "recalkv.model.attention" in reached("recalkv.kernels.decoder")
    # Imports in functions count.
    assert "recalkv.model.card" in imports("recalkv.model.modeling")
    assert crossings("recalkv.method.refit", {"statistics"})


@pytest.mark.parametrize("module", DECODING)
def test_what_decodes_imports_nothing_that_calibrates(module: str) -> None:
    offline = {"method", "statistics", "text", "store", "params", "evaluation", "reports", "compression", "cli"}
    assert not crossings(module, offline)


@pytest.mark.parametrize("module", DECODING)
def test_what_decodes_needs_few_packages(module: str) -> None:
    packages = {name for name in reached(module) if name not in FILES} - set(sys.stdlib_module_names)
    few = {"torch", "transformers", "triton", "huggingface_hub", "safetensors", "numpy", "numba", "llvmlite"}
    assert packages <= few


def test_what_decodes_needs_neither_numba_nor_its_folder(fresh_python: Path) -> None:
    """The image of a GPU machine may lack it, and a container have no folder that can be written to."""
    code = """
        import sys
        import warnings
        sys.modules["numba"] = None
        from recalkv.trellis.cpu import compiled
        assert compiled("recalkv.runtime.cpu.layer") is None
        loaded = "numba", "recalkv.runtime.cpu.layer", "recalkv.runtime.cpu.step"
        for name in [name for name in sys.modules if name in loaded or name.startswith("recalkv.trellis.cpu.")]:
            del sys.modules[name]
        compiled.cache_clear()
        from numba.core import caching
        refused = lambda *given, **options: (_ for _ in ()).throw(OSError("read-only"))
        for locator in caching.CacheImpl._locator_classes:
            locator.ensure_cache_path = refused
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert compiled("recalkv.runtime.cpu.layer") is None
            assert compiled("recalkv.trellis.cpu.rows") is None
        assert ["NUMBA_CACHE_DIR" in str(each.message) for each in caught] == [True]
    """
    process(fresh_python, "-c", textwrap.dedent(code))


def test_compiled_code_is_of_all_sources(tmp_path: Path) -> None:
    """Numba looks at a function's own file only; others are in the name that it is kept by."""
    shutil.copytree(ROOT / "recalkv/trellis", tmp_path / "trellis", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "records.py").touch()
    source, found = "def loop(address): pass", dict[str, Any]()
    (tmp_path / "loops.py").write_text(source)
    exec(compile(source, tmp_path / "loops.py", "exec"), found)

    def kept_as() -> str:
        spec = importlib.util.spec_from_file_location("loops_of_a_copy", tmp_path / "trellis/cpu/vectors.py")
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        loop = types.FunctionType(found["loop"].__code__, {"__name__": __name__})  # Numba imports a loop's module
        return str(module.called(loop)._cache._cache_file._index_name)

    names = [kept_as(), kept_as()]
    for name in ("trellis/cpu/codes.py", "trellis/cpu/threads.py", "records.py"):
        with (tmp_path / name).open("a") as file:
            file.write("# changed\n")
        names.append(kept_as())
    assert len(names) == 5 and len(set(names)) == 4


@pytest.mark.parametrize("patience", [0.01, 1e6])
def test_who_waits_is_told(patience: float, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    class Slow:
        """Finds no module, after a while."""

        def find_spec(self, name: str, *_: object) -> None:
            if name == "recalkv.runtime.cpu.layer":
                time.sleep(0.3)

    from recalkv.runtime import cpu
    from recalkv.runtime.cpu import layer
    from recalkv.trellis import cpu as loops

    monkeypatch.setattr(loops, "_PATIENCE", patience)
    monkeypatch.delattr(cpu, "layer")
    monkeypatch.delitem(sys.modules, layer.__name__)
    monkeypatch.setattr(sys, "meta_path", [Slow(), *sys.meta_path])
    assert loops.compiled.__wrapped__(layer.__name__).__name__ == layer.__name__
    assert ("compiling loops for this processor" in capfd.readouterr().err) == (patience < 1)


def test_rooms_depend_one_way() -> None:
    """Each imports those before it alone."""
    order = [
        "errors", "params", "trellis", "cache", "model", "text", "presets", "kernels", "statistics", "method", "codec",
        "runtime", "store", "evaluation", "vllm", "reports", "compression", "fitting", "recipe", "commands", "", "cli",
        "__main__",
    ]  # fmt: skip
    assert set(order) == {room(name) for name in FILES}
    place = {name: number for number, name in enumerate(order)}
    pairs = [(name, other) for name in FILES for other in imports(name) if other in FILES and other != "recalkv"]
    assert not [pair for pair in pairs if place[room(pair[0])] < place[room(pair[1])]]


def test_no_modules_import_each_other() -> None:
    graph = {name: {other for other in imports(name) if other in FILES and other != "recalkv"} for name in FILES}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(FILES)


@pytest.mark.parametrize("module", sorted(name for name in FILES if room(name) in ("codec", "runtime")))
def test_the_codec_stands_by_itself(module: str) -> None:
    """A second form beside latents: it uses their method and their codes, and nothing of their models."""
    rooms = {room(name) for name in imports(module) if name.startswith("recalkv")}
    assert rooms <= {"", "codec", "runtime", "method", "cache", "trellis", "errors", "params", "text"}


def test_the_library_knows_no_stages() -> None:
    assert not [name for name in FILES if imports(name) & {"stages", "tests", "benchmarks"}]


def test_no_code_of_a_checkpoint_is_run() -> None:
    """Unless told so, transformers asks on the standard input whether it may."""
    loads = []
    for path in sorted({*ROOT.glob("recalkv/**/*.py"), *ROOT.glob("stages/*.py")}):
        calls = (ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        loads += [(path.name, call) for call in calls if re.match(r"Auto\w+\.from_pretrained\(", call)]
    assert len(loads) > 5
    assert not [load for load in loads if "trust_remote_code=False" not in load[1] and "gguf_file" not in load[1]]
