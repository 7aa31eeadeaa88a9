"""Explanations of predictions: which places of an image speak for a class."""
