import os

import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported: without a GPU, kernels are interpreted.
    os.environ["TRITON_INTERPRET"] = "1"
