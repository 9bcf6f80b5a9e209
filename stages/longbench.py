"""Stage 9f: LongBench, dense beside compressed. Finished sets are kept: an interrupted run goes on where it stopped."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import typer
from tqdm import tqdm

import recalkv  # noqa: F401  (registers the compressed classes)
from recalkv.longbench import LongBenchScore, longbench
from recalkv.source import checkpoint_dtype
from recalkv.zeroshot import local_data
from stages.common import DataOption, ParamsOption, ReportsOption, Stage, running, write_json


def main(
    params: ParamsOption = Path("params.yaml"),
    data: DataOption = Path("data"),
    reports: ReportsOption = Path("reports"),
) -> None:
    """Answer the items of longbench.tasks with both models; write REPORTS/longbench.json."""
    with running("longbench", params, data) as stage:
        wanted = stage.params.longbench
        items: dict[str, Path | None] = dict.fromkeys(wanted.tasks)
        if wanted.items is not None:
            items |= local_data(Path(wanted.items), wanted.tasks)
        scores = {
            side: [_score(stage, side, folder, task, path) for task, path in items.items()]
            for side, folder in (("dense", stage.model().folder), ("compressed", data / "compressed"))
        }
        write_json(reports / "longbench.json", _metrics(scores))


def _score(stage: Stage, side: str, folder: Path, task: str, items: Path | None) -> LongBenchScore:
    """Scores of one set, from where they are kept if nothing has changed."""
    wanted = stage.params.longbench
    setting = {**wanted.model_dump(), "tasks": task, "items": _digest(items), "model": _checkpoint_digest(folder)}
    key = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:24]
    path = stage.data / "longbench" / f"{key}.json"
    if not path.exists():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=checkpoint_dtype(folder)).to(stage.device).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        with tqdm(desc=f"longbench, {task}, {side}", unit="item", file=sys.stderr, mininterval=1.0) as bar:
            score = longbench(
                model, tokenizer, task, items,
                limit=wanted.limit, max_length=wanted.max_length, chat=wanted.chat, progress=bar.update,
            )  # fmt: skip
        write_json(path, {"version": score.version, "scores": score.scores})
    kept = json.loads(path.read_text())
    return LongBenchScore(task, kept["version"], tuple(kept["scores"]))


def _digest(path: Path | None) -> str | None:
    return None if path is None else hashlib.sha256(path.read_bytes()).hexdigest()


def _checkpoint_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in [*sorted(folder.glob("*.safetensors")), folder / "config.json"]:
        with path.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _metrics(scores: dict[str, list[LongBenchScore]]) -> dict[str, Any]:
    """Reproducible figures, 0 to 100 as in the paper."""
    if not scores["dense"]:
        return {"tasks": {}}
    tasks = {
        dense.task: {"items": len(dense.scores), "dense": dense.mean, "compressed": ours.mean}
        for dense, ours in zip(scores["dense"], scores["compressed"], strict=True)
    }
    return {
        "average": {side: sum(score.mean for score in each) / len(each) for side, each in scores.items()},
        "tasks": tasks,
    }


if __name__ == "__main__":
    typer.run(main)
