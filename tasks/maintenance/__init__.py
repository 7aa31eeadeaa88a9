"""Maintenance of the Delta tables: compaction, and VACUUM that keeps the versions of trained models."""
