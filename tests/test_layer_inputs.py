"""Layer inputs on disk: what several writers put is read back, as stored in the given dtype."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from recalkv.model.layers import ModuleSource
from recalkv.statistics.layer_inputs import LayerInputs
from recalkv.statistics.whitening import collect_input_moments
from tests.tiny import dense_model, windows

SHAPE = (5, 3, 4)


def states(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("kept_by", [1, 2, 5])
def test_what_is_put_in_comes_out(tmp_path: Path, dtype: torch.dtype, width: int, kept_by: int) -> None:
    inputs, layers = LayerInputs(tmp_path / "new" / "folder", SHAPE, dtype), [states(*SHAPE, seed=i) for i in range(3)]
    for index, whole in enumerate(layers):
        for first in range(0, 5, kept_by):
            inputs.put(index, first, whole[first : first + kept_by])
    for index, whole in enumerate(layers):
        for first, stop in ((0, 5), (0, 1), (4, 5), (1, 4), (2, 2)):
            read = inputs.get(index, first, stop)
            assert read.dtype == torch.float32 and torch.equal(read, whole[first:stop].to(dtype).float())
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "new" / "folder").iterdir()}
    assert sizes == dict.fromkeys(("000.bin", "001.bin", "002.bin"), 5 * 3 * 4 * width)


def test_any_layout_and_type_in_memory_is_taken(tmp_path: Path) -> None:
    inputs, strided = LayerInputs(tmp_path, SHAPE, torch.float32), states(4, 3, 5).permute(2, 1, 0)
    inputs.put(0, 0, strided)
    assert torch.equal(inputs.get(0, 0, 5), strided)
    inputs.put(1, 0, strided.double().requires_grad_().detach())
    assert torch.equal(inputs.get(1, 0, 5), strided)


def test_windows_past_the_end_are_dropped(tmp_path: Path) -> None:
    inputs, whole = LayerInputs(tmp_path, SHAPE, torch.float32), states(9, 3, 4)
    for first in (0, 4, 8):
        inputs.put(7, first, whole[first : first + 4])
    assert inputs.samples == 5 and torch.equal(inputs.get(7, 0, 5), whole[:5])
    assert (tmp_path / "007.bin").stat().st_size == 5 * 3 * 4 * 4
    inputs.put(8, 5, whole[:2])
    assert not (tmp_path / "008.bin").exists()


@pytest.mark.parametrize("first", [0, 1])
def test_two_writers_of_different_windows(tmp_path: Path, first: int) -> None:
    """Two writers of different windows do not truncate each other's data, whichever creates the file."""
    whole = states(*SHAPE)
    writers = [LayerInputs(tmp_path, SHAPE, torch.float32) for _ in range(2)]
    for window in (0, 3, 1, 4, 2):
        writers[(window >= 3) ^ first].put(0, window, whole[window : window + 1])
    for writer in writers:
        assert torch.equal(writer.get(0, 0, 5), whole)


def test_only_whole_inputs_of_the_pass_are_taken(tmp_path: Path) -> None:
    folder, whole = tmp_path / "inputs", states(*SHAPE)

    def kept(shape: tuple[int, int, int] = SHAPE, dtype: torch.dtype = torch.float32) -> LayerInputs:
        return LayerInputs(folder, shape, dtype)

    kept().put(0, 0, whole)
    assert not kept().are_of("digest"), "nothing says that they are whole"
    others = (kept(), "another"), (kept((4, 3, 4)), "digest"), (kept(dtype=torch.bfloat16), "digest")
    for other, moments in others:
        kept().put(0, 0, whole)
        kept().sign("digest", layers=1)
        assert kept().are_of("digest") and torch.equal(kept().get(0, 0, 5), whole) and not other.are_of(moments)
        assert not folder.exists(), "others are removed"
    kept().put(0, 0, whole)
    kept().sign("digest", layers=1)
    kept().put(0, 0, whole + 1)
    assert not kept().are_of("digest"), "a later pass was killed"
    kept().put(1, 0, whole)
    kept().sign("digest", layers=2)
    assert not kept().are_of("digest"), "those of a layer were removed before the pass went on"
    kept().remove()


def test_inputs_of_all_layers_of_a_hybrid_model_are_whole(tmp_path: Path) -> None:
    """Inputs of all layers of a hybrid model are kept, since gradients pass through layers with a state as well."""
    source, ids = ModuleSource(dense_model("qwen3-next-hybrid")), windows(2, 8)
    inputs = LayerInputs(tmp_path / "inputs", (2, 8, source.geometry.hidden), torch.float32)
    list(collect_input_moments(source, ids, 2, inputs))
    inputs.sign("digest", len(source.attention_types))
    assert inputs.are_of("digest")
