"""Trellis-coded quantization: ``codes`` of a few bits per coefficient, and ``rows`` of bytes that hold a token's codes.

Both forms cache rows: the codec for post-RoPE keys and values, and quantized latents. ``cpu`` packs and unpacks rows
with loops compiled by Numba, ``triton_pack`` packs them on CUDA, and plain torch does both on any device.
"""
