"""The loss of nanochat: a head with padding behind the vocabulary, kept in float32 in a 16-bit model, logits capped at
15, targets of -1 ignored. eaves computes it without the logits. This example compares loss and gradients with the lines
of nanochat.

Run it with a Python that has eaves. It uses a GPU if there is one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import eaves

VOCABULARY, PADDED, FEATURES, BATCH, LENGTH = 1000, 1024, 64, 4, 128


def eaves_loss(x: Tensor, head: torch.nn.Linear, targets: Tensor, reduction: str = "mean") -> Tensor:
    """x [batch, length, features], targets [batch, length]. In GPT.forward it replaces the lines of nanochat_loss()."""
    return eaves.linear_cross_entropy(
        x, head.weight.to(x.dtype), targets, classes=VOCABULARY, softcap=15, ignore_index=-1, reduction=reduction
    )


def nanochat_loss(x: Tensor, head: torch.nn.Linear, targets: Tensor, reduction: str = "mean") -> Tensor:
    logits = torch.nn.functional.linear(x, head.weight.to(x.dtype))[..., :VOCABULARY].float()
    logits = 15 * torch.tanh(logits / 15)
    return torch.nn.functional.cross_entropy(
        logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=-1, reduction=reduction
    )


def step(
    loss_of: Callable[..., Tensor], x: Tensor, head: torch.nn.Linear, targets: Tensor
) -> tuple[Tensor, list[Tensor]]:
    x.grad = head.weight.grad = None
    loss = loss_of(x, head, targets)
    loss.backward()
    return loss.detach(), [x.grad, head.weight.grad]


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(BATCH, LENGTH, FEATURES, device=device, requires_grad=True)
    head = torch.nn.Linear(FEATURES, PADDED, bias=False, device=device)
    targets = torch.randint(-1, VOCABULARY, (BATCH, LENGTH), device=device)
    found, gradients = step(eaves_loss, x, head, targets)
    expected, expected_gradients = step(nanochat_loss, x, head, targets)
    print(f"eaves {found:.6f}, nanochat {expected:.6f}")
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not gradients[1][VOCABULARY:].any(), "padding has a gradient"
    narrow = eaves_loss(x.bfloat16(), head, targets), nanochat_loss(x.bfloat16(), head, targets)
    torch.testing.assert_close(*narrow, rtol=1e-3, atol=0)  # nanochat rounds the logits
    rows = eaves_loss(x, head, targets, reduction="none")  # for nanochat's evaluation of bits per byte
    torch.testing.assert_close(rows.flatten(), nanochat_loss(x, head, targets, reduction="none"))


if __name__ == "__main__":
    main()
