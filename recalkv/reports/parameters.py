"""Tables of the parameters in ``params.yaml``, for docs/pipeline.md."""

from typing import Any

from pydantic import BaseModel

from recalkv.params import Params
from recalkv.presets import describe
from recalkv.reports.tables import markdown


def parameters() -> str:
    """Render the default, range and meaning of every parameter of ``params.yaml``, one table per section."""
    parts = []
    for section, field in Params.model_fields.items():
        model = field.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        rows = []
        for name, info in model.model_fields.items():
            default = info.get_default(call_default_factory=True)
            shown = "null" if default is None else str(default).replace("'", '"')
            meaning = describe(info).replace(" | ", ", ").replace("|", "\\|")
            rows.append([f"`{name}`", f"`{shown}`", _limits(info), meaning])
        parts.append(f"**`{section}`**: {model.__doc__}\n\n{markdown(['key', 'default', 'range', 'meaning'], rows, 4)}")
    return "\n\n".join(parts)


def _limits(info: Any) -> str:
    """Return the range of a field from its pydantic constraints, such as ``>= 0 and < 1``."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [f"{signs[key]} {getattr(rule, key)}" for rule in info.metadata for key in signs if hasattr(rule, key)]
    return f"`{' and '.join(found)}`" if found else ""
