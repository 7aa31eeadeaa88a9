"""What can be refused is refused here, before any work."""
