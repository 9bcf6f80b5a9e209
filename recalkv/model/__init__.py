"""Models: which are supported, how a dense one is read layer by layer, and the compressed one at run time."""
