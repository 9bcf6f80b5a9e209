"""`recalkv generate` and `recalkv chat`: try a model, dense, with a codec or compressed."""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from recalkv.errors import DataError, user_errors
from recalkv.params import RuntimeParams
from recalkv.presets import describe
from recalkv.text.unicode import read_standard_input, well_formed

_DEVICE = RuntimeParams().device
_Model = Annotated[str, typer.Argument(help="Dense or compressed model: a folder, a hub id, or `embedded`.")]
_Codec = Annotated[Path | None, typer.Option(help="Codec fitted to this model: a folder or a hub id.")]
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
    """Continue a prompt, streaming the output; the size of the cache goes to standard error."""
    with user_errors():
        session = _Session(*_open(model, codec, device), tokens, temperature)
        text = read_standard_input() if prompt == "-" else well_formed(prompt)[0]
        inputs = session.tokenizer(text, return_tensors="pt")
        if not inputs["input_ids"].numel():
            raise DataError(f"the prompt {text!r} has no tokens; give a text to continue.")
        session.answer(inputs)


def chat(
    model: _Model,
    codec: _Codec = None,
    tokens: _Tokens = 512,
    temperature: _Temperature = 0.0,
    device: _Device = _DEVICE,
) -> None:
    """Chat with a model; end with an empty line or Ctrl-D. The size of the cache goes to standard error."""
    with user_errors():
        session = _Session(*_open(model, codec, device), tokens, temperature)
        if not session.tokenizer.chat_template:
            raise DataError(f"{model} has no chat template, as base models have none; use `recalkv generate`.")
        messages: list[dict[str, str]] = []
        while said := _line():
            messages.append({"role": "user", "content": said})
            inputs = session.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            messages.append({"role": "assistant", "content": session.answer(inputs)})


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
    # transformers refuses a cache of an earlier turn beside a configured kind of cache.
    model.generation_config.cache_implementation = None
    if own is None:
        choose_kernels(model)
    else:
        use_codec(model, own)
    return model, tokenizer


@dataclass
class _Session:
    """A model with the cache of the tokens so far, so that a turn of a chat reads only what is new.

    Attributes
    ----------
    tokens, temperature
        Maximum number of new tokens of an answer, and the sampling temperature; 0 for greedy decoding.
    ids : (tokens,) int64 or None
        Tokens of the last prompt and its answer, the last of which is not in the cache.
    """

    model: Any
    tokenizer: Any
    tokens: int
    temperature: float
    cache: Any = None
    ids: Any = None

    def answer(self, inputs: Any) -> str:
        """Stream the model's answer, report the size of the cache, and return the answer."""
        from transformers import TextStreamer

        from recalkv.cache.argument import CACHE

        given, sampling = inputs.to(self.model.device)["input_ids"][0], self.temperature > 0
        if self.cache is not None:
            held = self.cache.get_seq_length()
            if not self.ids[:held].equal(given[:held]):
                self.cache = None  # the template renders earlier turns differently
        output = self.model.generate(
            **inputs,
            max_new_tokens=self.tokens,
            do_sample=sampling,
            **({"temperature": self.temperature} if sampling else {"temperature": None, "top_p": None, "top_k": None}),
            streamer=TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
            **{CACHE: self.cache},
            return_dict_in_generate=True,
        )
        self.cache, self.ids = output[CACHE], output.sequences[0]
        print(f"[{_size(self.model, self.cache)}]", file=sys.stderr)
        return str(self.tokenizer.decode(self.ids[len(given) :], skip_special_tokens=True))


def _size(model: Any, cache: Any) -> str:
    """Describe the size of a cache, beside that of the dense model's cache in the model's dtype."""
    from recalkv.evaluation.live_cache import held_bytes, window_bytes
    from recalkv.model.spec import LatentSpec
    from recalkv.runtime.models import codec_of

    tokens, codec = cache.get_seq_length(), codec_of(model)
    if codec is not None:
        elements = codec.dense_elements(tokens)
    elif hasattr(model.config, "recalkv"):
        elements = LatentSpec.from_config(model.config).dense_elements_per_token * tokens
    else:
        elements = 0
    held, exact, dense = map(_of_bytes, (held_bytes(cache), window_bytes(cache), elements * model.dtype.itemsize))
    beside = f", {exact} of them exact tokens; dense {dense}" if elements else ""
    return f"cache of {tokens:,} tokens: {held}{beside}"


def _of_bytes(count: float) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"
