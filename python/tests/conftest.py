"""Fixtures of every test: the devices, the seed, and the number of CPU threads.

A test that takes `device` runs on the CPU and on the GPU; one that takes `cuda` needs a GPU. Without a GPU both are
skipped and counted, with the reason "no GPU". A test of code in Python, which is the same for every device, takes
`any_device`.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ranks import RANKS, Ranks

# With its default torch.compile starts a process for each core.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

# pytest-xdist runs one process per core. With as many threads in each process, they would wait for one another most of
# the time.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


# For eaves.jax: JAX shows the CPU as four devices, so that arrays can be sharded, and leaves GPU memory to PyTorch. JAX
# reads these variables when it first looks for devices.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"  # for the JAX formulas that the operators are compared with


def require_gpus(count: int = 1) -> None:
    """Skips the running test if there are fewer GPUs than `count`."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found == 0:
        pytest.skip("no GPU")
    if found < count:
        pytest.skip(f"the test needs {count} GPUs, this machine has {found}")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that the library runs on."""
    if request.param == "cuda":
        require_gpus()
    return torch.device(request.param)


@pytest.fixture(params=["cpu", "cuda"])
def jax_device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each device that JAX has, as JAX's default device."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    try:
        found = jax.devices(request.param)[0]
    except RuntimeError:
        pytest.skip("no GPU for JAX")
    with jax.default_device(found):
        yield found


@pytest.fixture
def jax_cpu() -> Iterator[None]:
    """Makes JAX arrays on the CPU even if JAX has a GPU."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def any_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def cuda() -> torch.device:
    """The GPU, for tests that need one."""
    require_gpus()
    return torch.device("cuda")


@pytest.fixture(scope="module")
def cpu_ranks() -> Iterator[Ranks]:
    """Processes of torch.distributed on the CPU."""
    started = Ranks()
    yield started
    started.close()


@pytest.fixture(scope="module")
def two_cpu_ranks() -> Iterator[Ranks]:
    """Two processes on the CPU, for modules that take long to import."""
    started = Ranks(2)
    yield started
    started.close()


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Processes of torch.distributed on the CPU, and on GPUs if there are at least two."""
    if request.param == "cuda":
        require_gpus(2)
        started = Ranks(min(torch.cuda.device_count(), RANKS), "cuda")
    else:
        started = Ranks()
    yield started
    started.close()


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers, whichever tests ran before it."""
    torch.manual_seed(7)


@pytest.fixture
def cpu_threads() -> Iterator[None]:
    """Lets a test change the number of CPU threads, and restores it."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread(cpu_threads: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Resets dynamo, so that compiled functions of other tests count neither as recompilations nor towards its
    limits."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
