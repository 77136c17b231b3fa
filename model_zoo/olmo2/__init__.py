"""OLMo 2."""
