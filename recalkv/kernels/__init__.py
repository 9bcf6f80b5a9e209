"""Fused decode attention over 16-bit latents, in Triton.

:mod:`recalkv.kernels.scores` and :mod:`recalkv.kernels.contexts` implement flash decoding (split-KV) in two passes and
a reduction; :mod:`recalkv.kernels.plan` holds the tables of a layer, and :mod:`recalkv.kernels.decoder` connects the
kernels to a layer. The number of filled slots is read on the device: tiles of a static cache after the last query cost
nothing, and nothing is copied to the host.

Modeling code does not import this package; :func:`recalkv.kernels.decoder.use_kernels` installs the kernels in a
model, and only then is Triton imported.
"""
