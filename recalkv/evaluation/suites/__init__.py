"""Evaluation suites: zero-shot tasks and LongBench, dense against compressed, and needle retrieval from long texts."""

from recalkv.evaluation.suites.longbench import LongBench
from recalkv.evaluation.suites.suite import Suite
from recalkv.evaluation.suites.zeroshot import ZeroShot

SUITES: dict[str, type[Suite]] = {"zeroshot": ZeroShot, "longbench": LongBench}
"""Suites that compare two models, by the name of their section in the parameters."""
