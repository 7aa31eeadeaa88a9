"""The scaling ladder: from a sample on one device to all images on several machines, and what each step gains."""
