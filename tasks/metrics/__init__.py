"""Metrics of a split: loss, confusion matrix, calibration and the worst mistakes."""
