"""Checks of the project: prose, locked packages, and the generated parts of the READMEs."""
