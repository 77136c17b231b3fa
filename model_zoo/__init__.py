"""Language models, usable without the engine."""
