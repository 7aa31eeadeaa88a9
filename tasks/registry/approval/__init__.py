"""The approval of a promotion by a user."""
