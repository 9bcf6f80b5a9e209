"""Fused decode attention over latents, in Triton.

:mod:`recalkv.kernels.decode` has the kernels, :mod:`recalkv.kernels.plan` what they need to know of a layer,
:mod:`recalkv.kernels.module` the attention module that uses them. Nothing here is imported by the rest of
the package; stages that generate call :func:`recalkv.kernels.module.use_kernels` as ``runtime.kernels`` says,
and Triton is imported only there.
"""
