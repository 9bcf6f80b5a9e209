"""Caches of latents: packed rows, growing layers and the residual window, with shared products and rotations."""
