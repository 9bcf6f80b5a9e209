"""Long contexts: LongBench (the paper's Table 2), generated through the cache.

Data and metrics are those of lm-eval's tasks. Prompts, truncation and answer post-processing follow LongBench's
official code, from which lm-eval 0.4.13 differs in five ways: it puts one newline instead of two before the question of
TriviaQA and SAMSum; it puts no newline after ``Next line of code:`` (LCC, RepoBench-P); it truncates the beginning of
long prompts instead of the middle; it ends answers of TREC, TriviaQA and SAMSum at the first newline even if no text
precedes it; and it applies the chat template to few-shot and code tasks, too.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recalkv.errors import ParameterError, needing
from recalkv.evaluation.suites.items import check_columns, first_columns, local_data, local_override, quiet, run_tasks
from recalkv.evaluation.suites.suite import Progress, Suite, table
from recalkv.params import LongBenchParams, Params

TASKS = ("qasper", "qmsum", "multi_news", "trec", "triviaqa", "samsum", "lcc", "repobench-p")
"""The eight datasets of the paper."""

# Few-shot and code prompts, to which LongBench applies no chat template.
_PLAIN = {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}
# Tasks that only score the first line of an answer.
_FIRST_LINE = {"trec", "triviaqa", "samsum"}
_PROMPTS = {
    "triviaqa": "Answer the question based on the given passage. Only give me the answer and do not output any other "
    "words. The following are some examples.\n\n{{context}}\n\n{{question}}",
    "samsum": "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{{context}}\n\n"
    "{{question}}",
    "lcc": "Please complete the code given below. \n{{context}}Next line of code:\n",
    "repobench-p": "Please complete the code given below. \n{{context}}{{question}}Next line of code:\n",
}


@dataclass(frozen=True)
class LongBenchScore:
    """Scores on one dataset.

    Attributes
    ----------
    task, version
        Name in :data:`TASKS`, and version of lm-eval's task.
    scores
        Score of each item, 0 to 1, in dataset order: F1, ROUGE-L, accuracy or code similarity, as LongBench defines it.
    """

    task: str
    version: str
    scores: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean score, percent."""
        return 100 * sum(self.scores) / len(self.scores)


def longbench(
    model: Any,
    tokenizer: Any,
    task: str,
    items: Path | None,
    wanted: LongBenchParams,
    progress: Progress = lambda: None,
) -> LongBenchScore:
    """Generate and score the answers of one dataset.

    Parameters
    ----------
    model, tokenizer
        A causal Hugging Face model, dense or compressed, and its tokenizer.
    task
        One of :data:`TASKS`.
    items
        Local .jsonl file in the schema of the hub dataset, or None for the hub.
    wanted
        ``limit`` (number of items, from the first) and ``max_length`` (maximum tokens of a prompt; longer prompts lose
        their middle; None for as many as the positions of the model allow).
    progress
        Called after each item.

    Raises
    ------
    ParameterError
        If the task is unknown, or the positions of the model leave no room for prompts.
    DataError
        If a local file lacks a column.
    """
    check_sets({task: items}, model.config, wanted)
    with quiet():
        with needing("eval"):
            import jieba  # noqa: F401  (imported by lm-eval's metrics)
            from lm_eval import tasks as known_tasks
            from lm_eval.tasks import TaskManager
        name = f"longbench_{task}"
        changes: dict[str, Any] = {"task": name}
        question = "question"
        if items is not None:
            question = _question_column(first_columns(items))
            changes |= local_override(items)
            if question == "input":
                changes["process_docs"] = _rename_input
        if task in _PROMPTS:
            changes["doc_to_text"] = _PROMPTS[task]
        # Index LongBench alone: indexing all tasks takes seconds.
        manager = TaskManager(include_defaults=False, include_path=str(_folder(known_tasks) / "longbench"))
        reader = _reader(model, tokenizer, task, wanted, progress)
        result = run_tasks(reader, [{"group": f"{name} (official prompts)", "task": [changes]}], manager, wanted.limit)
    samples = sorted(result["samples"][name], key=lambda sample: sample["doc_id"])
    return LongBenchScore(task, str(result["versions"][name]), tuple(float(sample["score"]) for sample in samples))


