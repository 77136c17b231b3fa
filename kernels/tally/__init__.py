"""What a backward pass does besides: counting, and gradients of further losses."""
