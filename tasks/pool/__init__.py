"""Flow runs that one run submits to a work pool: on their way, at work, ended, or cancelled with whoever sent them."""
