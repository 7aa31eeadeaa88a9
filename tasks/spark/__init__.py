"""Spark: its session, its JVM, its file systems, and the reason of a failure."""
