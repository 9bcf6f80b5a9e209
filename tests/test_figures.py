"""README and docs: tables from the reports, and every path, module, command and parameter that they name."""

import json
import re
from pathlib import Path

import pytest
import typer
import yaml
from pydantic import BaseModel

from recalkv.errors import ReportError
from recalkv.params import Params
from recalkv.reports import figures, tables
from recalkv.reports.figures import TABLES, main, measured_numbers, refreshed
from recalkv.reports.parameters import parameters

ROOT = Path(__file__).resolve().parent.parent
PAGES = [path for pattern in figures.PAGES for path in sorted(ROOT.glob(pattern))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_figures_are_those_of_the_reports(path: Path) -> None:
    text = path.read_text()
    assert refreshed(text, ROOT) == text, "run `python -m recalkv.reports.figures`"
    assert list(measured_numbers(text)) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports/timings.json").write_text(
        json.dumps({"one": {"wall_seconds": 60.0, "cpu_seconds": 90.0, "peak_resident_mib": 1000.0}})
    )
    return tmp_path


STALE = "`1.0<!-- x -->`\n<!-- table: stages -->\nold\n<!-- end -->\nend <!-- a remark -->\n"


def test_tables_are_rewritten_and_nothing_else(folder: Path) -> None:
    new = refreshed(STALE, folder)
    assert "| `one` | 60 | 90 | 1,000 |" in new
    assert re.sub(r"(?<=stages -->\n).*?(?=\n<!-- end)", "old", new, flags=re.DOTALL) == STALE
    assert refreshed(new, folder) == new
    (folder / "reports/timings.json").unlink()
    assert refreshed(STALE, folder) == STALE.replace("old", "(`reports/timings.json` has not been made yet.)")


def test_a_table_that_is_not_there_or_lacks_its_report_is_named(folder: Path) -> None:
    with pytest.raises(ReportError, match="no table 'none'"):
        refreshed("<!-- table: none -->\n<!-- end -->", folder)
    (folder / "reports/timings.json").write_text('{"one": {}}')
    with pytest.raises(ReportError, match="line 2: 'wall_seconds'"):
        refreshed("\n<!-- table: stages -->\n<!-- end -->", folder)


def test_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "page.md"
    path.write_text(STALE)
    assert main([str(path), "--check"], folder) == 1
    assert path.read_text() == STALE
    assert "+| `one` | 60" in capsys.readouterr().out
    assert main([str(path)], folder) == 0
    assert main([str(path), "--check"], folder) == 0
    (folder / "README.md").write_text(STALE)
    assert main([], folder) == 0
    assert (folder / "README.md").read_text() == path.read_text()
    path.write_text("Of 12 bytes.\n")
    assert main([str(path), "--check"], folder) == 1
    assert "page.md:1: '12 bytes' looks measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["1.5", "about 50 %", "50%", "12 per cent", "1,024", "8 s", "8s", "3 minutes", "4 GiB", "5x", "| 7 nats |"]
)
def test_what_looks_measured(text: str) -> None:
    assert [line for line, _ in measured_numbers(f"one\n{text}\n")] == [2]


@pytest.mark.parametrize(
    "text",
    [
        "8 windows of 1024 tokens, groups of 2, 16-bit latents, section 4.1",
        "`1.5`, and\n```\n1.5 s\n```\n",
        "[a link](https://example.org/2402.02750) <https://example.org/1.5>",
        "<!-- table: stages -->\n1.5\n<!-- end -->",
    ],
)
def test_what_does_not(text: str) -> None:
    assert list(measured_numbers(text)) == []


