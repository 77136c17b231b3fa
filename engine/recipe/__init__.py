"""Recipes: read, merged, checked, explained, compared and written. Torch-free."""
