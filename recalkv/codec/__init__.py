"""The codec: post-RoPE keys and values in a fixed basis, coded by a few bits each; no weight of the model changes.

``moments`` takes statistics at the attention function, ``rope`` finds how keys are rotated, ``fit`` makes a codec of
them, and ``sidecar`` is the codec and its file. Its rows and codes are those of :mod:`recalkv.trellis`.
"""
