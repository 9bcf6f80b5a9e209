"""A codec and its side-car files: bases, means, bit layouts, and the identity of the model.

``codec.safetensors`` holds the tensors and ``codec.json`` the rest; neither contains executable code. The model itself
is neither changed nor copied.
"""

import hashlib
import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from recalkv.codec.layer import Code, LayerCodec
from recalkv.codec.rope import Rotation
from recalkv.errors import CheckpointError, ParameterError, StoreError, hub_folder_full
from recalkv.trellis.rows import checked

FORMAT = 1
_MOST_EXACT = 1 << 16
"""Largest window, and largest number of sinks, that a side-car may ask for; more means that the file is damaged."""
_TENSORS, _RECORD = "codec.safetensors", "codec.json"
_FILES = {_TENSORS, _RECORD, "evaluation.md", "evaluation.json"}
"""Files allowed in a side-car's folder, including those that `recalkv eval` writes."""

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class Codec:
    """A fitted codec.

    Attributes
    ----------
    layers
        Layer codecs by ``layer_idx`` of the attention modules; missing layers are cached uncompressed.
    window
        Number of newest tokens kept exact: the residual window.
    sinks
        Number of first tokens of a sequence kept exact.
    context
        Number of positions that it was fitted for.
    fingerprint
        Fingerprint of the model.
    record
        JSON facts about the model and the fit: RoPE, sliding windows, texts, settings.
    """

    layers: Mapping[int, LayerCodec] = field(repr=False)
    window: int
    sinks: int
    context: int
    fingerprint: str
    record: Mapping[str, Any]

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token in all layers, ignoring sliding windows."""
        return sum(layer.row_bytes for layer in self.layers.values())

    @property
    def dense_bytes_per_token(self) -> int:
        """Bytes per token of these layers in a dense 16-bit cache."""
        return sum(2 * layer.kv_heads * sum(layer.head_dims) for layer in self.layers.values())

    @property
    def window_bytes(self) -> int:
        """Bytes of the exact tokens of a sequence in 16 bits; they are stored in addition to those tokens' rows."""
        return (self.window + self.sinks) * self.dense_bytes_per_token

    def cached_tokens(self, context: int) -> dict[int, int]:
        """Return the number of tokens that each layer caches of a sequence: all, or its sliding window."""
        windows = self.record.get("sliding_windows", {})
        return {index: min(context, windows.get(str(index), context)) for index in self.layers}

    def sequence_bytes(self, context: int) -> float:
        """Return the bytes of the rows of one sequence; sliding-window layers count only the tokens they cache."""
        tokens = self.cached_tokens(context)
        return sum(layer.row_bytes * tokens[index] for index, layer in self.layers.items())

    def dense_elements(self, context: int) -> int:
        """Return the elements that these layers cache of one sequence without a codec."""
        tokens = self.cached_tokens(context)
        return sum(layer.kv_heads * sum(layer.head_dims) * tokens[index] for index, layer in self.layers.items())

    def bits_per_element(self, context: int | None = None, exact: bool = True) -> float:
        """Return the bits per cached element of one sequence.

        Parameters
        ----------
        context
            Length of the sequence; None for the codec's context, counting rows only.
        exact
            Whether exact tokens are counted as well.
        """
        # Exact tokens have rows as well, so their bytes are added.
        kept = self.window + self.sinks if exact and context is not None else 0
        tokens = context or self.context
        rows = 8 * self.sequence_bytes(tokens)
        return (rows + 16 * self.dense_elements(min(kept, tokens))) / self.dense_elements(tokens)

    def save(self, folder: str | Path) -> None:
        """Write the side-car completely or not at all, replacing an existing one.

        Raises
        ------
        ParameterError
            If it is the current folder, or holds files other than a side-car's.
        """
        folder = Path(folder).resolve()
        if folder == Path.cwd():
            raise ParameterError(
                f"codec: {folder} is the current folder, which cannot be replaced by a side-car; name one in it."
            )
        if folder.exists() and not (
            folder.is_dir() and {each.name for each in folder.iterdir() if each.suffix != ".partial"} <= _FILES
        ):
            raise ParameterError(
                f"codec: {folder} holds other files than those of a codec, and would be replaced; name a new folder."
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Unique temporary names: another process may write the same side-car.
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as scratch:
            new, old = Path(scratch) / "new", Path(scratch) / "old"
            new.mkdir()
            self.write(new)
            try:
                if folder.exists():
                    folder.rename(old)
                new.rename(folder)
            except BaseException:  # an interrupt, too
                if old.exists() and not folder.exists():
                    old.rename(folder)
                raise

    def write(self, folder: Path) -> None:
        """Write the side-car's files into a folder."""
        tensors, layers = {}, {}
        for index, layer in self.layers.items():
            name = f"layers.{index}"
            for side, codes in (("keys", layer.keys), ("values", layer.values)):
                for group, code in enumerate(codes):
                    tensors[f"{name}.{side}.{group}"] = code.matrix.contiguous()
            tensors |= {f"{name}.key_mean": layer.key_mean, f"{name}.value_mean": layer.value_mean}
            # Cloned because layers share these tensors, which safetensors refuses to save.
            tensors |= {f"{name}.pairs": layer.rotation.pairs.clone()}
            tensors |= {f"{name}.frequencies": layer.rotation.frequencies.clone()}
            layers[str(index)] = {
                "keys": [code.segments for code in layer.keys], "values": [code.segments for code in layer.values],
            }  # fmt: skip
        save_file(tensors, folder / _TENSORS)
        record = {
            "format": FORMAT, "fingerprint": self.fingerprint, "window": self.window, "sinks": self.sinks,
            "context": self.context, "record": dict(self.record), "layers": layers,
            "sha256": hashlib.sha256((folder / _TENSORS).read_bytes()).hexdigest(),
        }  # fmt: skip
        (folder / _RECORD).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")

    def revision_of(self, name: str) -> str | None:
        """Return the hub revision of the model that it was fitted to, or None if that model has another name."""
        revision: str | None = self.record.get("revision")
        return revision if self.record.get("model") == name else None

    @classmethod
    def load(cls, folder: str | Path) -> "Codec":
        """Read a side-car from its folder, or from a repository of the hub, ``OWNER/NAME``.

        Raises
        ------
        CheckpointError
            If it is missing, damaged or of another format.
        """
        folder = Path(folder) if Path(folder).is_dir() else _fetched(str(folder))
        for last in (False, True):
            try:
                record, tensors = _read(folder)
                break
            except (OSError, ValueError, RecursionError, SafetensorError) as error:
                if last:
                    raise CheckpointError(
                        f"codec: {folder} holds no readable {_RECORD} and {_TENSORS} ({error}); make them by `recalkv "
                        f"fit`."
                    ) from error
                time.sleep(0.1)  # another process may be replacing it
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            found = record.get("format") if isinstance(record, dict) else None
            raise CheckpointError(
                f"codec: {folder} has format {found}, and this version reads {FORMAT}; fit the codec again."
            )
        try:
            layers = {int(index): _layer(tensors, f"layers.{index}", own) for index, own in record["layers"].items()}
            window, sinks, context = (record[name] for name in ("window", "sinks", "context"))
            # Compiled loops use these values unchecked.
            whole = all(type(each) is int for each in (window, sinks, context))
            if not whole or min(window, sinks + 1, context) < 1 or max(window, sinks) > _MOST_EXACT:
                raise ValueError(f"window {window}, sinks {sinks}, context {context}")
            own = dict(sorted(layers.items()))
            return cls(own, window, sinks, context, str(record["fingerprint"]), dict(record["record"]))
        except CheckpointError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"codec: {folder} is damaged ({error!r}); fit the codec again.") from error


