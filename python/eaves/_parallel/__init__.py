"""Calls over the ranks of torch.distributed, which only this folder imports."""
