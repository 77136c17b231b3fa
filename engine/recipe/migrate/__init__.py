"""Recipes of the settings of other trainers."""
