"""DeepSeek-V3, and DeepSeek-V2."""
