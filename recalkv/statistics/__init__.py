"""Calibration statistics of each layer from one forward and one backward pass over the calibration windows."""
