"""Fused decode attention over latents of 16 bits, in Triton.

:mod:`recalkv.kernels.scores` and :mod:`recalkv.kernels.contexts` are flash decoding in two passes and a sum;
:mod:`recalkv.kernels.plan` is what they need to know of a layer, and :mod:`recalkv.kernels.decoder` what a layer
attends by. How many slots are filled is read from the device:
tiles of a static cache that lie after the last query cost nothing, and no number travels to the host.

Nothing here is imported by the run-time itself; :func:`recalkv.kernels.decoder.use_kernels` puts the kernels into a
model, and Triton is imported only there.
"""
