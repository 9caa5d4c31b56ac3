"""Heads in chunks of rows, in PyTorch's own operators: several tokens or a temperature a row, and divergences."""