class LongBench(Suite):
    """LongBench datasets of ``longbench.tasks``."""

    def __init__(self, params: Params, dense: Path) -> None:
        from transformers import AutoConfig

        wanted = self._wanted = params.longbench
        if not wanted.tasks:
            raise ParameterError(f"longbench.tasks is empty; name some of {', '.join(TASKS)}.")
        items: dict[str, Path | None] = dict.fromkeys(wanted.tasks)
        if wanted.items is not None:
            items |= local_data(Path(wanted.items), [task for task in items if task in TASKS])
        check_sets(items, AutoConfig.from_pretrained(dense, trust_remote_code=False), wanted)
        self._items = items

    def score(self, model: Any, tokenizer: Any, progress: Progress) -> list[LongBenchScore]:
        """Return the scores of each dataset."""
        return [longbench(model, tokenizer, task, path, self._wanted, progress) for task, path in self._items.items()]

    def metrics(self, dense: list[LongBenchScore], compressed: list[LongBenchScore]) -> dict[str, Any]:
        """Return mean scores, 0 to 100 as in the paper."""
        sides = {"dense": dense, "compressed": compressed}
        return {
            "average": {side: sum(score.mean for score in scores) / len(scores) for side, scores in sides.items()},
            "tasks": {
                before.task: {"items": len(before.scores), "dense": before.mean, "compressed": after.mean}
                for before, after in zip(dense, compressed, strict=True)
            },
        }

    def page(self, metrics: dict[str, Any]) -> list[str]:
        """Render the page, with one row per dataset."""
        scores = [(task, str(score["items"]), score) for task, score in metrics["tasks"].items()]
        rows = [
            [task, items, f"{score['dense']:.2f}", f"{score['compressed']:.2f}"]
            for task, items, score in [*scores, ("average", "", metrics["average"])]
        ]
        return ["# LongBench", "", *table(["set", "items", "dense", "compressed"], rows)]


def check_sets(items: Mapping[str, Path | None], config: Any, wanted: LongBenchParams) -> None:
    """Refuse datasets that cannot be answered or scored, before the first item is run.

    Raises
    ------
    ParameterError
        If a task is unknown, or prompts may exceed the model's positions.
    DataError
        If a local file lacks a column.
    """
    unknown = [task for task in items if task not in TASKS]
    if unknown:
        raise ParameterError(f"longbench.tasks: {unknown[0]!r} is not one of {', '.join(TASKS)}.")
    positions = _positions(config)
    if wanted.max_length is not None and positions is not None and wanted.max_length >= positions:
        raise ParameterError(
            f"longbench.max_length={wanted.max_length} leaves no positions for the answer, of which the model has "
            f"{positions} in all; lower it, or set it to null."
        )
    for task, path in items.items():
        if path is not None:
            needed = ["context", "answers", _question_column(first_columns(path))]
            check_columns(task, path, needed + (["all_classes"] if task == "trec" else []))


def _positions(config: Any) -> int | None:
    """Return the positions of a model (of the language model if it is multimodal); None if the config names none."""
    found: int | None = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found


def _question_column(columns: Collection[str]) -> str:
    """Return the name of the question column: ``input`` as LongBench published it, ``question`` in lm-eval's copy."""
    return "input" if "input" in columns and "question" not in columns else "question"


def shortened(tokenizer: Any, prompt: str, length: int) -> str:
    """Cut the middle out of the text of a prompt of more than ``length`` tokens (LongBench's truncation)."""
    ids = tokenizer(prompt)["input_ids"]
    if len(ids) <= length:
        return prompt
    half = length // 2
    return "".join(tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[len(ids) - half :]))


def _folder(module: Any) -> Path:
    return Path(module.__file__).parent


def _rename_input(documents: Any) -> Any:
    return documents.rename_column("input", "question")


def _reader(model: Any, tokenizer: Any, task: str, wanted: LongBenchParams, progress: Progress) -> Any:
    """Return an lm-eval adapter that handles long prompts as LongBench's official code does."""
    from lm_eval.api.model import LM

    positions = _positions(model.config)
    device = next(model.parameters()).device
    end = model.config.eos_token_id
    ends = [] if end is None else list(end) if isinstance(end, (list, tuple)) else [end]

    def encoded(prompt: str) -> list[int]:
        special = True
        if getattr(tokenizer, "chat_template", None) and task not in _PLAIN:
            message = [{"role": "user", "content": prompt}]
            prompt, special = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True), False
        ids: list[int] = tokenizer(prompt, add_special_tokens=special)["input_ids"]
        return ids

    # Twice the tokens that the chat template adds: a cut and the template may change how text is tokenized.
    added = 2 * len(encoded(""))

    def answer(prompt: str, new_tokens: int) -> str:
        room = (positions or 10**9) - new_tokens - added
        if room < 1:
            raise ParameterError(
                f"longbench.tasks: {task} answers in {new_tokens} tokens, and with {added} for the chat template the "
                f"model's {positions} positions leave none for its prompts; leave it out."
            )
        inputs = torch.tensor([encoded(shortened(tokenizer, prompt, min(wanted.max_length or room, room)))]).to(device)
        options: dict[str, Any] = {}
        if task == "samsum":
            newline = tokenizer("\n", add_special_tokens=False)["input_ids"][-1]
            options = {"min_new_tokens": 1, "eos_token_id": [*ends, newline]}
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=ends[0] if ends else 0,
            **options,
        )
        text = str(tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True))
        return text.lstrip("\n").split("\n")[0] if task in _FIRST_LINE else text

    class Reader(LM):  # type: ignore[misc]
        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            answers = []
            for request in requests:
                prompt, options = request.args
                answers.append(answer(prompt, options["max_gen_toks"]))
                progress()
            return answers

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            raise NotImplementedError("LongBench's answers are generated")

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            raise NotImplementedError("LongBench's answers are generated")

    return Reader()
