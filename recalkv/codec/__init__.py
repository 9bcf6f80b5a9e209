"""The codec: post-RoPE keys and values in a fixed basis with a few bits per coefficient; model weights do not change.

``moments`` collects statistics at the attention function, ``rope`` measures how keys are rotated, ``fit`` builds a
codec from both, ``layer`` turns a layer's keys and values into rows and back, and ``sidecar`` holds all layers and
their files. :mod:`recalkv.trellis` defines rows and codes.
"""
