"""ReCalKV: KV cache compression for pretrained language models, without training.

Importing the package registers the compressed model classes with transformers' auto classes, in any import order.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recalkv.fitting import fit
    from recalkv.recipe import compress
    from recalkv.runtime.models import codec_cache, stop_codec, use_codec

__all__ = ["__version__", "codec_cache", "compress", "fit", "stop_codec", "use_codec"]
__version__ = "0.2.0"

# Importing the auto classes takes seconds. The command line's help, and stages without a model, should not wait for
# them, so commands, stages and benchmarks register the classes when they load a model.
_MAIN, _ROOT = getattr(sys.modules.get("__main__"), "__file__", None) or "", Path(__file__).resolve().parents[1]
_OURS = any(Path(_MAIN).resolve().is_relative_to(_ROOT / tools) for tools in ("stages", "benchmarks"))
if "recalkv_command" not in sys.modules and not _OURS:
    from recalkv.model.modeling import register

    register()


# Imported lazily: loading and running a compressed checkpoint needs no calibration code.
_MODULES = {"compress": "recipe", "fit": "fitting"} | dict.fromkeys(
    ("codec_cache", "stop_codec", "use_codec"), "runtime.models"
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"recalkv.{_MODULES[name]}"), name)
