"""The codec in transformers: an attention function and a cache of rows for any model, enabled by ``use_codec``.

``cache`` holds rows and exact tokens, ``attention`` is the function that models call, ``chunk`` attends from several
tokens (by ``prefill``) and ``decode`` from single ones: on a CPU by the compiled loops in ``cpu``, on CUDA by ``cuda``
or ``triton_decode`` (chosen in ``row_attention``). ``paged`` does both over the blocks of a serving engine. ``partial``
has what all share: attention over some of the slots, and merging.
"""
