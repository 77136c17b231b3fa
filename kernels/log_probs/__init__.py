"""Log-probabilities of chosen classes under a projection."""
