"""The typed config of compressed checkpoints: what it counts, writes, reads and refuses."""

import copy
import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from recalkv.errors import CheckpointError
from recalkv.model.spec import FORMAT_VERSION, LatentSpec, LayerSpec
from recalkv.model.support import AttentionGeometry
from tests import raises

# Three KV heads of size 8: key groups of 2 and 1 heads, one value group.
GEOMETRY = AttentionGeometry(hidden=48, heads=6, kv_heads=3, head_dim=8, layers=2)
PLAIN = LayerSpec([10, 8], [24], head_permutation=[2, 0, 1])
CODES = LayerSpec([10, 5], [9], key_segments=[[(8, 4), (2, 2)], [(5, 3)]], value_segments=[[(9, 8)]])
JOINT = LayerSpec([32, 3], [32, 3], joint=True, key_segments=[[(32, 2)], [(3, 4)]], value_layout="fused")


def spec(*layers: LayerSpec, **changes: Any) -> LatentSpec:
    joint = layers[0].joint
    settings = {"key_group_size": 2, "value_group_size": 2 if joint else 3, "joint": joint, "biases": ["q", "o"]}
    return LatentSpec(GEOMETRY, layers, **(settings | changes))


def test_elements_and_bytes_by_hand() -> None:
    assert (PLAIN.cached_elements, PLAIN.cached_bits, PLAIN.cached_bytes(4)) == (42, 672, 168)
    # One scale byte per segment, and codes for multiples of 8 latents: 5 + 3 + 4 bytes for keys, 17 for values.
    assert (CODES.cached_elements, CODES.cached_bits, CODES.cached_bytes(4)) == (24, 232, 29)
    assert (JOINT.cached_elements, JOINT.cached_bits) == (35, 8 * (9 + 5))
    assert dataclasses.replace(JOINT, key_segments=None).cached_bits == 16 * 35
    both = spec(PLAIN, CODES, latents_centered=True)
    assert both.cached_elements_per_token == 66
    assert (both.cached_bits_per_token, both.cached_bytes_per_token()) == (904, 113)
    assert both.cached_bytes_per_token(element_bytes=4) == 197
    assert (both.dense_elements_per_token, both.dense_bytes_per_token) == (96, 192)
    assert both.removed == pytest.approx(1 - 113 / 192) and (both.key_heads, both.value_heads) == ([2, 1], [3])


def test_row_layouts_stand_for_what_is_cached() -> None:
    assert PLAIN.key_rows is None and PLAIN.value_rows is None and not PLAIN.quantized
    assert CODES.key_rows is not None and CODES.key_rows.segments == ((8, 4), (2, 2), (5, 3))
    assert CODES.value_rows is not None and CODES.value_rows.segments == ((9, 8),)
    assert JOINT.key_rows is not None and JOINT.value_rows is None and JOINT.quantized


@pytest.mark.parametrize("layer", [PLAIN, CODES, JOINT])
def test_what_is_written_is_read_again(layer: LayerSpec) -> None:
    written = spec(layer, layer, method="svd", parameters={"ratio": 0.5}, source={"name": "tiny"}, qk_norm=True)
    content = json.loads(json.dumps(written.to_dict()))
    # The dictionary equals its JSON form: it has no tuples, which a file would turn into lists.
    assert content == written.to_dict() and content["version"] == FORMAT_VERSION
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2}
    assert LatentSpec.from_config(SimpleNamespace(recalkv=content, head_dim=8, **sizes)) == written
    assert LatentSpec.from_dict(content, GEOMETRY) == written


def test_lists_and_tuples_are_the_same() -> None:
    assert LayerSpec((10, 8), (24,), head_permutation=(2, 0, 1)) == PLAIN
    assert hash(PLAIN) == hash(copy.deepcopy(PLAIN))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"key_ranks": []}, r"key_ranks=\[\] must be at least one rank"),
        ({"key_ranks": [3, 0]}, r"key_ranks=\[3, 0\].*each at least 1"),
        ({"key_ranks": [3, 2.0]}, "must be a list of whole numbers"),
        ({"key_ranks": [True, 2]}, "must be a list of whole numbers"),
        ({"key_ranks": "32"}, "must be a list of whole numbers"),
        ({"value_layout": "both"}, "value_layout='both' is none of separate, fused"),
        ({"head_permutation": [0, 2, 2]}, r"\[0, 2, 2\] is no permutation"),
        ({"key_segments": [[(3, 4)], [(2, 4)]]}, "must both be given or both be null"),
        ({"key_segments": [[(3, 4)], [(1, 4)]], "value_segments": [[(4, 4)]]}, r"key_segments of \[3, 1\] latents"),
        ({"key_segments": [[(5, 4)]], "value_segments": [[(4, 4)]]}, r"key_segments of \[5\] latents"),
        ({"key_segments": [[(3, 5)], [(2, 4)]], "value_segments": [[(4, 4)]]}, "packed.* bits one of 1, 2, 3, 4, 6, 8"),
        ({"key_segments": [[(4, 4), (-1, 4)], [(2, 4)]], "value_segments": [[(4, 4)]]}, "cannot be packed"),
        ({"key_segments": [[3, 4], [2, 4]], "value_segments": [[(4, 4)]]}, "whole numbers"),
        ({"key_segments": [[(3, 2, 8)], [(2, 4)]], "value_segments": [[(4, 4)]]}, "pairs of width, bits"),
        ({"joint": True}, r"ranks \[3, 2\] and values of ranks \[4\] share"),
        ({"joint": True, "value_ranks": [3, 2], "value_segments": [[(3, 4)], [(2, 4)]]}, "value_segments null"),
    ],
)
def test_a_layer_that_contradicts_itself_is_refused(settings: dict[str, Any], message: str) -> None:
    raises(CheckpointError, message, LayerSpec, **{"key_ranks": [3, 2], "value_ranks": [4]} | settings)


