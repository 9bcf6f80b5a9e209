"""Decoding the codec on a CPU by loops that Numba compiles (:mod:`recalkv.trellis.cpu`).

``step`` attends from a new token, and ``layer`` calls it, and the loops of rows, for a layer's codec.
"""
