"""Predictions by the one model package."""
