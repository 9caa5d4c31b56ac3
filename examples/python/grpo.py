"""GRPO (Z. Shao et al., arXiv:2402.03300) by hand: a small model is rewarded for counting on from its prompt. The
log-probabilities of the policy and of the frozen reference come from eaves.linear_log_prob.

Run it with a Python that has eaves. It uses a GPU if there is one, and takes half a minute on two CPU cores.
"""

import copy

import torch
from torch import Tensor

import eaves

VOCABULARY, FEATURES = 50, 96
PROMPTS, GROUP, LENGTH = 16, 16, 12  # a step: prompts, completions of each, tokens of a completion
STEPS, EPOCHS, TEMPERATURE, CLIP, KL_WEIGHT = 120, 2, 1.0, 0.2, 0.005


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, FEATURES)
        self.body = torch.nn.GRU(FEATURES, FEATURES, batch_first=True)
        self.head = torch.nn.Linear(FEATURES, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.body(self.embedding(tokens), state)

    @torch.no_grad()
    def complete(self, prompts: Tensor) -> Tensor:
        """Prompts [rows] -> sampled tokens [rows, 1 + LENGTH]."""
        tokens, state = [prompts], None
        for _ in range(LENGTH):
            hidden, state = self(tokens[-1].unsqueeze(1), state)
            probabilities = torch.softmax(self.head(hidden[:, 0]) / TEMPERATURE, -1)
            tokens.append(torch.multinomial(probabilities, 1)[:, 0])
        return torch.stack(tokens, 1)


def log_probs(model: Model, tokens: Tensor) -> Tensor:
    """The log-probabilities of the tokens behind the first, [rows, LENGTH], without logits."""
    hidden, _ = model(tokens[:, :-1])
    return eaves.linear_log_prob(hidden, model.head.weight, tokens[:, 1:], temperature=TEMPERATURE)


def reward(tokens: Tensor) -> Tensor:
    """The share of tokens that are one more than the token before."""
    return (tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCABULARY).float().mean(1)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Model().to(device)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    rewards = []
    for step in range(STEPS):
        tokens = model.complete(torch.randint(VOCABULARY, (PROMPTS,), device=device).repeat_interleave(GROUP))
        of_group = reward(tokens).view(PROMPTS, GROUP)
        advantage = (of_group - of_group.mean(1, keepdim=True)) / (of_group.std(1, keepdim=True) + 1e-4)
        advantage = advantage.view(-1, 1)
        with torch.no_grad():  # one product each, and no tensor is kept
            old, of_reference = log_probs(model, tokens), log_probs(reference, tokens)
        for _ in range(EPOCHS):
            new = log_probs(model, tokens)
            ratio = (new - old).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            distance = of_reference - new
            loss = (KL_WEIGHT * (distance.exp() - distance - 1) - gain).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        rewards.append(of_group.mean().item())
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step:3d}: reward {rewards[-1]:.3f}", flush=True)

    first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    if not last > first + 0.3:
        raise SystemExit(f"the reward did not rise: {first:.3f} before, {last:.3f} after {STEPS} steps")


if __name__ == "__main__":
    main()
