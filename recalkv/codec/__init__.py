"""The codec: post-RoPE keys and values in a fixed basis, coded by a few bits each; no weight of the model changes.

``moments`` takes statistics at the attention function, ``rope`` finds how keys are rotated, ``allocation`` shares out
the bits, ``fit`` makes a codec of them, ``sidecar`` is the codec and its file, ``layout`` packs rows of ``codes``.
"""
