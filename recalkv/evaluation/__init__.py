"""Measurements of a model, dense or compressed."""
