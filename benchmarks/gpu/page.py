"""The page of :mod:`benchmarks.gpu`: DIR/README.md, written from the JSON lines."""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PARTS = ("codec", "smoke", "kernels", "models")
Record = dict[str, Any]


def write_page(folder: Path) -> None:
    """Write the page from the available lines; it lists missing results."""
    lines = {part: _read(folder / f"{part}.jsonl") for part in PARTS}
    results = {part: [each for each in own if each["event"] == "result"] for part, own in lines.items()}
    content = [
        "# On a GPU",
        "",
        "Written by `make gpu` and `make gpu-page`. Random weights and caches; times are medians.",
        "",
        _machines(lines.values()),
        "",
        *_dates(lines.values()),
        *_missing(lines),
        *_smoke(results["smoke"]),
        *_codec(results["codec"]),
        *_kernels(_beside_dense(results["kernels"])),
        *_models(results["models"]),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("\n".join(content).rstrip() + "\n")


def _read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _machines(parts: Iterable[list[Record]]) -> str:
    names = ("device", "python", "torch", "triton", "transformers")
    found = {tuple(each[name] for name in names): None for part in parts for each in part if "device" in each}
    lines = [f"{device}; Python {python}, torch {torch}, triton {triton}, transformers {transformers}"
            for device, python, torch, triton, transformers in found]  # fmt: skip
    return ". ".join(lines) + "." if lines else "Nothing has been measured."


def _dates(parts: Iterable[list[Record]]) -> list[str]:
    """Say of which days' code the figures are, as the kernels may have changed since."""
    times = [each["time"] for part in parts for each in part if "time" in each]
    days = " and ".join(sorted({str(datetime.fromtimestamp(time, UTC).date()) for time in times}))
    return [f"Measured on {days}, with the code of that day; changes since are not timed.", ""] if times else []


def _missing(lines: dict[str, list[Record]]) -> list[str]:
    """List steps that did not run, did not finish or gave wrong results."""
    found = [f"- `{part}`: no lines" for part, own in lines.items() if not own]
    for part, own in lines.items():
        for each in own:
            place = f"- `{part}`, {each['step']}: "
            if each["event"] == "failure":
                last = "".join(f": `{line}`" for line in each["tail"].strip().splitlines()[-1:])
                found.append(f"{place}**failed** ({each['reason']}){last}")
            found += [f"{place}**failed**: `{one[:200]}`" for one in each.get("failed", ())]
            if each.get("what") == "does not fit":
                # In the codec part, the dense cache is the larger one.
                found.append(f"{place}{'the dense cache ' if part == 'codec' else ''}does not fit")
            if each.get("what") == "not served":
                found.append(f"{place}not served")
        left = [each for each in own if each["event"] == "left out"]
        if left:
            names = "; ".join(each["step"] for each in left)
            found.append(f"- `{part}`, left out ({left[0]['reason']}), steps {len(left)}: {names}")
    return ["## Missing", "", *(found or ["Nothing."]), ""]


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    cells = [[str(cell) for cell in row] for row in rows]
    if not cells:
        return []
    # Drop empty columns.
    kept = [number for number in range(len(head)) if any(row[number] for row in cells)]
    head, cells = [head[number] for number in kept], [[row[number] for number in kept] for row in cells]
    lines = [f"| {' | '.join(row)} |" for row in ([*head], ["---"] * len(head), *cells)]
    return [*lines, ""]


_LEFT_OUT = (
    "The codec's side neither packs new tokens nor reads the 16-bit residual window; the same holds of the largest "
    "batch."
)


def _section(title: str, *tables: list[str]) -> list[str]:
    content = [line for table in tables for line in table]
    return [f"## {title}", "", *content] if content else []


def _of(records: Iterable[Record], what: str) -> list[Record]:
    return [each for each in records if each.get("what") == what]


def _smoke(records: list[Record]) -> list[str]:
    units = {"gb_per_s": "GB/s", "tflop_per_s": "TFLOP/s"}
    ceilings = [
        (each["what"], f"{each[key]:,.1f} {unit}") for each in records for key, unit in units.items() if key in each
    ]
    tests = [(each["step"], each["passed"], len(each["failed"]), each["skipped"]) for each in _of(records, "tests")]
    return _section(
        "Smoke", _table(("ceiling", "measured"), ceilings), _table(("tests", "passed", "failed", "skipped"), tests)
    )


def _beside_dense(records: list[Record]) -> list[Record]:
    """Add to rows of latents the dense row of the same geometry, context and batch; None if dense does not fit."""

    def place(each: Record) -> tuple[Any, ...]:
        return each["geometry"], each["context"], each["batch"]

    dense = {place(each): each for each in _of(records, "dense") if "us" in each}
    return [each | {"dense": dense.get(place(each))} for each in _of(records, "latent")]


def _codec(records: list[Record]) -> list[str]:
    def row(each: Record) -> tuple[Any, ...]:
        times = [
            f"{each[unit]:,.1f}" if unit in each else "" for unit in ("dense_us", "flashinfer_us", "us", "triton_us")
        ]
        ratio = f"{each['dense_us'] / each['us']:.2f}" if "dense_us" in each else ""
        place = each["geometry"], f"{each['context']:,}", each["batch"], each.get("baseline", "none")
        return *place, *times, ratio, f"{each['gb_per_s']:,.0f}", f"{each['error']:.1e}"

    intro = (
        "Attention of one token a sequence over a full cache of 4-bit rows, all in CUDA graphs, beside the fastest of "
        "torch's attention backends over a dense cache of 16 bits: attention alone, with the products that take "
        "queries to codes and outputs back, without the exact window. GB/s are of rows, which have 3.9 times fewer "
        "bytes than the dense cache. The error is the largest difference from plain torch, relative to the largest "
        "output."
    )
    head = ("geometry", "context", "batch", "dense backend", "dense, us", "FlashInfer, us", "codec, us",
            "codec in Triton, us", "dense / codec", "GB/s", "error")  # fmt: skip
    return _section("Codec: attention", [intro, ""] if records else [], _table(head, map(row, _of(records, "codec"))))


def _kernels(rows: list[Record]) -> list[str]:
    def place(each: Record) -> tuple[Any, ...]:
        return each["geometry"], f"{each['context']:,}", each["batch"]

    def latents(each: Record) -> tuple[Any, ...]:
        return each["layout"], each["kind"]

    def row(each: Record) -> tuple[Any, ...]:
        dense = each["dense"]
        times = [
            "" if one is None else f"{one[unit]:,.{digits}f}"
            for one in (dense, each)
            for unit, digits in (("us", 1), ("gb_per_s", 0))
        ]
        name, ratio = ("none", "") if dense is None else (dense["baseline"], f"{dense['us'] / each['us']:.2f}")
        plain = f"{each['torch_us']:,.1f}" if "torch_us" in each else ""
        return *place(each), *latents(each), name, *times, ratio, plain, f"{each['error']:.1e}"

    where = ("geometry", "context", "batch")
    kinds = ("latents", "cached")
    intro = (
        "One step over a static cache, projections included, as a CUDA graph; *dense* is the fastest of torch's "
        "attention backends. The error is the largest difference from plain torch, relative to the largest output."
    )
    head = (*where, *kinds, "dense by", "dense, us", "GB/s", "latents, us", "GB/s", "dense / latents",
            "in torch, us", "error")  # fmt: skip
    return _section(
        "One attention module, one token", [intro, ""] if rows else [], _table(head, map(row, sorted(rows, key=_order)))
    )


def _order(each: Record) -> tuple[Any, ...]:
    return each["geometry"], each["layout"], each["kind"], each["batch"], each["context"]


def _models(records: list[Record]) -> list[str]:
    def row(each: Record) -> tuple[Any, ...]:
        rate = f"{each['tokens_per_s']:,.1f}" if "tokens_per_s" in each else each.get("reason", "none")
        latents, attention = each.get("layout", ""), each.get("attention", "")
        return each["geometry"], latents, each["kind"], f"{each['context']:,}", each["batch"], rate, attention

    head = ("model", "latents", "cached", "context", "batch", "tokens/s", "attention")
    decoded = [row(each) for each in _of(records, "decode")]
    stages = [
        (each["geometry"], each.get("stage", f"**all of {each.get('method', 'it')}**"), f"{each['seconds']:.1f}",
         _gib(each.get("peak_mib")), _gib(each.get("host_peak_mib")))
        for each in records if each.get("what") in ("compress", "compressed")
    ]  # fmt: skip
    peaks = ("model", "step", "s", "peak on the device, GiB", "peak on the host, GiB")
    return [
        *_section("Whole models, decoding by CUDA graphs", [_LEFT_OUT, ""] if decoded else [], _table(head, decoded)),
        *_section("Largest batch that decodes", _table(head, map(row, _of(records, "largest batch")))),
        *_section("Compression", _table(peaks, stages)),
    ]


def _gib(mib: float | None) -> str:
    return "" if mib is None else f"{mib / 1024:.1f}"
