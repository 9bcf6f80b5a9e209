"""GPU measurements in four parts of a few minutes: codec attention, smoke tests, latent kernels, whole models.

    python -m benchmarks.gpu                          # codec, smoke, kernels, models, one by one (`make gpu`)
    python -m benchmarks.gpu kernels --out DIR        # one of them
    python -m benchmarks.gpu page --out DIR           # DIR/README.md from the lines (`make gpu-page`)

Every record is one JSON line of ``DIR/PART.jsonl``, written when it is had, with the device and versions. Steps run in
a process of their own: one that faults, hangs or takes too long is recorded with the end of its output, and the rest
go on. What no time is left for is recorded as left out. Needs torch, triton, transformers, pydantic, zarr and pytest;
the last three may be brought as wheels (`make gpu-wheels`).

Without a GPU only the first steps of ``smoke`` run; with ``--cpu`` all do, at tiny sizes and in Triton's interpreter,
to test this code. Lines of such machines go to ``DIR/cpu``, so that they never replace a GPU's.
"""
