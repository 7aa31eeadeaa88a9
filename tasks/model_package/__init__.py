"""Inference on encoded images: the code that every model package carries, and that all stages share.

It has relative imports alone, and neither Spark nor Prefect nor MLflow. So MLflow can load a copy of it under another
name, beside any version of this project.
"""

REQUIREMENTS = ("numpy", "pandas", "pi-heif", "pillow", "pydantic", "safetensors", "timm", "torch", "torchvision")
"""Distributions that the modules import."""
