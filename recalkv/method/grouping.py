"""Step 5, choose which heads of a layer share a latent (Algorithm 1, Calculate_CKA_Similarity, Head_Reorder).

Algorithm 1 allocates before it reorders. Water-filling needs the spectra of the groups, so heads are grouped first.
"""

from dataclasses import dataclass

from torch import Tensor

from recalkv.method.problem import LayerProblem
from recalkv.method.reorder import greedy_groups, neighbor_groups
from recalkv.method.similarity import head_cka


@dataclass(frozen=True)
class HeadGrouping:
    """Grouping of the key heads of one layer.

    Attributes
    ----------
    similarity : (h_kv, h_kv) float64
        CKA of the key heads, in the model's order.
    groups
        Heads of each group.
    """

    similarity: Tensor
    groups: list[list[int]]

    @property
    def permutation(self) -> list[int]:
        """Original head at each new position."""
        return [head for group in self.groups for head in group]


def group_heads(problem: LayerProblem) -> HeadGrouping:
    """Compute the CKA of one layer's key heads and group them by similarity or as neighbors."""
    method = problem.method
    similarity = head_cka(problem.keys, problem.statistics.inputs.centered_gram(), problem.head_dim)
    if method.grouping == "cka":
        return HeadGrouping(similarity, greedy_groups(similarity, method.group_size))
    return HeadGrouping(similarity, neighbor_groups(problem.kv_heads, method.group_size))
