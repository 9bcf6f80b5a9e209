"""What is cached: rows of latents, and how large they are."""
