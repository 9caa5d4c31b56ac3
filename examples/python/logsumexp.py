"""logsumexp in a training step: the log-partition function of a classifier, as a penalty that keeps it near 0.

Run it with a Python that has eaves. It uses a GPU if there is one.
"""

import torch

import eaves


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 1000, device=device, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    x = torch.randn(32, 64, device=device, dtype=torch.bfloat16)

    losses = []
    for _ in range(20):
        logits = model(x)
        log_z = eaves.logsumexp(logits, dim=-1, dtype=torch.float32)  # [32], summed and kept in float32
        loss = log_z.square().mean()
        optimizer.zero_grad()
        loss.backward()  # the gradient of logits is bfloat16, from the float32 log_z
        optimizer.step()
        losses.append(loss.item())

    print(f"mean squared log-partition function: {losses[0]:.1f} before, {losses[-1]:.1f} after {len(losses)} steps")
    if not losses[-1] < 0.5 * losses[0]:
        raise SystemExit("the penalty did not shrink")


if __name__ == "__main__":
    main()
