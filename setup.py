from setuptools import find_namespace_packages, setup

PARTS = ["cli*", "engine*", "kernels*", "model_zoo*", "recipes*"]
found = find_namespace_packages(include=PARTS)
# The root is a package: a build leaves out the script that it is named, and no other.
setup(script_name="setup.py", packages=["trainer", *(f"trainer.{name}" for name in found)])
