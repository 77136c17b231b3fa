"""One HTML page about one run, or comparing several."""
