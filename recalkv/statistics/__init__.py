"""Calibration statistics: what one forward and one backward pass over the calibration windows leave of each layer."""
