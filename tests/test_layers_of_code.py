"""Import structure: decoding code is independent, and the packages of the library depend on each other one way."""

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

# Modules of the library, by dotted name.
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
    """Yield (module, name) of every import, also in functions; those for type checkers only if ``types``."""
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
    """Return the imports of a module: library modules by their full name, other packages by their top-level name."""
    found = set()
    for name, member in imported(ast.parse(FILES[module].read_text())):
        if name.split(".")[0] == "recalkv":
            found.add(f"{name}.{member}" if f"{name}.{member}" in FILES else name)
        else:
            found.add(name.split(".")[0])
    return frozenset(found)


@functools.cache
def reached(module: str) -> dict[str, tuple[str, ...]]:
    """Return all direct and indirect imports of a module, each with one import path."""
    ways: dict[str, tuple[str, ...]] = {module: (module,)}
    queue = [module]
    for at in queue:
        for name in imports(at) - ways.keys():
            ways[name] = (*ways[at], name)
            # The package itself imports `compress` lazily, on request.
            if name in FILES and name != "recalkv":
                queue.append(name)
    return ways


def room(module: str) -> str:
    """Return the folder of a library module, or the module's name if it is in no folder."""
    parts = module.split(".")
    return parts[1] if parts[0] == "recalkv" and len(parts) > 1 else ""


def crossings(module: str, rooms: set[str]) -> list[str]:
    return sorted(" -> ".join(way) for name, way in reached(module).items() if room(name) in rooms)


def test_the_graph_is_seen() -> None:
    """The import graph is not empty; otherwise the tests below would check nothing."""
    assert len(DECODING) > 20 and "recalkv.model.attention" in reached("recalkv.kernels.decoder")
    # Imports in functions count as well.
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
    """Without Numba (as on some GPU images) or a writable cache folder (as in containers), no loops are compiled."""
    code = """
        import sys
        import warnings
        from unittest.mock import patch
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
        compiled.cache_clear()
        wrong = ImportError("Numba needs NumPy 2.4 or less")
        with warnings.catch_warnings(record=True) as caught, patch("importlib.import_module", side_effect=wrong):
            warnings.simplefilter("always")
            assert compiled("recalkv.trellis.cpu.rows") is None
        assert ["Numba needs NumPy" in str(each.message) for each in caught] == [True]
    """
    process(fresh_python, "-c", textwrap.dedent(code))


def test_compiled_code_is_of_all_sources(tmp_path: Path) -> None:
    """The cache name of compiled code covers all its source files, as Numba checks only the function's file."""
    shutil.copytree(ROOT / "recalkv/trellis", tmp_path / "trellis", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "records.py").touch()
    source, found = "def loop(address): pass", dict[str, Any]()
    (tmp_path / "loops.py").write_text(source)
    exec(compile(source, tmp_path / "loops.py", "exec"), found)

    def kept_as() -> str:
        spec = importlib.util.spec_from_file_location("loops_of_a_copy", tmp_path / "trellis/cpu/vectors.py")
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        loop = types.FunctionType(found["loop"].__code__, {"__name__": __name__})  # Numba imports the module of a loop
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
        """Finder that finds no module, after a delay."""

        def find_spec(self, name: str, *_: object) -> None:
            if name == "recalkv.runtime.cpu.layer":
                time.sleep(0.3)

    from recalkv.runtime import cpu
    from recalkv.runtime.cpu import layer
    from recalkv.trellis import cpu as loops

    loops._say_that_it_compiles.cache_clear()
    monkeypatch.setattr(loops, "_PATIENCE", patience)
    monkeypatch.delattr(cpu, "layer")
    monkeypatch.delitem(sys.modules, layer.__name__)
    monkeypatch.setattr(sys, "meta_path", [Slow(), *sys.meta_path])
    assert loops.compiled.__wrapped__(layer.__name__).__name__ == layer.__name__
    assert ("compiling loops for this processor" in capfd.readouterr().err) == (patience < 1)


def test_rooms_depend_one_way() -> None:
    """Every package imports only packages that come before it in this order."""
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
    """The codec, a second format beside latents, uses their method and codes but nothing of their models."""
    rooms = {room(name) for name in imports(module) if name.startswith("recalkv")}
    assert rooms <= {"", "codec", "runtime", "method", "cache", "trellis", "errors", "params", "text"}


def test_the_library_knows_no_stages() -> None:
    assert not [name for name in FILES if imports(name) & {"stages", "tests", "benchmarks"}]


def test_no_code_of_a_checkpoint_is_run() -> None:
    """Every load forbids remote code; by default, transformers asks on standard input whether to run it."""
    loads = []
    for path in sorted({*ROOT.glob("recalkv/**/*.py"), *ROOT.glob("stages/*.py")}):
        calls = (ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        loads += [(path.name, call) for call in calls if re.match(r"Auto\w+\.from_pretrained\(", call)]
    assert len(loads) > 5
    assert not [load for load in loads if "trust_remote_code=False" not in load[1] and "gguf_file" not in load[1]]
