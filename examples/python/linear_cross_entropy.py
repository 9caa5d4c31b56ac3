"""linear_cross_entropy in a training loop: a language model's head and its loss without the logits. The weight's
gradient is added in float32 to a buffer that outlives the micro-batches.

Run it with a Python that has eaves. It uses a GPU if there is one.
"""

import torch

import eaves


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    vocabulary, features, steps = 1000, 64, 20
    embedding = torch.nn.Embedding(vocabulary, features, device=device, dtype=torch.bfloat16)
    head = torch.nn.Parameter(0.05 * torch.randn(vocabulary, features, device=device).bfloat16())
    main_grad = torch.zeros(vocabulary, features, device=device)  # float32
    optimizer = torch.optim.SGD([*embedding.parameters(), head], lr=20.0)
    tokens = torch.randint(0, vocabulary, (4, 2, 33), device=device)  # 4 micro-batches of 2 sequences
    targets = tokens[..., 1:].clone()
    targets[0, :, :16] = -100  # a prompt, excluded from the loss

    losses = []
    for _ in range(steps):
        count = (targets != -100).sum()  # stays on the device: nothing waits for it
        optimizer.zero_grad()
        main_grad.zero_()
        total = torch.zeros((), device=device)
        for batch, target in zip(tokens[..., :-1], targets, strict=True):
            hidden = embedding(batch)  # [2, 32, features]; there are no logits
            loss = eaves.linear_cross_entropy(hidden, head, target, normalizer=count, grad_weight_out=main_grad)
            loss.backward()
            total += loss.detach()
        head.grad = main_grad.to(head.dtype)
        optimizer.step()
        losses.append(total.item())

    print(f"linear cross entropy: {losses[0]:.2f} before, {losses[-1]:.2f} after {steps} steps")
    if not losses[-1] < 0.5 * losses[0]:
        raise SystemExit("the loss did not halve")


if __name__ == "__main__":
    main()