def cells_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_dense_beside_compressed() -> None:
    rates = {"static": {"dense": 8.0, "compressed": 4.0}}
    times = {"dense_sdpa_static": 500.0, "dense_eager_growing": 800.0, "removed": {"static": 2500.0, "growing": 3000.0}}
    metrics = {
        "perplexity": {"dense": 20.0, "compressed": 25.0},
        "cache": {
            "dense_bytes_per_token": 46080.0,
            "reference_bytes_per_token": 23040,
            "compressed_bytes_per_token": 5760,
        },
        "parameters": {"dense": 1000, "compressed": 990},
    }
    latency = {
        "decode_tokens_per_second": {"4096_tokens": {"batch_2": rates}, "512_tokens": {"batch_2": rates}},
        "attention_us_per_step": {
            "pipeline": {"512_tokens": {"batch_2": times}},
            "other": {"512_tokens": {"batch_2": times}},
        },
    }
    _, _, *rows = cells_of(tables.dense_beside_compressed(metrics, latency))
    assert rows == [
        ["perplexity", "20.00", "25.00", "1.25"],
        ["cache in 16 bits, bytes per token", "23,040", "5,760", "0.25"],
        ["parameters", "1,000", "990", "0.99"],
        ["decoding, tokens/s (512 cached, batch 2, static cache)", "8.0", "4.0", "0.50"],
        ["decoding, tokens/s (4,096 cached, batch 2, static cache)", "8.0", "4.0", "0.50"],
        ["one attention module, ms (512 cached, batch 2, static cache)", "0.50", "2.50", "5.00"],
    ]
    metrics["cache"]["compressed_window_bytes"] = 1000.0
    assert ["exact window in 16 bits, bytes per sequence", "0", "500", ""] in cells_of(
        tables.dense_beside_compressed(metrics, latency)
    )
    _, _, *rows = cells_of(tables.attention(latency))
    assert [row[4:] for row in rows[:2]] == [
        ["dense sdpa static", "2,500", "500", "0.20"],
        ["dense eager growing", "3,000", "800", "0.27"],
    ]


def test_cells_of_a_grid() -> None:
    shared = {
        "further_texts": {},
        "perplexity_dense": 20.0,
        "dense_bytes_per_token": 1000.0,
        "excess_standard_error_nats": 0,
    }
    sizes = [("palu", 4, 125.0, 30.0), ("loss-aware", 4, 125.0, 25.0), ("palu", 16, 500.0, 22.0)]
    cells = {
        str(number): shared
        | {"method": method, "setting": {"method": method, "ratio": 0.5, "bits": bits}, "bytes_per_token": size}
        | {"perplexity": perplexity, "removed": 1 - size / 1000, "excess_nats": perplexity / 20}
        for number, (method, bits, size, perplexity) in enumerate(sizes)
    }
    assert cells_of(tables.grid(cells)) == [
        ["method", "bits", "removed", "bytes per token", "perplexity", "excess loss (nats/token)"],
        ["---", "---", "---:", "---:", "---:", "---:"],
        ["dense", "", "0.0%", "1,000", "20.00", "0"],
        ["palu", "16", "50.0%", "500", "22.00", "1.100 ± 0.000"],
        ["loss-aware", "4", "87.5%", "125", "25.00", "1.250 ± 0.000"],
        ["palu", "4", "87.5%", "125", "30.00", "1.500 ± 0.000"],
    ]


def test_every_parameter_is_described() -> None:
    rows = cells_of(parameters())
    sections = [field.annotation for field in Params.model_fields.values()]
    assert [row[0] for row in rows if row[0].startswith("`")] == [
        f"`{name}`" for section in sections if section is not None for name in section.model_fields
    ]
    ratio = next(row for row in rows if row[0] == "`ratio`")
    assert ratio == ["`ratio`", "`0.75`", "`>= 0 and < 1`", "fraction of the dense cache's bytes to remove"]


def test_every_table_is_used() -> None:
    used = {name for path in PAGES for name in re.findall(r"^<!-- table: ([\w-]+)", path.read_text(), re.MULTILINE)}
    assert used == set(TABLES)


# What the pages name. Generated tables are left out: they name what may not have been made yet.


def named(text: str) -> str:
    return re.sub(r"<!-- table: .*?<!-- end -->", "", text, flags=re.DOTALL)


def code(text: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```", named(text), re.MULTILINE | re.DOTALL) + re.findall(
        r"`([^`\n]+)`", named(text)
    )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_paths_links_and_modules_are_there(path: Path) -> None:
    text = named(path.read_text())
    links = [path.parent / target for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
    folders = "recalkv|stages|tests|benchmarks|docs|grids|reports"
    paths = [ROOT / part for span in code(text) for part in re.findall(rf"(?<![\w/.])(?:{folders})/[\w./-]+", span)]
    missing = [str(each) for each in [*links, *paths] if not each.exists()]
    modules = [
        part for span in code(text) for part in re.findall(r"\b(?:recalkv|stages|benchmarks)(?:\.[a-z]\w*)+", span)
    ]
    for module in modules:
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
