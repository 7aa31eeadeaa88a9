"""Deployment definitions, the local stack, and the scripts behind `make`."""
