"""Several runs of one recipe, one for each point of a grid of settings."""
