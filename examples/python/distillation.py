"""Distillation: a small student learns a teacher's distributions, without labels, until its loss on held-back tokens is
the teacher's. One student reads the teacher's hidden states, another the 64 likeliest tokens, as a server returns them.

Run it with a Python that has eaves. It uses a GPU if there is one, and takes a minute on two CPU cores.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import eaves

VOCABULARY, RANK, LENGTH, BATCH = 400, 6, 17, 96
TEACHER_FEATURES, STUDENT_FEATURES, TOP = 128, 48, 64
STEPS, LEARNING_RATE = 400, 1e-2


class Model(torch.nn.Module):
    """Predicts the next token from the last two."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, features)
        self.body = torch.nn.Sequential(
            torch.nn.Linear(2 * features, features), torch.nn.GELU(), torch.nn.Linear(features, features)
        )
        self.head = torch.nn.Linear(features, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, length] -> hidden states for the tokens behind the second, [batch, length - 2, features]."""
        x = self.embedding(tokens)
        return self.body(torch.cat([x[:, :-2], x[:, 1:-1]], -1))


class Language:
    """Each token depends on the two before it."""

    def __init__(self, device: str) -> None:
        of_tokens = torch.randn(3, VOCABULARY, RANK, device=device)
        self.before, self.last, self.next = of_tokens[0], of_tokens[1], 1.2 * of_tokens[2]

    def batch(self) -> Tensor:
        tokens = [torch.randint(VOCABULARY, (BATCH,), device=self.next.device) for _ in range(2)]
        while len(tokens) < LENGTH:
            logits = (self.before[tokens[-2]] + self.last[tokens[-1]]) @ self.next.T
            tokens.append(torch.multinomial(torch.softmax(logits, -1), 1)[:, 0])
        return torch.stack(tokens, 1)


def cross_entropy(model: Model, tokens: Tensor) -> Tensor:
    return eaves.linear_cross_entropy(model(tokens), model.head.weight, tokens[:, 2:])


def from_hidden_states(student: Model, teacher: Model, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        teacher_hidden = teacher(tokens)
    return eaves.linear_kl_div(student(tokens), student.head.weight, teacher_hidden, teacher.head.weight)


def from_top_tokens(student: Model, teacher: Model, tokens: Tensor) -> Tensor:
    with torch.no_grad():  # a server returns these two results
        log_probs, top = torch.log_softmax(teacher.head(teacher(tokens)), -1).topk(TOP)
    return eaves.linear_kl_div(
        student(tokens), student.head.weight, teacher_tokens=top, teacher_log_probs=log_probs, teacher_rest="class"
    )


def train(model: Model, loss_of: Callable[[Tensor], Tensor], language: Language) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS)
    for _ in range(STEPS):
        loss = loss_of(language.batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    language = Language(device)
    held_back = torch.cat([language.batch() for _ in range(8)])

    def measured(name: str, model: Model) -> float:
        with torch.no_grad():
            loss = cross_entropy(model, held_back).item()
        print(f"{name}: loss {loss:.4f}", flush=True)
        return loss

    teacher = Model(TEACHER_FEATURES).to(device)
    train(teacher, lambda tokens: cross_entropy(teacher, tokens), language)
    teacher.requires_grad_(False)
    loss = measured(f"teacher of {TEACHER_FEATURES} features", teacher)
    for name, divergence in (("hidden states", from_hidden_states), ("top tokens", from_top_tokens)):
        student = Model(STUDENT_FEATURES).to(device)
        before = measured(f"student of {STUDENT_FEATURES} features, untrained", student)
        train(student, lambda tokens, student=student, of=divergence: of(student, teacher, tokens), language)
        after = measured(f"student by the teacher's {name}", student)
        if not after < loss + 0.01 * (before - loss):
            raise SystemExit(f"the student did not reach its teacher: {after:.4f}, the teacher {loss:.4f}")


if __name__ == "__main__":
    main()
