"""The loss-aware metric: its moments against plain autograd, its factors against other ways to the optimum."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recalkv.errors import NonFiniteError
from recalkv.method.allocation import predicted_loss
from recalkv.method.lowrank import LowRank
from recalkv.method.svd import GroupPart, factorize_parts, group_columns, group_parts
from recalkv.model.spec import LayerSpec
from recalkv.statistics import fisher
from recalkv.statistics.loss_metric import LossMoments, LossMomentsAccumulator
from tests import raises
from tests.test_fisher import gradients_of
from tests.tiny import attending_layers, dense_model, windows

# --- moments ---


def collected(model: Any, ids: Tensor, folder: Path) -> list[LossMoments]:
    return [layer.moments for layer in reversed(gradients_of(model, ids, folder))]


def tokens_of(model: Any, ids: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs, and gradients of each window's summed loss at keys and values: (windows, length, .) float64."""
    rows: list[list[Tensor]] = [[], [], []]
    outputs: list[Tensor] = []
    attention = attending_layers(model)[index].self_attn

    def keep(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        outputs.append(output)
        if module is attention.k_proj:
            rows[0].append(args[0].detach())

    hooks = [projection.register_forward_hook(keep) for projection in (attention.k_proj, attention.v_proj)]
    for window in ids:
        outputs.clear()
        loss = model(window[None], labels=window[None]).loss * (len(window) - 1)
        for row, gradient in zip(rows[1:], torch.autograd.grad(loss, outputs), strict=True):
            row.append(gradient)
    for hook in hooks:
        hook.remove()
    x, k, v = (torch.cat(part).double() for part in rows)
    return x, k, v


@pytest.mark.parametrize(
    ("family", "sinks"),
    [
        *(("llama-gqa", sinks) for sinks in (0, 1, 3)),
        *((family, 1) for family in ("qwen2-bias", "qwen3-qk-norm", "mistral-sliding", "granite4-hybrid")),
    ],
)
def test_moments_are_those_of_autograd(
    family: str, sinks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fisher, "SINK_TOKENS", sinks)
    model, ids = dense_model(family), windows(samples=3, length=24)
    moments = collected(model, ids, tmp_path)
    for index in (0, len(moments) - 1):
        x, k, v = tokens_of(model, ids, index)
        gram, mean, weight = torch.zeros(48, 48, dtype=torch.float64), torch.zeros(48, dtype=torch.float64), 0.0
        key, value = torch.zeros(2, *k.shape[-1:], k.shape[-1], dtype=torch.float64)
        for window in range(3):
            for t in range(sinks, 24):
                squared = float(k[window, t].square().sum() + v[window, t].square().sum())
                gram += squared * torch.outer(x[window, t], x[window, t])
                mean += squared * x[window, t]
                weight += squared
                key += torch.outer(k[window, t], k[window, t])
                value += torch.outer(v[window, t], v[window, t])
        gram /= weight
        if sinks:
            gram += sum(torch.outer(x[w, t], x[w, t]) for w in range(3) for t in range(sinks)) / (3 * sinks)
        count = 3 * (24 - sinks)
        figures = {"gram": gram, "mean": mean / weight, "key_gradient": key / count, "value_gradient": value / count}
        for name, expected in figures.items():
            actual, limit = getattr(moments[index], name), 1e-4 * float(expected.abs().max())
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=limit)
        assert moments[index].tokens == count


def test_zero_gradients_are_defined() -> None:
    sums, inputs, nothing = LossMomentsAccumulator(6, 4, 1), torch.randn(2, 5, 6), torch.zeros(2, 5, 4)
    sums.add(inputs, nothing, nothing)
    moments, rows = sums.finish("layer 0"), inputs[:, 1:].flatten(0, 1).double()
    expected = rows.T @ rows / 8 + inputs[:, 0].double().T @ inputs[:, 0].double() / 2
    torch.testing.assert_close(moments.gram, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moments.mean, rows.mean(dim=0), rtol=1e-5, atol=1e-6)
    assert not moments.key_gradient.any()
    weight = torch.randn(6, 4)
    factors = factorize_groups(weight, moments.gram, group_columns([[0, 1]], 2), [2], moments.key_gradient, 1e-3)
    assert all(torch.isfinite(part).all() for part in (*factors.down, *factors.up))
    expected_factors = factorize_groups(weight, moments.gram, group_columns([[0, 1]], 2), [2])
    torch.testing.assert_close(factors.dense(), expected_factors.dense())


def test_non_finite_gradients_name_the_layer() -> None:
    sums = LossMomentsAccumulator(6, 4, 1)
    sums.add(torch.randn(1, 5, 6), torch.full((1, 5, 4), float("inf")), torch.zeros(1, 5, 4))
    raises(NonFiniteError, r"gradients of layer 7;.*calibration\.precision", sums.finish, "layer 7")


