"""Gradients: the autograd.Functions around the extension's operators."""
