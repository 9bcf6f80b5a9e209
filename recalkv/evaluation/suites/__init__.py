"""Suites: zero-shot questions, numbers hidden in long texts, and LongBench, dense beside compressed."""

from recalkv.evaluation.suites.longbench import LongBench
from recalkv.evaluation.suites.needle import Needle
from recalkv.evaluation.suites.suite import Suite
from recalkv.evaluation.suites.zeroshot import ZeroShot

__all__ = ["SUITES"]

SUITES: dict[str, type[Suite]] = {"zeroshot": ZeroShot, "needle": Needle, "longbench": LongBench}
"""All suites, by the name of their section of the parameters."""
