"""`recalkv eval`: one page that compares a compressed model with the dense one."""

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recalkv.errors import DataError, ModelUnavailableError, ParameterError, ReCalKVError, user_errors
from recalkv.params import EvaluationParams, RuntimeParams, public_name
from recalkv.presets import describe
from recalkv.store.folders import held_json, is_stage_output

if TYPE_CHECKING:
    from recalkv.codec.sidecar import Codec


def evaluate(
    small: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Compressed model, or with --codec the dense one: a folder or a hub id."),
    ],
    codec: Annotated[Path | None, typer.Option(help="Codec fitted to this model: a folder or a hub id.")] = None,
    dense: Annotated[str, typer.Option(help="Dense model; default: the one recorded in the checkpoint.")] = "",
    text: Annotated[
        list[str], typer.Option(help=f"{describe(EvaluationParams.model_fields['text'])}; repeat it for several")
    ] = ["embedded"],  # noqa: B006
    split: Annotated[str, typer.Option(help=describe(EvaluationParams.model_fields["split"]))] = "test",
    field: Annotated[str, typer.Option(help=describe(EvaluationParams.model_fields["field"]))] = "text",
    tasks: Annotated[str, typer.Option(help="Comma-separated lm-eval tasks; data from the hub, or from --items.")] = "",
    items: Annotated[Path | None, typer.Option(help="Folder of TASK.SPLIT.jsonl in the hub's format.")] = None,
    limit: Annotated[int | None, typer.Option(help="Items of each task; default 100.", min=2)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Quick run: about a minute for a small model.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Markdown file; JSON beside it. Default: evaluation.md in the folder, or NAME-evaluation.md here, for "
            "a hub model or the pipeline's output."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help=describe(RuntimeParams.model_fields["device"]))] = RuntimeParams().device,
) -> None:
    """Compare a compressed model, or a codec, with the dense model."""
    with user_errors():
        home = codec or Path(small)
        # For a hub model, and where the next `dvc repro` would delete it, the page goes to the current folder.
        elsewhere = Path(f"{home.resolve().name}-evaluation.md")
        place = out or (home / "evaluation.md" if home.is_dir() and not is_stage_output(home) else elsewhere)
        _check_place(place, named=out is not None)
        names = [name.strip() for name in tasks.split(",") if name.strip()]
        for option, given in (("--items", items), ("--limit", limit)):
            if given is not None and not names:
                raise ParameterError(f"{option} {given} is for --tasks, which names none; name the tasks.")
        found: dict[str, Path | None] = dict.fromkeys(names)
        if names:
            from recalkv.evaluation.suites.items import local_data
            from recalkv.evaluation.suites.zeroshot import check_tasks

            found |= {} if items is None else local_data(items, names)
            check_tasks(found)

        from dataclasses import replace

        from recalkv.codec.sidecar import Codec
        from recalkv.evaluation.comparison import FULL, QUICK, compare, exact_window_of, positions_of, possible
        from recalkv.model.device import device_of
        from recalkv.reports.comparison import page, write
        from recalkv.text.corpora import load_tokenizer, main_documents, main_windows
        from recalkv.text.documents import check_name
        from recalkv.text.windows import joined_tokens

        for each in text:
            check_name(each)
        shown = {each: public_name(each) for each in dict.fromkeys(text)}
        if len(set(shown.values())) < len(shown):
            raise ParameterError(f"--text: two files have one name, of {', '.join(shown)}; rename one.")
        where = device_of(device)
        if codec is not None and dense:
            raise ParameterError(f"--codec {codec} is measured on MODEL itself; leave out --dense {dense}.")
        fitted = None if codec is None else Codec.load(codec)
        # Before a model is downloaded for them.
        documents = {
            name: main_documents(EvaluationParams(text=each, split=split, field=field)) for each, name in shown.items()
        }
        with tempfile.TemporaryDirectory(prefix="recalkv-") as scratch:
            folder, reference, known = _models(small, dense, fitted, Path(scratch))
            files = {name for each, name in shown.items() if Path(each).is_file()}
            calibrated, part = _calibrated_on(fitted, folder)
            for name in sorted(calibrated & set(shown.values())):
                if name in files or split == part:
                    what = f"a file {name}" if name in files else f"the {split} part of {name}"
                    typer.echo(f"warning: {what} was also calibrated on, so figures on it are too good", err=True)
            if not known and out is None:
                place = elsewhere  # the checkpoint's card does not describe another model
                _check_place(place, named=False)
            tokenizer = load_tokenizer(folder)
            wanted = possible(
                replace(QUICK if quick else FULL, tasks=found, limit=limit or 100),
                positions_of(folder),
                exact=exact_window_of(folder),
            )
            texts = {
                name: wanted.evaluation.model_copy(update={"text": each, "split": split, "field": field})
                for each, name in shown.items()
            }
            windows = {name: main_windows(tokenizer, each, documents[name]) for name, each in texts.items()}
            haystack = joined_tokens(tokenizer, documents[shown[text[0]]])
            figures, spec = compare(fitted or folder, reference, windows, haystack, wanted, where, _printed_steps())
        try:
            written = write(figures, spec, place)  # before standard output, which may be closed
        except Exception:
            print(page(figures, spec))  # figures that took long are not lost
            raise
        print(page(figures, spec))
        print(f"written to {', '.join(map(str, written))}")


