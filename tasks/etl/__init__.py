"""ETL: ingestion of a folder of images into the Delta tables `images` and `files`."""
