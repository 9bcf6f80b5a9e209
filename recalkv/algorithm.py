"""Algorithm 1 of the paper, step by step: where each step is.

The stages import each step's own module, so that DVC reruns only what a change touches;
:mod:`recalkv.oneshot` runs them all in memory.
"""

# Calculate_Fisher_Info
from recalkv.fisher import FisherScores, collect_fisher_scores

# Allocate_Compression_Ratio
from recalkv.steps.allocation import LayerRanks, allocate

# Offline_Calibration
from recalkv.steps.calibration import LayerValues, compressed_values, in_model_order

# Group_SVD (keys), SVD (values)
from recalkv.steps.factors import factorize_keys, key_weight, plain_values, value_weight

# Matrix_Fusion, Update_Layer
from recalkv.steps.fuse import fuse_layer

# Calculate_CKA_Similarity, Head_Reorder
from recalkv.steps.groups import HeadGrouping, group_heads, value_group_size, value_groups

# Whitening (section 4.1)
from recalkv.whitening import InputMoments, collect_input_moments

__all__ = [
    "FisherScores",
    "HeadGrouping",
    "InputMoments",
    "LayerRanks",
    "LayerValues",
    "allocate",
    "collect_fisher_scores",
    "collect_input_moments",
    "compressed_values",
    "factorize_keys",
    "fuse_layer",
    "group_heads",
    "in_model_order",
    "key_weight",
    "plain_values",
    "value_group_size",
    "value_groups",
    "value_weight",
]
