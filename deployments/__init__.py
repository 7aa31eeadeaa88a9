"""Deployments, and the scripts behind make."""
