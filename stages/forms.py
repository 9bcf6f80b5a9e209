"""Names of cells: `codec-4`, `codec-per-head-4`, `latents-2`, `recalkv-8`, `palu-4.8`, and quantized caches."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import recalkv
from recalkv.errors import ParameterError
from recalkv.evaluation.quantized_cache import quantized_cache, quantized_layers
from recalkv.evaluation.quantizers import QUANTIZERS, quantizer
from recalkv.model.loading import load_model
from recalkv.model.precision import evaluation_precision
from recalkv.model.spec import DENSE_BITS
from recalkv.model.support import check_supported
from recalkv.runtime.models import use_codec
from recalkv.store.stores import digest_of, source_digest
from stages.cell import latent_model
from stages.common import Stage
from stages.stored_codec import stored_codec

HELP = (
    "codec-BITS, codec-per-head-BITS, latents-BITS (mixed), recalkv-BITS and palu-BITS (16-bit latents of so many bits "
    f"a number), or one of {', '.join(QUANTIZERS)}."
)
# What the figures of a cache form depend on: stores, sections of the parameters, and code.
_STORES = {"codec": ("moments",), "latents": ("sample", "whiten", "fisher")}
_SECTIONS = {"latents": ("calibration", "compression")}
_CODE = {
    "dense": ("model",),
    "quantizer": ("cache", "evaluation/quantized_cache.py", "evaluation/quantizers.py", "model"),
    "codec": ("cache", "codec", "method", "model", "runtime", "trellis"),
    "latents": ("cache", "compression.py", "evaluation/streamed.py", "method", "model", "statistics", "trellis"),
}
# Code that calls these: the meaning of a name, and what is recorded.
_CALLS = ("cell.py", "codec_cell.py", "forms.py", "quantizer.py", "stored.py", "stored_codec.py")
_FORM = re.compile(r"(codec(?:-per-head)?|latents|recalkv|palu)-(\d+(?:\.\d+)?)")


def form_of(name: str) -> tuple[str, float]:
    """Return the cache form and bits of a name; ``quantizer`` and 0 for a quantized cache.

    Raises
    ------
    ParameterError
        For an unknown name.
    """
    if name in QUANTIZERS:
        return "quantizer", 0.0
    found = _FORM.fullmatch(name)
    if found is None or not 0 < float(found[2]) <= DENSE_BITS:
        raise ParameterError(f"cell {name!r} is unknown; choose {HELP}")
    return found[1], float(found[2])


def check_names(names: Sequence[str]) -> None:
    """Reject an unknown name before anything is measured."""
    for name in names:
        form_of(name)


def figures_key(run: Stage, name: str, code: Sequence[str], settings: Mapping[str, Any], stores: Sequence[str]) -> str:
    """Return a digest of everything that determines the figures of a cache form, or of ``dense``.

    Parameters
    ----------
    code
        Files and folders of the package that perform the measurement.
    settings
        Settings of the measurement.
    stores
        Stores that the measurement reads.
    """
    form = "dense" if name == "dense" else form_of(name)[0]
    kind = "codec" if form.startswith("codec") else form if form in ("dense", "quantizer") else "latents"
    package = Path(recalkv.__file__).parent
    sources = [package / each for each in (*_CODE[kind], *code)]
    sources += [Path(__file__).with_name(each) for each in (*_CALLS, f"{run.name}.py")]
    return digest_of(
        {
            "name": name,
            "model": run.model().fingerprint,
            "stores": {each: run.read(each).digest for each in (*stores, *_STORES.get(kind, ()))},
            # `auto` depends on the device.
            "precision": evaluation_precision(run.params.evaluation.precision, run.device),
            "settings": dict(settings)
            | {each: getattr(run.params, each).model_dump() for each in _SECTIONS.get(kind, ())},
            "code": [source_digest(each) if each.is_dir() else each.read_text() for each in sources],
        }
    )


def is_of(path: Path, key: str) -> bool:
    """Return whether a file has the figures of a key."""
    return path.exists() and json.loads(path.read_text()).get("key") == key


def latent_setting(form: str, bits: float) -> dict[str, Any]:
    """Return the parameters of ``compression`` that a form of latents sets."""
    ratio = {"ratio": 1 - bits / 16}
    return ratio | ({"bits": "mixed"} if form == "latents" else {"bits": 16, "method": form})


@contextlib.contextmanager
def opened(run: Stage, name: str, one_pass: bool = False) -> Iterator[tuple[Any, Callable[[], Any] | None]]:
    """Open a model with a form of cache, or ``dense``; yields it and a cache factory, None for its default cache.

    With ``one_pass``, a quantized cache is simulated while the model reads whole texts without a cache.
    """
    folder = run.model().folder
    form, bits = ("dense", 16.0) if name == "dense" else form_of(name)
    if form in ("latents", "recalkv", "palu"):
        yield latent_model(run, latent_setting(form, bits))[0], None
        return
    model = load_model(folder, run.device, run.evaluated_dtype(folder))
    if form == "quantizer":
        rounding = quantizer(name, check_supported(model.config).head_dim)
        if one_pass:
            with quantized_cache(model, rounding):
                yield model, None
        else:
            yield model, lambda: quantized_layers(model, rounding)
        return
    if form != "dense":
        use_codec(model, stored_codec(run, bits, 1 if form == "codec-per-head" else None))
    yield model, None
