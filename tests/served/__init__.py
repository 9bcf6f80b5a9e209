"""Tests in vLLM, where the compiled loops decode, as on any CPU, and not Triton's interpreter, as in the other tests."""

import os

os.environ.pop("TRITON_INTERPRET", None)
