"""Tests of vLLM: the compiled loops decode, as on any CPU, instead of Triton's interpreter as in other tests."""

import os

os.environ.pop("TRITON_INTERPRET", None)

DENSE = "+dense"
"""Suffix of a model's name: without its side-car, in vLLM and in transformers."""
