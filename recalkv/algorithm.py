"""Algorithm 1 of the paper, step by step: where each step is.

The stages import each step's own module, so that DVC reruns only what a change touches;
:mod:`recalkv.compression` runs them all in memory.
"""

# Calculate_Fisher_Info
# Allocate_Compression_Ratio
from recalkv.method.allocation import LayerRanks, allocate, check_scales

# Group_SVD (keys), SVD (values)
from recalkv.method.factors import (
    LayerFactors,
    LayerStatistics,
    factorize_layer,
    key_weight,
    latent_parts,
    value_weight,
)

# Matrix_Fusion, Update_Layer
from recalkv.method.fuse_layer import fuse_layer

# Calculate_CKA_Similarity, Head_Reorder
from recalkv.method.grouping import group_layers, layer_energies
from recalkv.method.groups import HeadGrouping, group_heads, value_group_size, value_groups

# Offline_Calibration, and what goes beyond it
from recalkv.method.refit import LayerRefit, in_model_order, install, refit_layers
from recalkv.statistics.fisher import FisherScores, collect_fisher_scores

# Whitening (section 4.1)
from recalkv.statistics.whitening import InputMoments, collect_input_moments

__all__ = [
    "FisherScores",
    "HeadGrouping",
    "InputMoments",
    "LayerFactors",
    "LayerRanks",
    "LayerRefit",
    "LayerStatistics",
    "allocate",
    "check_scales",
    "collect_fisher_scores",
    "collect_input_moments",
    "factorize_layer",
    "fuse_layer",
    "group_heads",
    "group_layers",
    "in_model_order",
    "install",
    "key_weight",
    "latent_parts",
    "layer_energies",
    "refit_layers",
    "value_group_size",
    "value_groups",
    "value_weight",
]
