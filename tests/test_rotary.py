"""Cache slots serve as positions: the positions and masks that a compressed model accepts, and those it refuses."""

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, StaticCache

from recalkv.errors import ParameterError
from recalkv.model.residual_window import _kept_mask
from recalkv.model.rotary import check_positions
from tests.tiny import attending_layers, compressed_pair, windows

PREPARED = torch.ones(2, 1, 3, 9, dtype=torch.bool)


def rows(*positions: list[int]) -> Tensor:
    return torch.tensor(positions)


RIGHT: dict[str, tuple[Tensor, Any, int]] = {
    "slots": (rows([0, 1, 2]), None, 0),
    "slots of a later piece": (rows([7, 8, 9]), None, 7),
    "ahead by a constant": (rows([12, 13, 14], [18, 19, 20]), None, 7),
    "left padding": (rows([0, 1, 2, 3], [0, 0, 0, 1]), rows([1, 1, 1, 1], [0, 0, 1, 1]), 0),
    "a step after left padding": (rows([4], [2]), rows([1, 1, 1, 1, 1], [0, 0, 1, 1, 1]), 4),
    "slots under left padding": (rows([0, 1, 2, 3]), rows([1, 1, 1, 1], [0, 0, 1, 1]), 0),
    "right padding": (rows([0, 1, 2, 3], [0, 1, 1, 1]), rows([1, 1, 1, 1], [1, 1, 0, 0]), 0),
    "a sequence that is all padding": (rows([0, 1, 2], [1, 1, 1]), rows([1, 1, 1], [0, 0, 0]), 0),
    "slots under padding between tokens": (rows([0, 1, 2, 3]), rows([1, 0, 0, 1]), 0),
    "a mask longer than the tokens": (rows([0, 1, 2]), rows([1, 1, 1, 1, 1]), 0),
    "prepared mask": (rows([0, 1, 2], [0, 0, 1]), PREPARED, 0),
    "a mask of each kind of layer": (rows([5, 6, 7], [3, 4, 5]), {"full_attention": PREPARED}, 5),
}
WRONG: dict[str, tuple[Tensor, Any, int]] = {
    "restart": (rows([0, 1, 0, 1]), None, 0),
    "restart under a mask": (rows([0, 1, 0, 1]), rows([1, 1, 1, 1]), 0),
    "restart in a later piece": (rows([0, 1, 2]), None, 7),
    "restart in one sequence": (rows([0, 1, 2, 3], [0, 1, 0, 1]), None, 0),
    "gap": (rows([0, 1, 5]), None, 0),
    "the same position twice": (rows([0, 1, 1]), None, 0),
    "padding between tokens left out": (rows([0, 1, 1, 1, 2]), rows([1, 1, 0, 0, 1]), 0),
    "padding before a later piece left out": (rows([3, 4]), rows([1, 1, 1, 0, 0, 1, 1]), 5),
    "more than the padding": (rows([0, 0, 0, 1]), rows([0, 1, 1, 1]), 0),
    "restart under a prepared mask": (rows([0, 1, 2, 0, 1]), PREPARED, 0),
    "gap under a prepared mask": (rows([0, 1, 5]), PREPARED, 0),
}


@pytest.mark.parametrize("on_device", [False, True], ids=["counted", "counted by a tensor"])
@pytest.mark.parametrize("name", RIGHT | WRONG)
def test_positions_must_run_along(name: str, on_device: bool) -> None:
    positions, mask, start = (RIGHT | WRONG)[name]
    message = r"position_ids must run along .* Pad on the left only, and pass packed"
    with contextlib.nullcontext() if name in RIGHT else pytest.raises(ParameterError, match=message):
        check_positions(positions, mask, torch.tensor(start) if on_device else start)


model = functools.cache(lambda: compressed_pair("llama-gqa")[1])


@pytest.mark.parametrize("cache", ["default", "dynamic", "static"])
@torch.no_grad()
def test_packed_sequences_need_a_pass_without_cache(cache: str) -> None:
    ids, positions = windows(1, 20), torch.cat([torch.arange(12), torch.arange(8)])[None]
    options: dict[str, Any] = {}
    if cache == "dynamic":
        options["past_key_values"] = DynamicCache(config=model().config)
    elif cache == "static":
        options["past_key_values"] = StaticCache(model().config, max_cache_len=32)
    with pytest.raises(ParameterError, match=r"or with use_cache=False"):
        model()(ids, position_ids=positions, **options)


