"""A Hugging Face model that trains without its logits: eaves.hf patches head and loss, the training loop stays.

The model is tiny and made of a configuration; nothing is downloaded. Run it with the Python that has eaves and
transformers; it uses the GPU where there is one.
"""

import sys

import torch

import eaves.hf

try:
    import transformers
except ImportError:
    print("huggingface: skipped, transformers is not installed (pip install transformers)")
    sys.exit(0)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    configuration = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(configuration).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(3, 1000, (2, 2, 33), device=device)  # 2 micro-batches of 2 sequences
    labels = tokens.clone()
    labels[0, :, :16] = -100  # a prompt, which is not learnt
    steps = 20

    eaves.hf.patch(model)
    losses = []
    for _ in range(steps):
        items = (labels[..., 1:] != -100).sum()  # stays on the device: it is not read back
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for batch, target in zip(tokens, labels, strict=True):
            output = model(input_ids=batch, labels=target, num_items_in_batch=items)  # output.logits is None
            output.loss.backward()
            total += output.loss.detach()
        optimizer.step()
        losses.append(total.item())
    logits = model(input_ids=tokens[0]).logits  # without labels, as before
    eaves.hf.unpatch(model)

    print(f"huggingface: {losses[0]:.2f} before, {losses[-1]:.2f} after {steps} steps; logits of {list(logits.shape)}")
    if not losses[-1] < 0.5 * losses[0]:
        raise SystemExit("the loss did not halve")


if __name__ == "__main__":
    main()
