"""Calls over the ranks of torch.distributed, which is imported in this folder alone."""
