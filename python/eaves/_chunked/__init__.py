"""Heads in chunks of rows: several tokens or a temperature a row, and divergences."""