def _set(content: dict[str, Any], path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for name in outer:
        content = content[int(name) if name.isdigit() else name]
    content[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", FORMAT_VERSION - 1, f"version {FORMAT_VERSION - 1} is not {FORMAT_VERSION}; load it with"),
        ("version", None, "version None is not"),
        ("value_mode", "auto", r"unknown entries \['value_mode'\]"),
        ("layers.1.rank", 3, r"layer 1 .*unknown entries \['rank'\]"),
        ("layers", {"0": {}}, "must be a list"),
        ("layers", [], "describes 0 layers, the model has 2"),
        ("layers.1.key_ranks", [17, 8], r"layer 1: key_ranks=\[17, 8\] must be.*at most \[16, 8\]"),
        ("layers.0.value_ranks", [25], r"layer 0: value_ranks=\[25\] must be.*at most \[24\]"),
        ("layers.0.key_ranks", [8], "one rank for each group"),
        ("layers.0.key_ranks", [8, -1], r"layer 0: key_ranks=\[8, -1\]"),
        ("layers.0.head_permutation", [1, 0], "of 2 heads does not fit the model's 3"),
        ("key_group_size", 4, "key_group_size=4 must be from 1 to the model's 3"),
        ("value_group_size", 0, "value_group_size=0 must be"),
        ("key_group_size", "2", "key_group_size='2' must be"),
        ("joint", True, "share their latents"),
        ("qk_norm", 1, "qk_norm=1 must be true or false"),
        ("latents_centered", "no", "latents_centered='no' must be true or false"),
        ("biases", ["q", "x"], r"biases=\['q', 'x'\] must be of q, k, v, o"),
        ("biases", [["q"]], "must be of q, k, v, o"),
    ],
)
def test_a_section_that_does_not_fit_is_refused(path: str, value: Any, message: str) -> None:
    content = spec(PLAIN, PLAIN).to_dict()
    _set(content, path, value)
    with pytest.raises(CheckpointError, match=message) as caught:
        LatentSpec.from_dict(content, GEOMETRY)
    # Every message ends with the remedy.
    assert "export" in str(caught.value)


@pytest.mark.parametrize("name", ["joint", "layers", "biases", "calibration"])
def test_an_entry_that_is_missing_is_named(name: str) -> None:
    content = spec(PLAIN, PLAIN).to_dict()
    del content[name]
    raises(CheckpointError, rf"lacks the entries \['{name}'\]", LatentSpec.from_dict, content, GEOMETRY)
    del (content := spec(PLAIN, PLAIN).to_dict())["layers"][1]["key_ranks"]
    raises(CheckpointError, r"layer 1 lacks the entries \['key_ranks'\]", LatentSpec.from_dict, content, GEOMETRY)


@pytest.mark.parametrize(
    ("layers", "changes", "message"),
    [
        ([PLAIN, JOINT], {}, "layer 1: joint=True differs from the model's False"),
        ([JOINT, JOINT], {"value_group_size": 3}, "must be equal where keys and values share their latents"),
        ([LayerSpec([33, 3], [33, 3], joint=True), JOINT], {}, r"at most \[32, 16\]"),
    ],
)
def test_layers_that_do_not_fit_are_refused(layers: list[LayerSpec], changes: dict[str, Any], message: str) -> None:
    raises(CheckpointError, message, spec, *layers, **{"joint": layers[-1].joint and layers[0].joint} | changes)


def test_a_config_without_a_section_is_refused() -> None:
    with pytest.raises(CheckpointError, match="SimpleNamespace has no `recalkv` section; make the checkpoint with"):
        LatentSpec.from_config(SimpleNamespace(recalkv=None))
