"""The compression method, one module per step, from statistics and weights to factors; no files, no command line."""
