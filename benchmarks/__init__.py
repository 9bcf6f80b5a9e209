"""Benchmarks, separate from the tests; README.md describes each of them."""
