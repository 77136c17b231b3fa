from setuptools import find_namespace_packages, setup

PARTS = ["cli*", "engine*", "kernels*", "model_zoo*", "recipes*"]
found = find_namespace_packages(include=PARTS)
setup(packages=["trainer", *(f"trainer.{name}" for name in found)])
