"""ReCalKV: low-rank latent KV caches for pretrained language models, without training.

Importing the package registers the compressed model classes with transformers' auto classes.
"""

from typing import TYPE_CHECKING, Any

from recalkv.model.modeling import register as _register

if TYPE_CHECKING:
    from recalkv.compression import compress

__all__ = ["__version__", "compress"]
__version__ = "0.2.0"

_register()


def __getattr__(name: str) -> Any:
    # Compression needs pydantic; loading and running a compressed checkpoint does not.
    if name == "compress":
        from recalkv.compression import compress

        return compress
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
