"""Spark: session, JVM, file systems, and the messages of failures."""