def test_one_window_and_one_token_work(tmp_path: Path) -> None:
    moments = collected(dense_model("llama-gqa"), windows(samples=1, length=2), tmp_path)
    assert all(torch.isfinite(layer.gram).all() and layer.tokens == 1 for layer in moments)


# --- factors ---


def problem(seed: int = 0, inputs: int = 30, outputs: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = draw(inputs, 10) * torch.logspace(0, -1, 10, dtype=torch.float64)
    g = draw(outputs, 6) * torch.logspace(0, -2, 6, dtype=torch.float64)
    return draw(10, 6), x.T @ x, g.T @ g


def factorize_groups(
    weight: Tensor, gram: Tensor | None, columns: list[Tensor], ranks: list[int], gradient: Any = None,
    damping: float = 0.0,
) -> LowRank:  # fmt: skip
    return factorize_parts(group_parts(weight, gram, columns, gradient, damping), ranks)


def objective(weight: Tensor, product: Tensor, gram: Tensor, gradient: Tensor) -> float:
    difference = product - weight
    return float(torch.trace(gram @ difference @ gradient @ difference.T))


@pytest.mark.parametrize("rank", [1, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_factors_beat_random_and_alternating_solutions(seed: int, rank: int) -> None:
    weight, gram, gradient = problem(seed)
    left, right = GroupPart(weight, weight.T @ gram @ weight, gradient).factors(rank)
    ours, generator = objective(weight, left @ right, gram, gradient), torch.Generator().manual_seed(seed)
    for _ in range(5):
        l = torch.randn(10, rank, generator=generator, dtype=torch.float64)  # noqa: E741
        r = torch.randn(rank, 6, generator=generator, dtype=torch.float64)
        assert ours < objective(weight, l @ r, gram, gradient)
        for _ in range(200):
            r = torch.linalg.solve(l.T @ gram @ l, l.T @ gram @ weight)
            l = weight @ gradient @ r.T @ torch.linalg.inv(r @ gradient @ r.T)  # noqa: E741
        assert ours <= objective(weight, l @ r, gram, gradient) * (1 + 1e-9)


@pytest.mark.parametrize("rank", [1, 4, 6])
def test_discarded_energy_is_the_objective(rank: int) -> None:
    weight, gram, gradient = problem()
    part = GroupPart(weight, weight.T @ gram @ weight, gradient)
    (left, right), energies = part.factors(rank), part.energies()
    assert (energies.diff() <= 0).all()
    lost, total = objective(weight, left @ right, gram, gradient), float(energies.sum())
    assert lost == pytest.approx(float(energies[rank:].sum()), rel=1e-6, abs=1e-9 * total)
    specs = [LayerSpec([rank], [6]), LayerSpec([6], [rank])]
    assert predicted_loss(specs, [[energies, energies]] * 2) == pytest.approx(lost, rel=1e-6, abs=1e-9 * total)


def test_identity_gradient_is_the_whitened_method() -> None:
    weight, gram, _ = problem()
    columns = group_columns([[0, 2], [1]], 2)
    whitened = factorize_groups(weight, gram, columns, [2, 1])
    for scale in (1.0, 1e-9, 1e6):
        factors = factorize_groups(weight, gram, columns, [2, 1], scale * torch.eye(6, dtype=torch.float64), 1e-3)
        torch.testing.assert_close(factors.dense(), whitened.dense(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("inputs", [1, 3, 30])
@pytest.mark.parametrize("outputs", [1, 3, 20])
@pytest.mark.parametrize("damping", [0.0, 1e-3])
def test_singular_metrics_give_finite_factors(inputs: int, outputs: int, damping: float) -> None:
    weight, gram, gradient = problem(inputs=inputs, outputs=outputs)
    for rank in (1, 4, 6):
        factors = factorize_groups(weight, gram, group_columns([[0]], 6), [rank], gradient, damping)
        assert torch.isfinite(factors.dense()).all()
        error = objective(weight, factors.dense(), gram, gradient)
        assert error <= objective(weight, torch.zeros_like(weight), gram, gradient) * (1 + 1e-9)
        if rank >= min(inputs, outputs) or rank == 6:
            assert error <= 1e-2 * objective(weight, torch.zeros_like(weight), gram, gradient)
        # Latents have the magnitude of the outputs, whatever that of the gradients.
        up = factors.up[0]
        gauge = up @ up.T
        torch.testing.assert_close(gauge, torch.eye(len(gauge), dtype=torch.float64), rtol=1e-6, atol=1e-8)
