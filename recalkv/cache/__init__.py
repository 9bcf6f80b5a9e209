"""Caches of latents: packed rows, growing layers, the exact window; and products and rotations they share."""
