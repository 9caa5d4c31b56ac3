"""Heads in chunks of rows: log-probabilities of several tokens or with a temperature a row, and divergences."""
