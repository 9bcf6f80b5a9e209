"""README and docs: tables generated from the reports; named paths, modules, commands and parameters exist."""

import re
from pathlib import Path

import pytest
import typer
import yaml
from pydantic import BaseModel

from recalkv.params import Params
from recalkv.presets import preset, render
from recalkv.reports import figures
from recalkv.reports.figures import measured_numbers, refreshed
from tests.conftest import ROOT

PAGES = [path for pattern in figures.PAGES for path in sorted(ROOT.glob(pattern))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_figures_are_those_of_the_reports(path: Path) -> None:
    text = path.read_text()
    assert refreshed(text, ROOT) == text, "run `python -m recalkv.reports.figures`"
    assert list(measured_numbers(text)) == []


# Names in the pages. Generated tables are left out, as they may name files that do not exist yet.


def named(text: str) -> str:
    return re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)


def code(text: str) -> list[str]:
    blocks = re.findall(r"^```\w*\n(.*?)^```", named(text), re.MULTILINE | re.DOTALL)
    return blocks + re.findall(r"`([^`\n]+)`", named(text))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_paths_links_and_modules_are_there(path: Path) -> None:
    text = named(path.read_text())
    links = [path.parent / target for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
    folders = "recalkv|stages|tests|benchmarks|docs|grids|reports"
    paths = [ROOT / part for span in code(text) for part in re.findall(rf"(?<![\w/.])(?:{folders})/[\w./-]+", span)]
    missing = [str(each) for each in [*links, *paths] if not each.exists()]
    named_modules = r"\b(?:recalkv|stages|benchmarks)(?:\.[a-z]\w*)+"
    for module in [part for span in code(text) for part in re.findall(named_modules, span)]:
        whole, parent = (ROOT.joinpath(*parts) for parts in (module.split("."), module.split(".")[:-1]))
        files = [parent.with_suffix(".py"), parent / "__init__.py"]
        inside = any(re.search(rf"\b{whole.name}\b", file.read_text()) for file in files if file.exists())
        if not (whole.is_dir() or whole.with_suffix(".py").exists() or inside):
            missing.append(module)
    assert missing == []


def test_anchors_are_headings() -> None:
    for path in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text()):
            headings = re.findall(r"^#+ (.+)$", (path.parent / target if target else path).read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{path.name}: #{anchor}"


def test_commands_are_there() -> None:
    from recalkv.cli import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for path in PAGES:
        for span in code(path.read_text()):
            for line in span.split("\n"):
                if match := re.match(r"make ([\w-]+)", line):
                    assert match[1] in targets, line
                if match := re.match(r"recalkv ([a-z-]+)", line):
                    options = {name for parameter in commands[match[1]].params for name in parameter.opts}
                    assert set(re.findall(r"(?<=\s)--[\w-]+", line.split("&&")[0])) <= options, line


def test_parameters_are_there() -> None:
    for path in PAGES:
        for span in code(path.read_text()):
            if match := re.fullmatch(rf"({'|'.join(Params.model_fields)})\.(\w+)(?:: (.+))?", span):
                section = Params.model_fields[match[1]].annotation
                assert isinstance(section, type) and issubclass(section, BaseModel)
                assert match[2] in section.model_fields, span
                if match[3] is not None:
                    section.model_validate({match[2]: yaml.safe_load(match[3])})


def test_pages_keep_the_figures_of_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, table = tmp_path / "README.md", "<!-- table: parameters -->\nold\n<!-- end -->\n"
    page.write_text(table)
    (tmp_path / "params.yaml").write_text(render(preset("default", 0.5)))
    assert figures.main([], tmp_path) == 1 and page.read_text() == table
    assert "not that of `recalkv preset default`" in capsys.readouterr().err
    (tmp_path / "params.yaml").write_text(render(preset("default")))
    assert figures.main([], tmp_path) == 0 and page.read_text() != table
