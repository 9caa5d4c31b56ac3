"""A Hugging Face model that trains without its logits: one line patches head and loss, the training loop stays.

The model is tiny and made from a configuration; nothing is downloaded. Run it with a Python that has eaves and
transformers. It uses a GPU if there is one.
"""

import importlib.util


def main() -> None:
    import torch
    import transformers

    import eaves.hf

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(1000, (4, 33), device=device)

    eaves.hf.patch(model)  # the one line
    for _ in range(20):
        output = model(input_ids=tokens, labels=tokens)  # output.logits is None
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    print(f"huggingface: loss {output.loss.item():.2f} after 20 steps")
    if not output.loss.item() < 3.5:  # it was 6.9
        raise SystemExit("the loss did not halve")


if __name__ == "__main__":
    if importlib.util.find_spec("transformers"):
        main()
    else:
        print("huggingface: skipped, transformers is not installed (pip install transformers)")
