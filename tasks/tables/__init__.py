"""Delta tables: writing, versions, reading, and removal of rows."""
