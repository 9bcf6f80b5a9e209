"""Suites: zero-shot questions and LongBench, dense beside compressed; and numbers hidden in long texts."""

from recalkv.evaluation.suites.longbench import LongBench
from recalkv.evaluation.suites.suite import Suite
from recalkv.evaluation.suites.zeroshot import ZeroShot

SUITES: dict[str, type[Suite]] = {"zeroshot": ZeroShot, "longbench": LongBench}
"""All suites of two models, by the name of their section of the parameters."""
