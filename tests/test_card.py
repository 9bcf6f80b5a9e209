"""Model cards: their content, their presence in every checkpoint, and their upload to the hub."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import transformers.utils.hub
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError

from recalkv.model.card import CARD, model_card
from recalkv.model.spec import LatentSpec
from tests.tiny import compressed_pair

pair = functools.cache(compressed_pair)
PERPLEXITY = {"dense": 20.0, "compressed": 22.5, "windows": 8}
METRICS = {
    "text": "wikitext2",
    "perplexity": PERPLEXITY,
    "further_texts": {"ptb": PERPLEXITY | {"compressed": 31.25}},
    "tasks": {"piqa": {"items": 50, "dense": {"accuracy": 0.7}, "compressed": {"accuracy": 0.64}}},
}


def card_data(card: str) -> dict[str, Any]:
    """Return a card's metadata as parsed by the hub."""
    return dict(ModelCard(card).data.to_dict())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    pair("llama-gqa")[1].save_pretrained(tmp_path / "smaller")
    return tmp_path / "smaller"


def test_card_says_what_was_done() -> None:
    spec = dataclasses.replace(
        LatentSpec.from_config(pair("llama-gqa")[1].config),
        source={"name": "meta-llama/Llama-2-7b-hf", "revision": "abc", "fingerprint": "f00d"},
        calibration={"samples": 16, "length": 1024, "text": ["wikitext2"], "seed": 3},
    )
    text = model_card(spec, METRICS, "me/smaller")
    # 3 layers, 3 heads of 8 dimensions, keys and values, 2 bytes.
    assert "| cache in 16 bits, bytes per token, dense | 288 |" in text
    assert f"| cache, bytes per token, compressed | {spec.cached_elements_per_token * 2} |" in text
    assert "| method | `recalkv`: activation metric, fisher ranks, refit values |" in text and "`f00d`" in text
    assert "16 x 1024 tokens of `wikitext2`, seed 3" in text
    assert "| perplexity, wikitext2 (8 windows) | 20.00 | 22.50 |" in text
    assert "| perplexity, ptb (8 windows) | 20.00 | 31.25 |" in text
    assert "| accuracy, piqa (50 items) | 70.0% | 64.0% |" in text and "from_pretrained('me/smaller')" in text

    data = card_data(text)
    assert data["base_model"] == "meta-llama/Llama-2-7b-hf"
    assert {"recalkv", "kv-cache-compression"} <= set(data["tags"])
    (model,) = data["model-index"]
    values = {result["dataset"]["name"]: result["metrics"][0]["value"] for result in model["results"]}
    assert values == {"wikitext2": 22.5, "ptb": 31.25, "piqa": 0.64}


def test_card_does_not_say_where_a_local_model_lies() -> None:
    spec = dataclasses.replace(LatentSpec.from_config(pair("llama-gqa")[1].config), source={"name": "/home/me/llama"})
    assert "`llama` with a low-rank" in model_card(spec) and "/home" not in model_card(spec)


def test_saved_models_have_a_card_and_keep_one_that_is_there(checkpoint: Path) -> None:
    assert "Not evaluated yet" in (checkpoint / CARD).read_text()
    assert "model-index" not in card_data((checkpoint / CARD).read_text())
    (checkpoint / CARD).write_text("mine")
    pair("llama-gqa")[1].save_pretrained(checkpoint)
    assert (checkpoint / CARD).read_text() == "mine"


def test_push_to_hub_uploads_weights_config_and_our_card(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub:
        commits: list[dict[str, bytes]] = []

        def create_repo(self, repo_id: str, **options: Any) -> Any:
            return type("Repo", (), {"repo_id": repo_id})

        def create_commit(self, repo_id: str, operations: list[Any], **options: Any) -> str:
            self.commits.append({each.path_in_repo: Path(each.path_or_fileobj).read_bytes() for each in operations})
            return "done"

    monkeypatch.setattr(transformers.utils.hub, "hf_api", Hub)
    monkeypatch.setattr(transformers.utils.hub.ModelCard, "load", Mock(side_effect=EntryNotFoundError("no card yet")))
    compressed = pair("llama-gqa")[1]
    compressed.push_to_hub("me/smaller")
    (content,) = Hub.commits
    assert {"config.json", "model.safetensors", CARD} <= set(content)
    assert json.loads(content["config.json"])["recalkv"] == compressed.config.recalkv
    card = content[CARD].decode()
    assert "recalkv" in card_data(card)["tags"] and "from_pretrained('me/smaller')" in card
