"""What stood in a training program, and the call of eaves that takes its place: each pair is computed both ways where
PyTorch can, and compared. Of the other libraries the call stands in a comment.

Run it with the Python that has eaves; it uses the GPU where there is one.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

import eaves


def of_logits(logits: Tensor, target: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs (before, after) of logits [batch, classes]."""
    return {
        "logsumexp": (
            torch.logsumexp(logits, dim=-1),
            eaves.logsumexp(logits, dim=-1),
        ),
        "cross_entropy": (
            F.cross_entropy(logits, target, label_smoothing=0.1),
            eaves.cross_entropy(logits, target, label_smoothing=0.1),
        ),
    }


def of_hidden(hidden: Tensor, head: Tensor, target: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs (before, after) of rows [batch, features] before the head [classes, features]."""
    return {
        "head and loss": (
            F.cross_entropy(F.linear(hidden, head), target),
            eaves.linear_cross_entropy(hidden, head, target),
        ),
        # F.linear_cross_entropy(hidden, head, target), of PyTorch 2.13
        # LigerFusedLinearCrossEntropyLoss()(head, hidden, target)         the head comes first
        # cut_cross_entropy.linear_cross_entropy(hidden, head, target)
        "a soft cap and a z-loss": (
            (capped := 30 * torch.tanh(F.linear(hidden, head) / 30)).logsumexp(-1).square().mean() * 1e-4
            + F.cross_entropy(capped, target),
            # LigerFusedLinearCrossEntropyLoss(softcap=30.0, lse_square_scale=1e-4)(head, hidden, target)
            eaves.linear_cross_entropy(hidden, head, target, softcap=30.0, z_loss=1e-4),
        ),
    }


def of_sequences(x: Tensor, theta: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs (before, after) of x [batch, length, heads, features] and angles [heads, features]."""
    angle = torch.arange(x.shape[1], device=x.device)[:, None, None] * theta
    return {
        "positions": (
            torch.cat([F.silu(x) * angle.cos(), F.silu(x) * angle.sin()], dim=-1),
            eaves.lrpe_cosine(x, theta, activation="silu"),
        ),
    }


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    target = torch.randint(0, 100, (16,))
    pairs = of_logits(torch.randn(16, 100), target)
    pairs |= of_hidden(torch.randn(16, 32), torch.randn(100, 32) / 4, target)
    pairs |= of_sequences(torch.randn(2, 10, 4, 8), torch.rand(4, 8))
    for name, (before, after) in pairs.items():
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
        print(f"{name}: the same")


if __name__ == "__main__":
    main()
