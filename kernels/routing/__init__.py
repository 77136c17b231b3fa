"""Which rows of tokens go to which expert, and back."""
