"""`recalkv eval MODEL --codec codec`: a model with a codec compared with the same model without it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import recalkv
from recalkv.codec.sidecar import Codec
from recalkv.evaluation import comparison
from recalkv.evaluation.comparison import Wanted, compare
from recalkv.params import EvaluationParams, NeedleParams
from recalkv.reports.comparison import advice, page
from recalkv.text.windows import Windows
from tests.commands import done, refused
from tests.tiny import dense_model, windows

SMALL = Wanted(
    EvaluationParams(window=60, prefill=40, precision="float32"),
    NeedleParams(lengths=[180], depths=[0.0, 1.0], trials=2), contexts=(60,), steps=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, tiny_texts: tuple[Path, Path]) -> Path:
    out = tmp_path_factory.mktemp("eval") / "codec"
    recalkv.fit(tiny_folder, dataset=tiny_texts[0], samples=6, length=32, out=out, device="cpu")
    return out


def test_figures_are_those_of_the_model_with_a_codec(codec: Path, tiny_folder: Path) -> None:
    texts, own = {"one": Windows(windows(4, 60, 5), torch.arange(4))}, Codec.load(codec)
    figures, facts = compare(own, tiny_folder, texts, windows(1, 500, 7)[0], SMALL, torch.device("cpu"))
    cache, text = figures["cache"], figures["perplexity"]
    assert 0 < text["kl_nats"] < 0.2 and text["dense"] != text["compressed"]
    assert cache["compressed_bytes_per_token"] == own.bytes_per_token == 72
    assert cache["reference_bytes_per_token"] == 288 and cache["compression_ratio"] == 0.75
    # The window is float32 and has spare room, so it is larger than the exact tokens in 16 bits.
    assert own.window_bytes <= cache["compressed_window_bytes"] < 6 * own.window_bytes
    assert figures["parameters"]["dense"] == figures["parameters"]["compressed"]
    assert set(figures["decode_tokens_per_second"]) == {"60_tokens"}
    assert set(figures["needle"]) == {"dense", "compressed"} and facts is own
    shown = page(figures, facts)
    # The page may be published, so it must not show where the model is stored.
    assert str(tiny_folder) not in shown and tiny_folder.name in shown and "in 16 bits | 288 | 72 | 75.0%" in shown
    poor = figures | {"perplexity": text | {"kl_nats": 1.0}}
    assert any("recalkv fit --bits` above 4" in line for line in advice(poor, facts))


def test_the_command_writes_its_page_beside_the_codec(
    codec: Path, tiny_folder: Path, tiny_texts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "QUICK", SMALL)
    done("eval", tiny_folder, "--codec", codec, "--text", tiny_texts[1], "--quick", "--device", "cpu")
    found: dict[str, Any] = json.loads((codec / "evaluation.json").read_text())
    assert found["cache"]["compressed_bytes_per_token"] == 72 and "KL" in (codec / "evaluation.md").read_text()
    # The page does not prevent the codec from being fitted again.
    Codec.load(codec).save(codec)


def test_bad_input_is_refused(codec: Path, tiny_folder: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    dense_model("llama-gqa", seed=5).save_pretrained(tmp_path / "other")
    tiny_tokenizer.save_pretrained(tmp_path / "other")
    for arguments, message in (
        ([tiny_folder, "--codec", tmp_path], "holds no readable codec.json"),
        ([tiny_folder, "--codec", codec, "--dense", tiny_folder], "is measured on MODEL itself; leave out --dense"),
    ):
        assert message in refused("eval", *arguments, "--device", "cpu")
    with pytest.raises(recalkv.errors.CheckpointError, match="fitted to another model, "):
        texts = {"one": Windows(windows(4, 60, 5), torch.arange(4))}
        compare(Codec.load(codec), tmp_path / "other", texts, windows(1, 500, 7)[0], SMALL, torch.device("cpu"))


def test_generate_caches_by_a_codec(codec: Path, tiny_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    model = recalkv.use_codec(AutoModelForCausalLM.from_pretrained(tiny_folder), codec)
    prompt = "the cache holds " * 20  # longer than the residual window
    ids = tokenizer(prompt, return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    said = done("generate", tiny_folder, prompt, "--codec", codec, "--tokens", "8", "--device", "cpu")
    assert tokenizer.decode(expected, skip_special_tokens=True).strip() in said
    assert str(tiny_folder) in refused("generate", tiny_folder, prompt, "--codec", tiny_folder, "--device", "cpu")
