"""Tests in vLLM, where the compiled loops decode, as on any CPU, and not, as in other tests, Triton's interpreter."""

import os

os.environ.pop("TRITON_INTERPRET", None)
