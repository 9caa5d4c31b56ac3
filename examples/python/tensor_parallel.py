"""A head whose vocabulary is cut over the ranks of a tensor-parallel group: two processes on the CPU, with gloo.

Each rank has all hidden states and half of a head whose vocabulary is padded to an even size. In a job of torchrun the
group consists of the tensor-parallel ranks, and the backend is NCCL. A head that is a DTensor needs no group.
"""

import tempfile

import torch
from torch import distributed, multiprocessing

import eaves

RANKS, ROWS, FEATURES, VOCABULARY, PADDED = 2, 64, 32, 1001, 1024


def train(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS)
    group = distributed.group.WORLD
    torch.manual_seed(0)  # the same on all ranks
    hidden = torch.randn(ROWS, FEATURES, requires_grad=True)
    head = torch.randn(PADDED, FEATURES) / FEATURES**0.5
    target = torch.randint(VOCABULARY, (ROWS,))

    own = head.chunk(RANKS)[rank].clone().requires_grad_()
    loss = eaves.linear_cross_entropy(hidden, own, target, group=group, classes=VOCABULARY)
    loss.backward()

    # The same loss on one rank.
    whole_hidden, whole_head = hidden.detach().requires_grad_(), head.requires_grad_()
    expected = eaves.linear_cross_entropy(whole_hidden, whole_head, target, classes=VOCABULARY)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(hidden.grad, whole_hidden.grad)
    torch.testing.assert_close(own.grad, whole_head.grad.chunk(RANKS)[rank])
    if rank == 0:
        print(
            f"loss {loss.item():.4f} of {VOCABULARY} classes, {own.shape[0]} of {PADDED} rows of the head on each rank"
        )
    distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train, (f"file://{folder}/rendezvous",), nprocs=RANKS)
