"""Delta tables: written, versioned, read, and cut."""
