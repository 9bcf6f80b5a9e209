"""``params.yaml``: every parameter with its meaning, unit and range. Unknown and missing keys are errors.

The defaults here are those of Python, and of the command line unless an option says otherwise. The file spells every
key out, so that it is a complete record of the run; `recalkv preset` writes it from what is written here and in
``presets.yaml``, whose default has fewer windows.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from recalkv.errors import ParameterError

Precision = Literal["auto", "float32", "bfloat16"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_only(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false, which Python counts as numbers, but where they are a choice."""
        choices = get_args(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(value, bool) and not any(choice is value for choice in choices):
            raise PydanticCustomError("number", "must not be true or false")
        return value


S = TypeVar("S", bound=_Section)

Progress = Callable[[str, int, int], None]
"""Called with a step's name, the units done, and their total."""


def silent(step: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


def advancing(bar: Any) -> Progress:
    """Return progress that a tqdm bar shows."""

    def advance(step: str, done: int, total: int) -> None:
        if done == 1:
            bar.reset(total)
            bar.set_description(step)
        bar.update()

    return advance


def public_name(name: str) -> str:
    """A text's or a model's name as records and pages have it, which may be published: of local ones without a path."""
    path = Path(name)
    shown = path.name if path.is_absolute() or path.exists() else name
    return shown.encode(errors="replace").decode()  # names of files need not be UTF-8


def check_length(config: Any, name: str, length: int) -> None:
    """Refuse a length beyond the positions of a model's config; ``name`` is the name of the parameter.

    Raises
    ------
    ParameterError
        If the length exceeds the positions; the message names both.
    """
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise ParameterError(f"{name}={length} exceeds the model's {positions} positions; use at most {positions}.")


class ModelParams(_Section):
    """Which dense model to compress."""

    id: str = Field("embedded", description="`embedded` (SmolLM2-135M), a Hugging Face id, or a local folder")
    revision: str | None = Field(None, description="branch, tag or commit on the hub; null: its default branch")


class _TextParams(_Section):
    text: str = Field(
        "embedded",
        description="`embedded` (articles), embedded-news, embedded-code, wikitext2, ptb, c4, ultrachat, a hub data "
        "set (ID, ID:SUBSET or ID@REVISION), or a file",
    )
    split: str = Field("train", description="split of the data set; ignored for local files")
    field: str = Field("text", description="column that holds the text")


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class CalibrationParams(_TextParams):
    """Calibration sampling (paper: 256 windows of 2048 tokens of WikiText-2)."""

    text: Annotated[list[str], BeforeValidator(_listed)] = Field(  # type: ignore[assignment]
        ["embedded", "embedded-news", "embedded-code"],
        min_length=1,
        description="one or several texts, in equal numbers of windows: "
        "embedded (articles), embedded-news, embedded-code, wikitext2, ptb, c4, ultrachat, a hub data set (ID, "
        "ID:SUBSET or ID@REVISION), or a file",
    )
    samples: int = Field(
        32, ge=1, description="token windows; 16 suffice for latents of the embedded model, larger ones take 32 or more"
    )
    length: int = Field(1024, ge=2, description="tokens per window")
    seed: int = Field(
        0, ge=0, lt=2**32, description="random seed of window sampling, and of the labels sampled for the codec"
    )
    recall: float = Field(
        0.25, ge=0, le=1, description="fraction of windows whose second half repeats passages of the first, so that "
        "long-range reads are calibrated",
    )  # fmt: skip
    batch_size: int = Field(2, ge=1, description="windows per step: changes memory, not results")
    precision: Precision = Field(
        "auto",
        description="type of the matrix products of the calibration passes; auto is bfloat16 where the device "
        "multiplies it natively, else float32. Statistics are float32/64",
    )

    @property
    def in_words(self) -> str:
        """Number, length and texts of the windows, for pages."""
        texts = ", ".join(f"`{public_name(text)}`" for text in self.text)
        return f"{self.samples} x {self.length} tokens of {texts}"


class CompressionParams(_Section):
    """The method and its budget."""

    method: Literal["loss-aware", "recalkv", "palu", "svd"] = Field(
        "loss-aware", description="compression method, compared in docs/results.md"
    )
    ratio: float = Field(0.75, ge=0, lt=1, description="fraction of the dense cache's bytes to remove")
    group_size: int = Field(4, ge=1, description="KV heads per group; all of them if the model has fewer")
    joint: Literal["auto", True, False] = Field("auto", description="keys and values of a group share one latent")
    grouping: Literal["auto", "neighbors", "cka"] = Field(
        "auto", description="which heads share a latent; cka is the paper's HSR"
    )
    allocation: Literal["auto", "water-filling", "fisher", "uniform"] = Field(
        "auto", description="how ranks share the budget"
    )
    refit: Literal["auto", "none", "values", "output"] = Field(
        "auto",
        description="what is refitted on inputs that passed the compressed earlier layers: value factors (the paper's "
        "OVC), or the output projection; auto: the method's own, but none in mixed bits up to a ratio of 0.9",
    )
    bits: Literal["auto", 16, 8, 4, 3, 2, "mixed"] = Field(
        "auto",
        description="bits per cached element, of a cache whose size `ratio` sets; 16 leaves latents in the model's "
        "type, mixed gives every direction 0 to 8 under the one budget, auto is mixed where the allocation is "
        "water-filling and rank_multiple is 1, else 16. Below 16, `ratio` counts bytes against a dense 16-bit cache",
    )  # fmt: skip
    exact_window: int = Field(
        32,
        ge=0,
        le=8192,
        description="most recent tokens kept as unrounded latents beside their quantized rows, below 16 bits only; "
        "they cost a fixed size per sequence, which `ratio` does not count",
    )
    rank_multiple: int = Field(
        1, ge=1, description="rounding step of each group's rank; 16 or 32 suits GPUs, with 16-bit latents alone"
    )
    damping: float | None = Field(
        None,
        ge=0,
        le=1000,
        description="ridge on Gram matrices (in the loss metric, also on the gradients' second moments), relative to "
        "their mean diagonal; null: 0.1 in the loss metric, for out-of-domain text, else 1e-6, for conditioning",
    )


class CodecParams(_Section):
    """The codec of post-RoPE keys and values, stored beside the dense model."""

    bits: float = Field(
        4, gt=0, le=8, description="mean bits per cached element, scales included; fractions such as 3.5 are allowed"
    )
    context: int | None = Field(None, ge=1, description="context length to fit for, tokens; null: the model's maximum")
    samples: int = Field(12, ge=1, description="use only the first N calibration windows; few are enough")


class EvaluationParams(_TextParams):
    """Perplexity, live cache, and sample texts, dense beside compressed."""

    split: str = Field("test", description="split of the data set; ignored for local files")
    window: int = Field(512, ge=2, description="tokens per perplexity window; windows do not overlap")
    max_windows: int | None = Field(
        15,
        ge=1,
        description="use at most this many windows, spread over the documents, or the first ones of wikitext2, ptb and "
        "c4; null for all",
    )
    further_texts: list[str] = Field(
        default_factory=list,
        description="more texts to measure on: embedded-news, embedded-code, wikitext2, ptb or c4, or local files",
    )
    prefill: int | None = Field(
        None,
        ge=1,
        description="tokens of a perplexity window that are read in one pass, the others being decoded one by one "
        "through the cache; null for all in one pass",
    )
    precision: Precision = Field(
        "auto",
        description="type of the matrix products where perplexity is measured, dense and compressed alike; auto is "
        "float32 on a CPU, since bfloat16 rounds more than a 4-bit cache does; elsewhere as in calibration.precision",
    )


class ZeroShotParams(_Section):
    """Multiple-choice accuracy by lm-eval (paper, Table 1), dense beside compressed."""

    tasks: list[str] = Field(
        default_factory=lambda: ["openbookqa", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande"],
        min_length=1,
        description="lm-eval's names",
    )
    items: str | None = Field(
        None, description="folder with TASK.SPLIT.jsonl in the schema of the hub's sets; null for the hub"
    )
    limit: int | None = Field(50, ge=2, description="first items of each task; null for all")


class NeedleParams(_Section):
    """Retrieval from long contexts: numbers hidden in evaluation.text and asked for at the end."""

    lengths: list[Annotated[int, Field(ge=64)]] = Field(
        default_factory=lambda: [2048, 4096, 8000], min_length=1, description="prompt lengths, tokens"
    )
    depths: list[Annotated[float, Field(ge=0, le=1)]] = Field(
        default_factory=lambda: [0.0, 0.33, 0.67, 1.0],
        min_length=1,
        max_length=10,
        description="places of the numbers, fractions of the prompt; every prompt hides one at each",
    )
    trials: int = Field(10, ge=1, description="prompts of each length")


class LongBenchParams(_Section):
    """LongBench (paper, Table 2), dense beside compressed; at least one task."""

    tasks: list[str] = Field(
        default_factory=list, description="of qasper, qmsum, multi_news, trec, triviaqa, samsum, lcc, repobench-p"
    )
    items: str | None = Field(
        None, description="folder with TASK.SPLIT.jsonl in the schema of the hub's set; null for the hub"
    )
    limit: int | None = Field(None, ge=1, description="first items of each task; null for all")
    max_length: int | None = Field(
        None,
        ge=16,
        description="tokens of a prompt, longer ones are truncated in the middle; null for the model's limit",
    )


class LatencyParams(_Section):
    """Times of one attention module and of whole-model decoding, dense beside compressed (paper, Fig. 4)."""

    contexts: list[Annotated[int, Field(ge=16)]] = Field(
        default_factory=lambda: [1024, 4096], min_length=1, description="tokens that a decoding step attends to"
    )


class RuntimeParams(_Section):
    """Where things run; changes no result beyond rounding."""

    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, ...")


class Params(_Section):
    """The whole of ``params.yaml``."""

    model: ModelParams
    calibration: CalibrationParams
    compression: CompressionParams
    codec: CodecParams
    evaluation: EvaluationParams
    zeroshot: ZeroShotParams
    needle: NeedleParams
    longbench: LongBenchParams
    latency: LatencyParams
    runtime: RuntimeParams


class _UniqueKeys(yaml.SafeLoader):
    """YAML whose mappings name each key once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(problem=f"{key!r} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def load_params(path: str | Path, changes: Sequence[str] = ()) -> Params:
    """Read and check a parameter file; every key of every section must be there.

    Parameters
    ----------
    path
        The file.
    changes
        ``SECTION.KEY=VALUE`` in place of the file's, values in YAML.
    """
    path = Path(path)
    try:
        raw = yaml.load(path.read_text(), _UniqueKeys)
    except OSError as error:
        what = "cannot be read" if path.exists() else "does not exist"
        raise ParameterError(f"parameter file {path} {what}; run from the project's folder.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(raw, Mapping):
        raise ParameterError(f"{path} must hold the sections {', '.join(Params.model_fields)}.")
    for change in changes:
        name, equals, value = change.partition("=")
        section, dot, key = name.partition(".")
        if equals and dot and section not in Params.model_fields:
            raise ParameterError(
                f"--set {change!r}: section {section!r} is unknown; choose one of {', '.join(Params.model_fields)}."
            )
        if not (equals and dot) or not isinstance(raw.get(section), dict):
            raise ParameterError(f"--set {change!r} must be SECTION.KEY=VALUE, such as compression.ratio=0.7.")
        try:
            raw[section][key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ParameterError(f"--set {change!r}: the value is not valid YAML: {error}; quote it.") from error
    return parse_params(raw, str(path))


def parse_params(raw: Mapping[str, Any], where: str) -> Params:
    """Check a nested mapping; see :func:`load_params`."""
    for name, field in Params.model_fields.items():
        section = raw.get(name)
        known = field.annotation
        assert isinstance(known, type) and issubclass(known, BaseModel)
        if not isinstance(section, Mapping):
            raise ParameterError(f"{where}: section `{name}` is missing; it needs {', '.join(known.model_fields)}.")
        missing = [key for key in known.model_fields if key not in section]
        if missing:
            defaults = known.model_construct().model_dump()
            remedy = ", ".join(f"{name}.{key}: {defaults[key]!r}" for key in missing)
            unknown = [f"`{name}.{key}`" for key in section if key not in known.model_fields]
            beside = f" unknown there: {', '.join(unknown)}." if unknown else ""
            raise ParameterError(f"{where}: missing parameter(s); add {remedy} (the defaults).{beside}")
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        raise ParameterError("\n".join(_explain(item, where, Params) for item in error.errors())) from error


def parse_section(section: type[S], values: Mapping[str, Any], where: str) -> S:
    """Check the values of one section; what is not given has its default."""
    try:
        return section(**values)
    except ValidationError as error:
        raise ParameterError("\n".join(_explain(item, where, section) for item in error.errors())) from error


def _explain(item: Any, where: str, model: Any) -> str:
    """One line for one pydantic error: the key, the value, the rule."""
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        for part in item["loc"][:-1]:
            model = model.model_fields[part].annotation
        return f"{where}: unknown parameter `{key}`; known here: {', '.join(model.model_fields)}."
    return f"{where}: {key}={item['input']!r} is not allowed: {item['msg']}."
