"""Selection of the best rows, and of cells that need more repeats."""
