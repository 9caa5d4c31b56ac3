"""torch.ops.eaves.stream_bytes, with which the benchmark measures the speed of the memory: it stays within the given
buffers, and refuses sizes and addresses that it cannot handle.
"""

import pytest
import torch
from torch import Tensor

import eaves  # noqa: F401  # its operators

stream_bytes = torch.ops.eaves.stream_bytes

CANARY = 0xA5  # a byte that no fill writes and no source has
SIZE = 3 * 2**17 + 4096  # more than two blocks of work for the CPU's threads


def filled(value: int, device: torch.device, size: int = SIZE) -> Tensor:
    tensor = torch.full((size,), value, dtype=torch.uint8, device=device)
    assert tensor.data_ptr() % 64 == 0
    return tensor


# Bytes read, bytes written, the reason. All are multiples of the 16 bytes that a GPU moves at once; most are no
# multiple of a line of 64 bytes.
SIZES = [
    (0, 0, "nothing"),
    (0, 16, "one vector filled"),
    (16, 0, "one vector read"),
    (1040, 1040, "copied, not a whole number of lines"),
    (2**18 + 16, 2**18 + 16, "copied in several blocks"),
    (2**18 + 48, 4096 + 16, "more read than written"),
    (4096 + 16, 2**18 + 48, "more written than read"),
    (0, 2**18 + 16, "filled in several blocks"),
]


@pytest.mark.parametrize(("read", "write"), [pytest.param(*s[:2], id=s[2]) for s in SIZES])
def test_exactly_the_bytes_that_are_asked_for_are_written(read: int, write: int, device: torch.device) -> None:
    source, destination = filled(7, device), filled(CANARY, device)
    stream_bytes(source, destination, read, write)
    # A GPU fills with a pattern of 32-bit words that contains zeros, so the test can only ask for "not the canary".
    assert (destination[:write] != CANARY).all()
    assert (destination[write:] == CANARY).all()
    assert (source == 7).all()


def test_a_copy_is_what_was_read(device: torch.device) -> None:
    source = torch.arange(SIZE, device=device).remainder(251).to(torch.uint8)
    destination = filled(CANARY, device)
    stream_bytes(source, destination, SIZE, SIZE)
    assert torch.equal(destination, source)


def test_bytes_are_counted_and_not_elements(device: torch.device) -> None:
    source, destination = torch.ones(256, device=device), torch.zeros(256, device=device)
    stream_bytes(source, destination, 1024, 1024)
    assert torch.equal(destination, source)


def assert_refused(sentence: str, *arguments: object) -> None:
    with pytest.raises(RuntimeError, match=rf"^eaves\.InvalidArgument: stream_bytes: {sentence}"):
        stream_bytes(*arguments)


def test_more_bytes_than_there_are_or_fewer_than_none_are_refused(device: torch.device) -> None:
    source, destination = filled(7, device, 1024), filled(CANARY, device, 2048)
    assert_refused("`source` has 1024 bytes.* 1025 ", source, destination, 1025, 0)
    assert_refused("`source` has 1024 bytes.* -1 ", source, destination, -1, 0)
    assert_refused("`destination` has 2048 bytes.* 2049 ", source, destination, 0, 2049)
    assert_refused("`destination` has 2048 bytes.* -16 ", source, destination, 0, -16)
    floats = torch.ones(256, device=device)
    assert_refused("`source` has 1024 bytes.* 1025 ", floats, destination, 1025, 0)
    assert (destination == CANARY).all()


def test_an_address_between_lines_is_refused(device: torch.device) -> None:
    aligned, other = filled(7, device, 1024), filled(CANARY, device, 1024)
    assert_refused("`source` is not aligned, expected an address divisible by 64", aligned[16:], other, 64, 0)
    assert_refused("`destination` is not aligned, expected an address divisible by 64", aligned, other[1:], 0, 64)
    stream_bytes(aligned[16:], other[1:], 0, 0)  # nothing is moved
    assert (other == CANARY).all()


def test_bytes_that_do_not_lie_side_by_side_are_refused(device: torch.device) -> None:
    table, other = filled(7, device, 1024).view(32, 32), filled(CANARY, device, 1024)
    for view in (table[:, :16], table.t(), table[:1].expand(32, 32), table.view(-1)[::2]):
        assert_refused("`source` is not contiguous", view, other, 64, 0)
        assert_refused("`destination` is not contiguous", other, view, 0, 64)
    assert (table == 7).all() and (other == CANARY).all()


def test_tensors_of_different_devices_are_refused(cuda: torch.device) -> None:
    here, there = filled(7, torch.device("cpu"), 1024), filled(CANARY, cuda, 1024)
    assert_refused(r"`destination` is on cuda:0, expected cpu \(as `source`\)", here, there, 64, 64)
    assert_refused(r"`destination` is on cpu, expected cuda:0 \(as `source`\)", there, here, 64, 64)
    assert (there == CANARY).all()
