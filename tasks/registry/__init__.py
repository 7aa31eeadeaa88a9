"""Which run becomes the champion, and how it is registered."""
