"""What pages of reports and plans are drawn with. Torch-free."""
