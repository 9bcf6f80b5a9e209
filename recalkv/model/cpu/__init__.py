"""Decoding on a CPU by compiled loops (Numba): a tile of slots is unpacked, scored and summed within a core's cache.

``step`` is the attention of one new token, ``rows`` reads and writes packed rows, ``plan`` prepares a layer for both,
``threads`` runs them where torch runs its own work.
"""
