"""Checks of a model and its data, in seconds, before a training of hours: can it learn, and do all of its parts."""
