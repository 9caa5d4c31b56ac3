"""eaves: fused operators for training sequence models, forward and backward, at the limit of the hardware.

    logsumexp(x, dim, keepdim=False, *, dtype=None)

CPU and CUDA tensors; autograd, torch.compile, torch.func and CUDA graphs work with them. `python -m eaves info` says
what this installation can do, `python -m eaves.bench` measures it beside PyTorch.
"""

from eaves._library import __version__
from eaves._logsumexp import logsumexp

__all__ = ["__version__", "logsumexp"]
