"""GPU measurements in four parts of a few minutes: codec attention, smoke tests, latent kernels, whole models.

    python -m benchmarks.gpu                          # codec, smoke, kernels, models, one after the other (`make gpu`)
    python -m benchmarks.gpu kernels --out DIR        # one part
    python -m benchmarks.gpu page --out DIR           # DIR/README.md from the JSON lines (`make gpu-page`)

Each record is one JSON line of ``DIR/PART.jsonl`` with the device and versions, written immediately. Steps run in a
separate process: a step that crashes, hangs or takes too long is recorded with the end of its output, and the other
steps continue. Steps for which no time is left are recorded as left out. Needs torch, triton, transformers, pydantic,
zarr and pytest; the last three can be provided as wheels (`make gpu-wheels`).

Without a GPU, only imports, Triton's interpreter and compilation are checked (in ``smoke``); with ``--cpu``, parts run
at tiny sizes in the interpreter, to test this code. Both write to ``DIR/cpu``: they never replace a GPU's lines.
"""