@torch.no_grad()
def test_packed_sequences_want_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed sequences are refused with flash attention, which gives the attention over latents no mask."""
    ids, positions = windows(1, 20), torch.cat([torch.arange(12), torch.arange(8)])[None]
    monkeypatch.setattr(model().config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ParameterError, match="'flash_attention_2' separates packed sequences"):
        model()(ids, position_ids=positions, use_cache=False)


@torch.no_grad()
def test_a_new_sequence_in_a_filled_cache_is_refused() -> None:
    cache = DynamicCache(config=model().config)
    model()(windows(1, 9), past_key_values=cache)
    with pytest.raises(ParameterError):
        model()(windows(1, 5), position_ids=torch.arange(5)[None], past_key_values=cache)
    # A single token is refused too, where the check does not have to wait for a device.
    with pytest.raises(ParameterError):
        model()(windows(1, 1), position_ids=torch.tensor([[0]]), past_key_values=cache)
    assert cache.get_seq_length() == 9, "refused before anything is cached"
    model()(windows(1, 1), position_ids=torch.tensor([[9]]), past_key_values=cache)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_padding_between_turns_is_refused(cache: str) -> None:
    """Padding between turns is refused: keys are rotated by slot, so padding would count as distance."""
    mask = torch.ones(2, 30, dtype=torch.int64)
    mask[1, 12:20] = 0
    with pytest.raises(ParameterError, match="Pad on the left only"):
        model().generate(windows(2, 30), attention_mask=mask, cache_implementation=cache, max_new_tokens=2)


@torch.no_grad()
def test_single_tokens_on_a_gpu_and_compiled_models_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr("recalkv.model.modeling.check_positions", lambda ids, *_: seen.append(ids.shape[-1]))
    cache = DynamicCache(config=model().config)

    def step(tokens: int) -> None:
        positions = torch.arange(tokens)[None] + cache.get_seq_length()
        model()(windows(1, tokens), position_ids=positions, past_key_values=cache)

    step(7)
    step(1)
    assert seen == [7, 1]
    monkeypatch.setattr(Tensor, "is_cpu", property(lambda self: False))
    step(1)
    step(2)
    assert seen == [7, 1, 2]
    monkeypatch.undo()
    monkeypatch.setattr("recalkv.model.modeling.check_positions", lambda ids, *_: seen.append(ids.shape[-1]))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    step(2)
    assert len(seen) == 3


def overwriting() -> Any:
    """Return a backend that overwrites what a compiled graph returned when the next one runs, as CUDA graphs may."""
    kept: list[Tensor] = []

    def backend(graph: Any, _: Any) -> Any:
        def run(*arguments: Any) -> Any:
            given = {each.untyped_storage().data_ptr() for each in arguments if isinstance(each, Tensor)}
            for each in kept:
                each.fill_(float("nan"))
            results = graph.forward(*arguments)
            kept[:] = [
                each
                for each in results
                if isinstance(each, Tensor)
                and each.is_floating_point()
                and each.untyped_storage().data_ptr() not in given
            ]
            return results

        return run

    return backend


@pytest.mark.parametrize("family", ["mistral-sliding", "gemma3"])
def test_compiled_steps_keep_no_table_that_cuda_graphs_overwrite(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recalkv.model.rotary._GRAPHED", {"cpu"})
    _, model, _ = compressed_pair(family, layers=2)
    ids, cache = windows(1, 28), StaticCache(model.config, max_cache_len=64)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=overwriting())
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        found = [compiled(ids[:, k : k + 1], past_key_values=cache).logits.clone() for k in range(20, 28)]
        torch.testing.assert_close(torch.cat(found, 1), model(ids).logits[:, 20:], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["mistral-sliding", "gemma3"])
def test_generation_makes_tables_before_its_compiled_steps(family: str) -> None:
    _, model, _ = compressed_pair(family, layers=2)
    settings = CompileConfig(backend=overwriting(), mode=None, fullgraph=False)
    settings._compile_all_devices = True  # type: ignore[attr-defined]
    torch._dynamo.reset()
    generate = functools.partial(model.generate, windows(1, 20), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    found = generate(cache_implementation="static", compile_config=settings)
    assert torch.equal(found, generate(cache_implementation="static"))


class _InTwoPieces(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        cache = DynamicCache(config=self.model.config)
        parts = [self.model(each, past_key_values=cache).logits for each in (ids[:, :20], ids[:, 20:])]
        return torch.cat(parts, 1)


def test_an_export_leaves_the_model_as_it_was() -> None:
    _, model, _ = compressed_pair("llama-gqa", method="loss-aware", bits="mixed", ratio=0.6, exact_window=8)
    ids, pieces = windows(2, 40), _InTwoPieces(model).eval()
    for layer in attending_layers(model):
        layer.self_attn.slots.forget_tables()
    _kept_mask.cache_clear()
    with torch.no_grad():
        exported = torch.export.export(pieces, (ids,), strict=False).module()
        torch.testing.assert_close(pieces(ids), model(ids).logits, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(exported(ids), pieces(ids), rtol=1e-3, atol=1e-3)
