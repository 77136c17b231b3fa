"""The two halves of a mixture of experts, fused with what stands around them."""
