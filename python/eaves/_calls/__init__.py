"""Calls of the public functions: what each is, checked once, and the way that it takes."""
