import os

# Before the libraries that read them are imported. Of no hub, and threads that wait for work do not spin: two processes
# of two threads share two cores.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported: without a GPU, kernels are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"
