"""Products of groups of rows in fp8."""
