"""The method: one module per step, from statistics and weights to factors. No files, no command line."""
