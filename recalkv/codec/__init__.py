"""The codec: post-RoPE keys and values in a fixed basis with a few bits per coefficient; model weights do not change.

``moments`` collects statistics at the attention function, ``rope`` measures how keys are rotated, ``fit`` builds a
codec from both, and ``sidecar`` defines the codec and its file. :mod:`recalkv.trellis` defines its rows and codes.
"""