def _calibrated_on(codec: "Codec | None", folder: Path) -> tuple[set[str], str | None]:
    """Return the names of the texts that a codec, or the latents of a checkpoint, were calibrated on; and their split.

    Side-cars do not record the split.
    """
    from recalkv.model.source import load_config
    from recalkv.model.spec import LatentSpec

    if codec is not None:
        return set(codec.record.get("texts", ())), None
    record = LatentSpec.from_config(load_config(folder, str(folder))).calibration or {}
    return set(record.get("text", ())), record.get("split")


def _check_place(place: Path, named: bool) -> None:
    """Refuse a page that cannot be written, before there are figures to lose; or ``named``, one that is another's."""
    parent = place.absolute().parent
    if place.suffix != ".md" or not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise ParameterError(f"--out {place} must be a file .md in a writable folder; the JSON goes beside it.")
    beside = place.with_suffix(".json")
    for each in (beside, place) if named else (beside,):
        if each.exists() and "perplexity" not in held_json(beside):
            raise ParameterError(
                f"--out {place} would replace {each}, and {beside} holds no evaluation; name another file."
            )


def _models(small: str, dense: str, codec: "Codec | None", scratch: Path) -> tuple[Path, Path, bool]:
    """Return the folders of the compressed and the dense model, and whether the one is known to be of the other.

    With a codec, both are the folder of MODEL.
    """
    from recalkv.model.families import text_config
    from recalkv.model.modeling import register
    from recalkv.model.source import checkpoint_folder, load_config, resolve_model
    from recalkv.model.spec import LatentSpec

    if codec is not None:
        folder = resolve_model(small, codec.revision_of(small), scratch, any_family=True).folder
        return folder, folder, True
    folder = checkpoint_folder(small, scratch)
    register()
    config = load_config(folder, small)
    if not hasattr(config, "recalkv"):
        raise ParameterError(
            f"{small} is a dense model; name a checkpoint of `recalkv compress`, or a codec of this model (--codec)."
        )
    source = LatentSpec.from_config(config).source
    named = dense or source.get("name")
    if not named:
        raise ParameterError(f"{small} does not say what it was made of; name the dense model (--dense).")
    try:
        reference = resolve_model(named, None if dense else source.get("revision"), scratch)
    except ModelUnavailableError as error:
        if dense:
            raise
        raise ModelUnavailableError(
            f"the dense model recorded in {small}, {named!r}, cannot be found; name it with --dense. ({error})"
        ) from error
    own, other = (text_config(load_config(each, str(each))) for each in (folder, reference.folder))
    for size in ("hidden_size", "num_hidden_layers", "vocab_size"):
        if getattr(own, size) != getattr(other, size):
            raise ParameterError(
                f"{named} is not the dense model of {small}: its {size} is {getattr(other, size)}, not "
                f"{getattr(own, size)}; name that model (--dense)."
            )
    known = source.get("fingerprint") in (None, reference.fingerprint)
    if not known:
        typer.echo(f"warning: {small} was not compressed from {named}: the fingerprints differ", err=True)
    return folder, reference.folder, known


def quick_check(out: Path, dense: Path, texts: Any, calibration: Any, device: Any) -> None:
    """Run the quick evaluation after a compression, on windows that calibration did not see.

    The compression has finished, so a failed evaluation is reported, not raised.
    """
    from recalkv.evaluation.comparison import QUICK, compare, exact_window_of, positions_of, possible
    from recalkv.model.modeling import register
    from recalkv.reports.comparison import WITHIN, advice, with_error, write
    from recalkv.text.corpora import held_out_windows, load_tokenizer
    from recalkv.text.windows import joined_tokens

    start = time.monotonic()
    # Otherwise transformers warns about the unknown model type when it loads the tokenizer.
    register()
    try:
        tokenizer = load_tokenizer(out)
        wanted = possible(QUICK, positions_of(out), exact=exact_window_of(out))
        count, window = wanted.evaluation.max_windows or 8, wanted.evaluation.window
        held_out = held_out_windows(tokenizer, texts, calibration, count, window)
        names = ", ".join(map(public_name, texts))
        haystack = joined_tokens(tokenizer, next(iter(texts.values())))
        figures, spec = compare(out, dense, {f"{names}, held out": held_out}, haystack, wanted, device)
        write(figures, spec, out / "evaluation.md")
    except Exception as error:  # the checkpoint is written in any case
        kind = "" if isinstance(error, ReCalKVError) else f"{type(error).__name__}: "
        hint = "give more text" if isinstance(error, DataError) else "`recalkv eval` can be run later"
        print(f"not evaluated: {kind}{error} ({hint})")
        return
    own, cache = figures["perplexity"], figures["cache"]
    needle = figures.get("needle")
    digits = f", digits found {needle['compressed']['found']:.0%} ({needle['dense']['found']:.0%})" if needle else ""
    print(
        f"{out / 'evaluation.md'}: perplexity {own['compressed']:.2f} ({own['dense']:.2f}), excess "
        f"{with_error(own, 'excess')} nats, KL {own['kl_nats']:.4f}, top-1 "
        f"{own['top1_agreement']:.1%}, {cache['compressed_bytes_per_token']:,.0f} bytes per token "
        f"({cache['reference_bytes_per_token']:,.0f}){digits}; dense in brackets; {time.monotonic() - start:.0f} s"
    )
    for line in advice(figures, spec) or [f"{WITHIN}; `recalkv eval` measures more"]:
        print(f"  {line}")


def _printed_steps() -> Any:
    """Return a callback that prints each step as it begins."""
    start = time.monotonic()
    return lambda step: typer.echo(f"{time.monotonic() - start:5.0f} s  {step}", err=True)
