"""Trellis-coded quantization: ``codes`` of a few bits a number, and the ``rows`` of bytes that hold a token's.

Both forms cache such rows: the codec for post-RoPE keys and values, and latents for themselves. ``cpu`` packs and
unpacks rows by loops that Numba compiles, ``triton_pack`` packs them on CUDA; plain torch does both anywhere.
"""
