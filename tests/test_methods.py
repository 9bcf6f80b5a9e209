"""Method resolution: defaults of the method, choices of the parameters, and choices that exclude each other."""

import dataclasses
import typing
from typing import Any

import pytest

from recalkv.compression import compress_layers
from recalkv.errors import ParameterError
from recalkv.method.methods import METHODS, Choices, resolve_method
from recalkv.model.layers import ModuleSource
from recalkv.params import CompressionParams
from tests import raises
from tests.steps import method_of
from tests.tiny import calibration, dense_model, plain, windows

OTHERS: dict[str, tuple[Any, ...]] = {
    "joint": (True, False), "grouping": ("neighbors", "cka"), "allocation": ("water-filling", "fisher", "uniform"),
    "refit": ("none", "values", "output"),
}  # fmt: skip


def chosen(method: Choices) -> dict[str, Any]:
    return {each.name: getattr(method, each.name) for each in dataclasses.fields(Choices)}


def test_every_method_of_the_parameters_is_described() -> None:
    assert set(typing.get_args(CompressionParams.model_fields["method"].annotation)) == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_auto_is_the_methods_own(name: str) -> None:
    method = method_of(method=name)
    assert chosen(method) == chosen(METHODS[name])
    given = plain(method=name)
    numbers = {each.name for each in dataclasses.fields(method)} - set(chosen(method))
    assert {number: getattr(method, number) for number in numbers} == given.model_dump(include=numbers)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("choice", "value"), [(choice, value) for choice in OTHERS for value in OTHERS[choice]])
def test_a_choice_of_its_own_changes_nothing_else(name: str, choice: str, value: Any) -> None:
    # A joint latent of keys and values has no OVC; the combination is refused, as tested below.
    refit = {"refit": "none"} if (choice, value) in (("joint", True), ("refit", "values")) else {}
    joint = {"joint": False} if (choice, value) == ("refit", "values") else {}
    changes = refit | joint | {choice: value}
    expected = chosen(METHODS[name]) | changes
    if expected["joint"]:
        expected["whole_values"] = False
    assert chosen(method_of(method=name, **changes)) == expected


@pytest.mark.parametrize(
    ("given", "refit"),
    [
        ({"bits": "mixed", "ratio": 0.9}, "none"), ({"bits": "auto", "ratio": 0.75}, "none"),
        ({"bits": "mixed", "ratio": 0.91}, "output"), ({"bits": 4, "ratio": 0.75}, "output"),
        ({"bits": 16, "ratio": 0.5}, "output"), ({"bits": "mixed", "ratio": 0.75, "refit": "output"}, "output"),
        ({"bits": "mixed", "ratio": 0.9375, "refit": "none"}, "none"),
    ],
)  # fmt: skip
def test_the_output_is_fitted_where_much_is_left_out(given: dict[str, Any], refit: str) -> None:
    assert method_of(**given).refit == refit


def test_values_are_grouped_alone_with_the_keys_or_all_at_once() -> None:
    assert method_of(method="recalkv", group_size=2).value_group_size(5) == 5
    assert method_of(method="palu", group_size=2).value_group_size(5) == 2
    # Values that share the keys' latents are grouped like the keys.
    assert method_of(method="recalkv", joint=True, refit="none", group_size=2).value_group_size(5) == 2


CONFLICTS: list[tuple[dict[str, Any], str]] = [
    ({"refit": "values"}, r"compression\.refit=values .*joint=true shares .*; set joint to false, or refit to output"),
    ({"method": "recalkv", "joint": True}, r"compression\.refit=values .* set joint to false, or refit to"),
    ({"method": "palu", "bits": "mixed"},
     r"compression\.bits=mixed .* compression\.allocation=fisher does not use; set allocation to water-filling, or"),
    ({"bits": "mixed", "allocation": "uniform"}, r"bits=mixed .*allocation=uniform does not use; set allocation to"),
    ({"bits": "mixed", "rank_multiple": 16}, r"compression\.rank_multiple=16 must be 1 with compression\.bits=mixed"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), CONFLICTS)
def test_choices_that_exclude_each_other_are_refused_before_any_work(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = CompressionParams(**changes)
    raises(ParameterError, message, resolve_method, parameters)
    source = ModuleSource(dense_model("llama-gqa"))
    monkeypatch.setattr(source, "tensor", lambda name: pytest.fail(f"{name} was read"))
    raises(ParameterError, message, compress_layers, source, windows(), calibration(), parameters)


def test_groups_are_no_larger_than_the_model() -> None:
    assert method_of(group_size=4).group_size == 4
    assert [resolve_method(CompressionParams(group_size=size), 3).group_size for size in (1, 3, 4)] == [1, 3, 3]