def _read(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Return the content of a side-car's files, which must be of one codec."""
    record = json.loads((folder / _RECORD).read_text())
    content = (folder / _TENSORS).read_bytes()
    # Earlier versions wrote no digest.
    if isinstance(record, dict) and record.get("sha256") not in (None, hashlib.sha256(content).hexdigest()):
        raise ValueError(f"{_TENSORS} is not the one that {_RECORD} describes")
    return record, load(content)


def _fetched(name: str) -> Path:
    """Return the folder of a side-car from the hub, which only its two files are read from."""
    if not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"codec: {name} is not a folder; name the one that `recalkv fit` wrote.")
    from huggingface_hub import snapshot_download

    try:
        with hub_folder_full():
            return Path(snapshot_download(name, allow_patterns=[_TENSORS, _RECORD]))
    except StoreError:
        raise
    except Exception as error:  # the hub client raises many unrelated types
        raise CheckpointError(
            f"codec: {name} is neither a folder nor a repository that can be fetched from the hub "
            f"({type(error).__name__}); name the folder that `recalkv fit` wrote, or log in with `hf auth login`."
        ) from error


def _layer(tensors: Mapping[str, Tensor], name: str, layout: Mapping[str, Sequence[Any]]) -> LayerCodec:
    sides = []
    for side in ("keys", "values"):
        codes = tuple(Code(tensors[f"{name}.{side}.{i}"], checked(own)) for i, own in enumerate(layout[side]))
        for code in codes:
            if code.matrix.ndim != 2 or code.matrix.shape[0] != code.matrix.shape[1] or code.width > len(code.matrix):
                raise CheckpointError(
                    f"codec: {name}.{side} has a basis of {tuple(code.matrix.shape)} for {code.width} coded numbers, "
                    "and it must be square and no narrower; fit again."
                )
        sides.append(codes)
    means = tensors[f"{name}.key_mean"], tensors[f"{name}.value_mean"]
    heads, groups = len(means[0]), len(sides[0])
    for codes, mean in zip(sides, means, strict=True):
        # Compiled loops trust these shapes, so all are checked here.
        covered = mean.ndim == 2 and len(mean) == heads and len(codes) == groups > 0 and heads % groups == 0
        if not covered or any(len(code.matrix) != heads // groups * mean.shape[1] for code in codes):
            raise CheckpointError(f"codec: bases of {name} do not cover its heads {tuple(mean.shape)}; fit again.")
    rotation = Rotation(tensors[f"{name}.pairs"], tensors[f"{name}.frequencies"])
    if sorted(rotation.pairs.flatten().tolist()) != list(range(means[0].shape[1])) or (
        rotation.pairs.shape != (2, len(rotation.frequencies)) or rotation.pairs.dtype != torch.int64
    ):
        raise CheckpointError(f"codec: pairs of {name} do not cover a key of {means[0].shape[1]}; fit again.")
    found = [rotation.frequencies, *means, *(code.matrix for codes in sides for code in codes)]
    if [each.dtype for each in found] != [torch.float64] + [torch.float32] * (len(found) - 1):
        raise CheckpointError(f"codec: tensors of {name} have other dtypes than the codec's; fit again.")
    try:
        found += [code.back for codes in sides for code in codes]
    except torch.linalg.LinAlgError as error:
        raise CheckpointError(f"codec: a basis of {name} has no inverse; fit again.") from error
    if not all(bool(torch.isfinite(each).all()) for each in found):
        raise CheckpointError(f"codec: a basis, mean or frequency of {name} has NaN or infinity; fit again.")
    return LayerCodec(sides[0], sides[1], *means, rotation)
