"""Step 9: answers generated for suites, the effect of key biases, and windows that the model itself completes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from recalkv.errors import DataError
from recalkv.evaluation.key_bias import bias_shares, rotated_biases, without_bias
from recalkv.evaluation.perplexity import window_scores
from recalkv.evaluation.quantized_cache import quantized_cache
from recalkv.evaluation.quantizers import quantizer
from recalkv.evaluation.suites.answers import Prompt, final_number, generate_answers, read_prompts, score
from recalkv.text.windows import Windows
from stages.baseline import own_words
from stages.models_page import compared
from tests import raises, tiny


def test_the_final_number_of_an_answer() -> None:
    assert final_number("6 + 12 = 18, so \\boxed{18}.") == 18
    assert final_number("\\boxed{1} and then \\boxed{\\$1,250.50}") == 1250.5
    assert final_number("She has 5 apples and 3 pears: 8 in all.") == 8 and final_number("It is -7") == -7
    assert final_number("10-12") == 12
    assert final_number("\\boxed{none} of 12") == 12 and final_number("no number") is None


def test_prompts_are_read(tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"

    def read(suite: str, *rows: dict[str, object], limit: int | None = None) -> list[Prompt]:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_prompts(suite, file, limit)

    rows = {"question": "2 and 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}, {"question": "?", "answer": "#### 1,000"}
    first, second = read("gsm8k", *rows)
    assert first.text.startswith("2 and 2?\n") and (first.tokens, first.prefix) == (320, "")
    assert score(first, "It is \\boxed{4}.") == 1 and score(first, "5") == 0 and score(second, "So, 1000") == 1
    assert len(read("gsm8k", *rows, limit=1)) == 1
    needle = {"task": "vt", "max_length": 4096, "input": "Track.", "outputs": ["AB", "CD"], "gen_prefix": "They are"}
    (asked,) = read("ruler", needle)
    assert asked == Prompt("vt, 4,096", "Track.", ["AB", "CD"], 30, "They are")
    assert [score(asked, text) for text in ("ab and cd", "AB", "x")] == [1, 0.5, 0]
    (news,) = read("multi_news", {"context": "It rained.", "answers": ["it rained today", "no"]})
    assert "News:\nIt rained." in news.text and news.tokens == 512
    raises(DataError, "line 1: an answer that ends in", read, "gsm8k", {"question": "?", "answer": ["four"]})
    raises(DataError, "line 1: task 'qa_1' must be one of", read, "ruler", needle | {"task": "qa_1"})
    with pytest.raises(DataError, match=r"none.jsonl does not exist; gsm8k needs a .jsonl file with question, answer"):
        read_prompts("gsm8k", tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="line 2: column 'outputs' does not exist; ruler needs input, outputs"):
        read("ruler", needle, {"task": "vt", "input": ""})


def test_a_summary_is_scored_by_its_longest_common_words() -> None:
    pytest.importorskip("rouge")
    news = Prompt("multi_news", "", ["it rained all day", "the sun shone"], 512)
    # Of 4 and 3 words, 3 are common and in order: precision 3/4, recall 1.
    assert score(news, "the sun shone today") == pytest.approx(6 / 7, abs=1e-6) and score(news, "") == 0


class Characters:
    """Chat tokenizer of single characters."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return messages[0]["content"]

    def __call__(self, texts: list[str], **_: object) -> BatchEncoding:
        longest = max(map(len, texts))
        rows = [[0] * (longest - len(text)) + [3 + ord(letter) % 90 for letter in text] for text in texts]
        masks = [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
        return BatchEncoding({"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)})

    def batch_decode(self, ids: torch.Tensor, **_: object) -> list[str]:
        return [" ".join(map(str, row.tolist())) for row in ids]


def test_answers_are_those_of_each_prompt_alone() -> None:
    model = tiny.dense_model("llama-gqa", max_position_embeddings=512)
    lengths = (3, 8), (1, 8), (5, 4), (2, 8), (4, 4)
    prompts = [Prompt("a", "Why? " * count, [], tokens, "So ") for count, tokens in lengths]
    made: list[int] = []
    together = generate_answers(model, Characters(), prompts, batch_size=3, progress=lambda: made.append(1))
    alone = [generate_answers(model, Characters(), [each])[0] for each in prompts]
    assert together == alone and len(made) == 5 and len(set(alone)) > 1
    # Each answer is as long as its limit, and depends on the given prefix.
    assert [len(text.split()) for text in together] == [each.tokens for each in prompts]
    assert together != generate_answers(model, Characters(), [each._replace(prefix="No ") for each in prompts])


def test_long_prompts_lose_their_middle() -> None:
    asked: list[str] = []

    class Words(Characters):
        def __call__(self, texts: Any, **_: object) -> Any:
            if isinstance(texts, str):
                return {"input_ids": texts.split()}
            asked.extend(texts)
            return super().__call__(texts)

        def decode(self, ids: list[str], **_: object) -> str:
            return "".join(f"{each} " for each in ids)

    model = tiny.dense_model("llama-gqa", max_position_embeddings=512)
    generate_answers(model, Words(), [Prompt("a", "1 2 3 4 5 6 7", [], 1), Prompt("a", "1 2", [], 1)], length=4)
    assert sorted(asked) == ["1 2", "1 2 6 7 "]


def test_scores_are_compared_on_the_items_that_both_have() -> None:
    cells = {
        "dense": {"scores": {"a": [1.0, 0.0, 1.0, 1.0]}, "ran": "float32", "texts": {"a": ["x", "y", "z", "w"]}},
        "few": {"scores": {"a": [1.0, 1.0]}, "ran": "float32", "texts": {"a": ["x", "n"]}},
    }
    found = compared(cells)
    expected = {"items": 2, "score": 1.0, "difference": 0.5, "error": 0.5, "same": 0.5, "length": None}
    expected |= {"ran": "float32", "paired": "float32"}
    assert found["few"]["a"] == expected
    assert found["dense"]["a"]["difference"] == 0 and found["dense"]["a"]["score"] == 0.75


def test_keys_are_rounded_without_their_bias() -> None:
    """Rounding keys without their large bias, which takes most of the quantization levels, lowers the divergence."""
    model = tiny.dense_model("qwen2-bias")
    windows = torch.randint(0, tiny.VOCABULARY, (2, 60), generator=torch.Generator().manual_seed(1))
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data *= 400 / layer.self_attn.k_proj.bias.data.abs().max()
    dense = window_scores(model, windows, keep=True).states
    biases, rounding = rotated_biases(model, 60), quantizer("turboquant-4", model.model.layers[0].self_attn.head_dim)

    def divergence(removed: bool) -> float:
        with quantized_cache(model, rounding, lambda layer, own: without_bias(own, biases[layer]) if removed else own):
            found = window_scores(model, windows, dense=dense).divergences
        assert found is not None
        return float(found.mean())

    assert divergence(removed=True) < 0.3 * divergence(removed=False)
    shares = bias_shares(model, windows[:1])
    assert len(shares) == len(model.model.layers)
    # The bias makes up nearly all of the keys' RMS.
    assert all(0.9 < each["bias"] / each["keys"] < 1.1 for each in shares)


def test_the_bias_of_a_layer_turns_as_its_keys_do() -> None:
    model = tiny.dense_model("qwen2-bias")
    seen: list[torch.Tensor] = []
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight.data.zero_()
    cache = SimpleNamespace(update=lambda keys, values, *_, **__: (seen.append(keys), (keys, values))[1])
    cos_sin = model.model.rotary_emb(torch.zeros(1, 7, 1), torch.arange(7)[None])
    attention(torch.randn(1, 7, model.config.hidden_size), cos_sin, None, past_key_values=cache)
    torch.testing.assert_close(rotated_biases(model, 7)[0], seen[0][0])


def test_a_model_writes_the_ends_of_windows() -> None:
    model = tiny.dense_model("llama-gqa")
    windows = Windows(torch.randint(3, tiny.VOCABULARY, (3, 40)), torch.arange(3))
    first, second = (own_words(model, windows, 30) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens) and torch.equal(first.documents, windows.documents)
    assert torch.equal(first.tokens[:, :10], windows.tokens[:, :10])
    assert not torch.equal(first.tokens[:, 10:], windows.tokens[:, 10:]) and first.tokens.shape == (3, 40)
    # Sampled tokens are likelier to the model than the given ones.
    assert window_scores(model, first.tokens).losses.mean() < window_scores(model, windows.tokens).losses.mean()


def test_items_may_hold_any_separator_of_lines_and_must_be_there(tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    row = {"question": "How\u2028many?", "answer": "#### 4"}
    file.write_text("\n".join([json.dumps(row, ensure_ascii=False), "", json.dumps(row)]), encoding="utf-8")
    assert len(read_prompts("gsm8k", file)) == 2 and len(read_prompts("gsm8k", file, 1)) == 1
    file.write_text("\n")
    raises(DataError, "holds no items", read_prompts, "gsm8k", file)
