"""cross_entropy in a training loop over micro-batches: a mean over the tokens of all of them, in the memory of one
tensor of logits.

Run it with a Python that has eaves. It uses a GPU if there is one.
"""

import torch

import eaves


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    vocabulary, steps = 1000, 20
    model = torch.nn.Sequential(
        torch.nn.Embedding(vocabulary, 64, device=device, dtype=torch.bfloat16),
        torch.nn.Linear(64, vocabulary, device=device, dtype=torch.bfloat16),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    tokens = torch.randint(0, vocabulary, (4, 2, 33), device=device)  # 4 micro-batches of 2 sequences
    targets = tokens[..., 1:].clone()
    targets[0, :, :16] = -100  # a prompt, excluded from the loss

    losses = []
    for _ in range(steps):
        count = (targets != -100).sum()  # stays on the device: nothing waits for it
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for batch, target in zip(tokens[..., :-1], targets, strict=True):
            logits = model(batch)  # [2, 32, vocabulary], bfloat16; afterwards the memory of their gradient
            loss = eaves.cross_entropy(logits, target, normalizer=count, z_loss=1e-4, inplace_backward=True)
            loss.backward()
            total += loss.detach()  # float32
        optimizer.step()
        losses.append(total.item())

    print(f"cross entropy: {losses[0]:.2f} before, {losses[-1]:.2f} after {steps} steps")
    if not losses[-1] < 0.5 * losses[0]:
        raise SystemExit("the loss did not halve")


if __name__ == "__main__":
    main()
