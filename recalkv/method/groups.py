"""Which heads share a latent: CKA similarity, grouping of one layer's heads, and the value groups."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from recalkv.method.methods import resolve_method
from recalkv.method.reorder import greedy_groups, neighbour_groups, permutation_of
from recalkv.method.similarity import head_cka
from recalkv.params import CompressionParams
from recalkv.statistics.whitening import InputMoments

__all__ = ["HeadGrouping", "group_heads", "value_group_size", "value_groups"]


@dataclass(frozen=True)
class HeadGrouping:
    """Key heads of one layer in groups.

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
        return permutation_of(self.groups)


def group_heads(weight: Tensor, moments: InputMoments, head_dim: int, parameters: CompressionParams) -> HeadGrouping:
    """CKA of one layer's key heads and the grouping (Algorithm 1, Calculate_CKA_Similarity, Head_Reorder).

    Grouping by tail energy needs all layers at once (:func:`recalkv.method.grouping.regroup`); here it
    starts from neighbours.
    """
    similarity = head_cka(weight, moments.centred_gram(), head_dim)
    heads = similarity.shape[0]
    if resolve_method(parameters).grouping == "cka":
        groups = greedy_groups(similarity, parameters.group_size)
    else:
        groups = neighbour_groups(heads, parameters.group_size)
    return HeadGrouping(similarity, groups)


def value_group_size(parameters: CompressionParams, kv_heads: int) -> int:
    """Key/value heads that share a value latent: all of them, or the group size."""
    return kv_heads if resolve_method(parameters).whole_values else parameters.group_size


def value_groups(permutation: Sequence[int], parameters: CompressionParams) -> list[list[int]]:
    """Value heads of each group: consecutive heads of the permuted order."""
    neighbours = neighbour_groups(len(permutation), value_group_size(parameters, len(permutation)))
    return [[permutation[position] for position in group] for group in neighbours]
