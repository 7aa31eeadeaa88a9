"""The service: predictions over HTTP, its request log, and the live test of a challenger."""
