"""From a folder of images to the Delta tables `images` and `files`."""
