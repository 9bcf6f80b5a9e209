"""`recalkv generate` and `recalkv chat`: try a model, dense, with a codec or compressed."""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from recalkv.errors import DataError, user_errors
from recalkv.params import RuntimeParams
from recalkv.presets import describe
from recalkv.text.unicode import read_standard_input, well_formed

_DEVICE = RuntimeParams().device
_Model = Annotated[str, typer.Argument(help="Dense or compressed model: a folder, a hub id, or `embedded`.")]
_Codec = Annotated[Path | None, typer.Option(help="Folder of a codec fitted to this model.")]
_Tokens = Annotated[int, typer.Option(help="Maximum number of new tokens.", min=1)]
_Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 for greedy decoding.", min=0)]
_Device = Annotated[str, typer.Option(help=describe(RuntimeParams.model_fields["device"]))]


def generate(
    model: _Model,
    prompt: Annotated[str, typer.Argument(help="Text to continue; `-` for standard input.")],
    codec: _Codec = None,
    tokens: _Tokens = 128,
    temperature: _Temperature = 0.0,
    device: _Device = _DEVICE,
) -> None:
    """Continue a prompt, streaming the output."""
    with user_errors():
        loaded, tokenizer = _open(model, codec, device)
        text = read_standard_input() if prompt == "-" else well_formed(prompt)[0]
        inputs = tokenizer(text, return_tensors="pt")
        if not inputs["input_ids"].numel():
            raise DataError(f"the prompt {text!r} has no tokens; give a text to continue.")
        _answer(loaded, tokenizer, inputs, tokens, temperature)


def chat(
    model: _Model,
    codec: _Codec = None,
    tokens: _Tokens = 512,
    temperature: _Temperature = 0.0,
    device: _Device = _DEVICE,
) -> None:
    """Chat with a model; end with an empty line or Ctrl-D."""
    with user_errors():
        loaded, tokenizer = _open(model, codec, device)
        if not tokenizer.chat_template:
            raise DataError(f"{model} has no chat template, as base models have none; use `recalkv generate`.")
        messages: list[dict[str, str]] = []
        while said := _line():
            messages.append({"role": "user", "content": said})
            inputs = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            answer = _answer(loaded, tokenizer, inputs, tokens, temperature)
            messages.append({"role": "assistant", "content": answer})


def _line() -> str:
    try:
        return read_standard_input(line=True).strip()
    except EOFError:
        return ""


def _open(name: str, codec: Path | None, device: str) -> tuple[Any, Any]:
    """Load the model and its tokenizer."""
    from recalkv.codec.sidecar import Codec
    from recalkv.kernels.decoder import choose_kernels
    from recalkv.model.device import device_of
    from recalkv.model.loading import load_model
    from recalkv.model.source import checkpoint_dtype, checkpoint_folder, resolve_model
    from recalkv.runtime.models import use_codec
    from recalkv.text.corpora import load_tokenizer

    where = device_of(device)
    own = None if codec is None else Codec.load(codec)
    with tempfile.TemporaryDirectory(prefix="recalkv-") as scratch:
        if own is None:
            folder = checkpoint_folder(name, Path(scratch))
        else:
            folder = resolve_model(name, own.revision_of(name), Path(scratch), any_family=True).folder
        model = load_model(folder, where, checkpoint_dtype(folder))
        tokenizer = load_tokenizer(folder)
    if own is None:
        choose_kernels(model)
    else:
        use_codec(model, own)
    return model, tokenizer


def _answer(model: Any, tokenizer: Any, inputs: Any, tokens: int, temperature: float) -> str:
    """Stream the model's answer, and return it."""
    from transformers import TextStreamer

    ids, sampling = inputs["input_ids"], temperature > 0
    output = model.generate(
        **inputs.to(model.device),
        max_new_tokens=tokens,
        do_sample=sampling,
        **({"temperature": temperature} if sampling else {"temperature": None, "top_p": None, "top_k": None}),
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
