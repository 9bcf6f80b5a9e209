"""Decoding on a CPU by compiled loops (Numba): a tile of slots is unpacked, scored and summed within a core's cache.

``step`` is the attention of one new token, ``scores`` what it does with a tile's keys, ``halves`` and ``matrix_units``
the products of packed rows in 16 bits; ``sources`` reads latents, ``rows`` and ``packing`` read and write packed rows;
``keys`` and ``plan`` prepare a layer, ``threads`` runs the loops where torch runs its own work.
"""
