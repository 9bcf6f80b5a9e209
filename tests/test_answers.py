"""Step 9 through decoding and by cause: GSM8K's answers, key biases, and windows that the model writes itself."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recalkv.errors import DataError
from recalkv.evaluation.key_bias import bias_shares, rotated_biases, without_bias
from recalkv.evaluation.perplexity import window_scores
from recalkv.evaluation.quantized_cache import quantized_cache
from recalkv.evaluation.quantizers import quantizer
from recalkv.evaluation.suites.gsm8k import Question, final_number, read_questions, solve
from recalkv.text.windows import Windows
from stages.baseline import own_words
from tests import tiny


def test_the_final_number_of_an_answer() -> None:
    assert final_number("6 + 12 = 18, so \\boxed{18}.") == 18
    assert final_number("\\boxed{1} and then \\boxed{\\$1,250.50}") == 1250.5
    assert final_number("She has 5 apples and 3 pears: 8 in all.") == 8
    assert final_number("It is -7") == -7
    assert final_number("\\boxed{none} of 12") == 12
    assert final_number("no number") is None


def test_questions_are_read(tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    rows = [{"question": "2 and 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}, {"question": "?", "answer": "#### 1,000"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_questions(file) == [Question("2 and 2?", 4), Question("?", 1000)]
    assert len(read_questions(file, 1)) == 1
    file.write_text(json.dumps({"question": "?", "answer": "four"}) + "\n")
    with pytest.raises(DataError, match="line 1: a question and an answer that ends in `#### NUMBER` are needed"):
        read_questions(file)


class Characters:
    """A chat tokenizer of single characters."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return messages[0]["content"]

    def __call__(self, texts: list[str], **_: object) -> "Batch":
        longest = max(map(len, texts))
        rows = [[0] * (longest - len(text)) + [3 + ord(letter) % 90 for letter in text] for text in texts]
        masks = [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
        return Batch(torch.tensor(rows), torch.tensor(masks))

    def batch_decode(self, ids: torch.Tensor, **_: object) -> list[str]:
        return [" ".join(map(str, row.tolist())) for row in ids]


class Batch(dict):  # type: ignore[type-arg]
    def __init__(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        super().__init__(input_ids=ids, attention_mask=mask)
        self.input_ids = ids

    def to(self, _: object) -> "Batch":
        return self


def test_answers_are_those_of_each_question_alone() -> None:
    model = tiny.dense_model("llama-gqa", max_position_embeddings=512)
    questions = [Question("Why? " * count, 0) for count in (3, 1, 5, 2)]
    made: list[int] = []
    together = solve(model, Characters(), questions, tokens=8, batch_size=3, progress=lambda: made.append(1))
    alone = [solve(model, Characters(), [each], tokens=8)[0] for each in questions]
    assert together == alone and len(made) == 4 and len(set(alone)) > 1


def test_keys_are_rounded_without_their_bias() -> None:
    """A bias far above the keys takes most of the levels; a rounding without it has them for the keys."""
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
    # Keys of a layer whose bias is nearly all of them.
    assert all(0.9 < each["bias"] / each["keys"] < 1.1 for each in shares)


def test_the_bias_of_a_layer_turns_as_its_keys_do() -> None:
    model = tiny.dense_model("qwen2-bias")
    seen: list[torch.Tensor] = []
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight.data.zero_()
    cache = SimpleNamespace(update=lambda keys, values, *_: (seen.append(keys), (keys, values))[1])
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
    # What it draws is likelier to it than what it was given.
    assert window_scores(model, first.tokens).losses.mean() < window_scores(model, windows.tokens).losses.mean()
