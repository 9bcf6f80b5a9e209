"""One LLaMA-2-7B-sized layer, statistics to factors: our route against an SVD of the whitened weight.

Random data, float64. Both routes give the same product L R; the script checks that before it prints.
"""

import platform
import time
from collections.abc import Callable

import torch
import typer
from torch import Tensor

from recalkv.evaluation.resources import peak_resident_mib, resident_mib
from recalkv.method.lowrank import LowRank
from recalkv.method.reorder import neighbour_groups
from recalkv.method.svd import factorize_parts, group_columns, group_parts, relative_error
from recalkv.statistics.whitening import damped


def plain_svd(weight: Tensor, gram: Tensor, columns: list[Tensor], ranks: list[int]) -> LowRank:
    """The textbook route: factor S S^T of C, SVD of S^T W_g, L = S^-T U Sigma^1/2, R = Sigma^1/2 V^T."""
    values, vectors = torch.linalg.eigh(gram)
    factor = vectors * values.clamp_min(0).sqrt()
    down, up = [], []
    for index, rank in zip(columns, ranks, strict=True):
        u, s, vh = torch.linalg.svd(factor.T @ weight[:, index], full_matrices=False)
        root = s[:rank].sqrt()
        down.append(torch.linalg.solve(factor.T, u[:, :rank] * root))
        up.append(root[:, None] * vh[:rank])
    return LowRank(down, up)


def timed(work: Callable[[], LowRank]) -> tuple[LowRank, float, float, float]:
    """Result, wall seconds, CPU seconds, and growth of the process's peak memory in MiB."""
    before = resident_mib()
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return result, wall, cpu, peak_resident_mib() - before


def main(hidden: int = 4096, heads: int = 32, group_size: int = 4, ratio: float = 0.5, tokens: int = 8192) -> None:
    """Time the decomposition of the keys (grouped) and the values (one group) of one layer."""
    head_dim = hidden // heads
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(tokens, hidden, generator=generator) * torch.logspace(0, -2, hidden)
    inputs = inputs @ torch.linalg.qr(torch.randn(hidden, hidden, generator=generator)).Q
    start = time.perf_counter()
    gram = damped((inputs.T @ inputs).double() / tokens, 1e-6)
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(f"m = {hidden}, {heads} heads, group size {group_size}, ratio {ratio}; Gram matrix of {tokens} tokens: "
          f"{time.perf_counter() - start:.1f} s")  # fmt: skip
    weight = torch.randn(hidden, hidden, generator=generator).double() / hidden**0.5
    cases = {
        "keys (grouped)": neighbour_groups(heads, group_size),
        "values (one group)": neighbour_groups(heads, heads),
    }
    print(f"{'':<20}{'route':<14}{'wall s':>9}{'CPU s':>9}{'peak MiB':>10}{'error':>11}")
    for name, groups in cases.items():
        columns = group_columns(groups, head_dim)
        ranks = [int(len(index) * (1 - ratio)) for index in columns]
        ours, *our_cost = timed(lambda c=columns, r=ranks: factorize_parts(group_parts(weight, gram, c), r))  # type: ignore[misc]
        theirs, *svd_cost = timed(lambda c=columns, r=ranks: plain_svd(weight, gram, c, r))  # type: ignore[misc]
        torch.testing.assert_close(ours.dense(), theirs.dense(), rtol=1e-6, atol=1e-8)
        for route, factors, cost in (("W^T C W, eigh", ours, our_cost), ("svd(S^T W)", theirs, svd_cost)):
            error = relative_error(weight, factors.dense(), gram)
            print(f"{name:<20}{route:<14}{cost[0]:>9.1f}{cost[1]:>9.1f}{cost[2]:>10.0f}{error:>11.6f}")
        print(f"{name:<20}{'ratio':<14}{svd_cost[0] / our_cost[0]:>8.1f}x{svd_cost[1] / our_cost[1]:>8.1f}x")
    # Loss-aware: keys and values of a group share a latent, and the outputs have a metric of their own.
    values = torch.randn(hidden, hidden, generator=generator).double() / hidden**0.5
    gradients = torch.randn(tokens, 2 * hidden, generator=generator) * torch.logspace(0, -1, 2 * hidden)
    metric = (gradients.T @ gradients).double() / tokens
    columns = [torch.cat([index, index + hidden]) for index in group_columns(cases["keys (grouped)"], head_dim)]
    ranks = [int(len(index) * (1 - ratio)) for index in columns]
    both = torch.cat([weight, values], dim=1)
    _, *cost = timed(lambda: factorize_parts(group_parts(both, gram, columns, metric, 1e-3), ranks))
    print(f"{'keys and values':<20}{'loss-aware':<14}{cost[0]:>9.1f}{cost[1]:>9.1f}{cost[2]:>10.0f}")
    parts = group_parts(both, gram, columns, metric, 1e-3)
    start = time.perf_counter()
    for part in parts:
        part.energies()
    print(f"{'':<20}{'energies only':<14}{time.perf_counter() - start:>9.1f}")


if __name__ == "__main__":
    typer.run(main)
