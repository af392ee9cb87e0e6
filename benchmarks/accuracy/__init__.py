"""What a model learns through Cerebro's orders of rows, against PyTorch's DataLoader."""
