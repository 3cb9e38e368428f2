"""What the methods cost on a GPU: their kernels alone, and a serving round with and without them."""
