"""lrpe_cosine in attention without a softmax. The product of a query and a key depends on their distance, not on their
positions, so that one state serves every position.

Run it with a Python that has eaves. It uses a GPU if there is one.
"""

import torch

import eaves


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    batch, length, heads, features = 2, 1000, 4, 32
    encode = eaves.LRPECosine(heads, features, activation="silu", device=device)
    q, k, v = torch.randn(3, batch, length, heads, features, device=device).unbind()

    # [batch, heads, query, key], of the tokens moved by `offset` positions.
    def scores(offset: int) -> torch.Tensor:
        queries, keys = encode(q, offset=offset), encode(k, offset=offset)  # [batch, length, heads, 2 * features]
        return torch.einsum("bnhd,bmhd->bhnm", queries, keys)

    here, there = scores(0), scores(100_000)
    moved = ((here - there).norm() / here.norm()).item()
    print(f"scores 100,000 positions further on differ by {100 * moved:.2f} %")

    # Token by token: for each head, one matrix holds the keys and values of all earlier tokens.
    state = torch.zeros(batch, heads, 2 * features, features, device=device)
    for n in range(length):
        token = slice(n, n + 1)
        key, query = encode(k[:, token], offset=n), encode(q[:, token], offset=n)
        state += torch.einsum("bnhd,bnhe->bhde", key, v[:, token])
        last = torch.einsum("bnhd,bhde->bnhe", query, state)
    whole = torch.einsum("bhm,bmhe->bhe", here[:, :, -1], v).unsqueeze(1)
    error = ((last - whole).norm() / whole.norm()).item()
    print(f"the last of {length} tokens, decoded one by one, differs from the whole sequence by {100 * error:.4f} %")
    if not (moved < 0.02 and error < 1e-3):
        raise SystemExit("the encoding is not one of relative positions")


if __name__ == "__main__":
    main()
