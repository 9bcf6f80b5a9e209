"""Stage 9f: LongBench, dense beside compressed. Finished sets are kept: an interrupted run goes on where it stopped."""

import functools
import sys
from pathlib import Path
from typing import Any

import typer
from tqdm import tqdm

from recalkv.evaluation.longbench import TASKS, LongBenchScore, check_sets, longbench
from recalkv.evaluation.zeroshot import local_data
from recalkv.kernels.module import choose_kernels
from recalkv.model.loading import load_model
from recalkv.model.source import checkpoint_dtype
from stages.common import DataOption, ParamsOption, ReportsOption, Stage, running, write_json
from stages.finished import checkpoint_digest, file_digest, kept


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
            items |= local_data(Path(wanted.items), [task for task in wanted.tasks if task in TASKS])
        if items:
            from transformers import AutoConfig, AutoTokenizer

            dense = stage.model().folder
            tokenizer = AutoTokenizer.from_pretrained(dense, trust_remote_code=False)
            check_sets(items, AutoConfig.from_pretrained(dense), tokenizer, wanted.max_length, wanted.chat)
        folders = {"dense": stage.model().folder, "compressed": data / "compressed"} if items else {}
        scores = {side: _scores(stage, side, folder, items) for side, folder in folders.items()}
        write_json(reports / "longbench.json", _metrics(scores))


def _scores(stage: Stage, side: str, folder: Path, items: dict[str, Path | None]) -> list[LongBenchScore]:
    """Scores of one model, set by set; finished sets are kept, and the model is loaded if one is not."""
    from transformers import AutoTokenizer

    wanted = stage.params.longbench

    @functools.cache
    def loaded() -> tuple[Any, Any]:
        model = load_model(folder, stage.device, checkpoint_dtype(folder), stage.params.runtime.device_map)
        choose_kernels(model, stage.params.runtime.kernels)
        return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

    def compute(task: str) -> dict[str, Any]:
        with tqdm(desc=f"longbench, {task}, {side}", unit="item", file=sys.stderr, mininterval=1.0) as bar:
            score = longbench(
                *loaded(), task, items[task],
                limit=wanted.limit, max_length=wanted.max_length, chat=wanted.chat, progress=bar.update,
            )  # fmt: skip
        return {"version": score.version, "scores": score.scores}

    shared = {"model": checkpoint_digest(folder), **wanted.model_dump(include={"limit", "max_length", "chat"})}
    scores = []
    for task, path in items.items():
        setting = {**shared, "task": task, "items": file_digest(path)}
        result = kept(stage, setting, functools.partial(compute, task))
        scores.append(LongBenchScore(task, result["version"], tuple(result["scores"])))
    return scores


def _metrics(scores: dict[str, list[LongBenchScore]]) -> dict[str, Any]:
    """Reproducible figures, 0 to 100 as in the paper."""
    if not scores:
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
