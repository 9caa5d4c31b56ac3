"""eaves.hf with models over several ranks: a head that is cut by tensor parallelism or fully_shard, with gloo on the
CPU."""

import copy
import importlib.util
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import eaves
from cross_entropy_test import each
from hf_models import FLOAT32_TOLERANCE as TOLERANCE
from hf_models import VOCABULARY, Step, assert_same_step, batch, step, tiny_model
from ranks import Ranks


def whole(found: Step) -> Step:
    gradients = {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.gradients.items()
    }
    return found._replace(gradients=gradients)


def own_batch(group: distributed.ProcessGroup) -> dict[str, Tensor]:
    """A sequence of the batch."""
    rank = group.rank()
    return {name: each[rank : rank + 1] for name, each in batch().items()}


# ------------------------------------------------------------------------------------------------------------- FSDP2


def fully_sharded(
    group: distributed.ProcessGroup, name: str, is_apart: bool, reshards: bool, is_patched_last: bool
) -> None:
    steps = []
    for rank in range(2):
        model, data = tiny_model(name), {key: each[rank : rank + 1] for key, each in batch().items()}
        steps.append(step(model, **data))
    gradients = {key: (steps[0].gradients[key] + steps[1].gradients[key]) / 2 for key in steps[0].gradients}
    mesh = DeviceMesh.from_group(group, "cpu")
    model = tiny_model(name)
    if not is_patched_last:
        eaves.hf.patch(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if is_apart:
        fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh)
    if is_patched_last:
        eaves.hf.patch(model)
    found = whole(step(model, **own_batch(group)))
    assert found.output.logits is None
    expected = steps[group.rank()]._replace(gradients=gradients)
    assert_same_step(found, expected, TOLERANCE)
    if is_patched_last:
        with eaves.hf.patched(model, skip_logits=False):
            assert_same_step(whole(step(model, **own_batch(group))), expected, TOLERANCE)
        eaves.hf.unpatch(model)
        assert type(model.lm_head).__name__ == ("FSDPLinear" if is_apart else "Linear")
        assert_same_step(whole(step(model, **own_batch(group))), expected, TOLERANCE)
    with torch.no_grad():
        logits = model(own_batch(group)["input_ids"]).logits
    torch.testing.assert_close(logits, steps[group.rank()].output.logits)


@pytest.mark.filterwarnings("error:eaves.hf")
@each("is_patched_last", (False, True))
def test_fully_shard_has_the_head_in_pieces(is_patched_last: bool, cpu_ranks: Ranks) -> None:
    for is_apart, reshards in ((False, False), (True, False), (True, True)):
        cpu_ranks.run(fully_sharded, "llama", is_apart, reshards, is_patched_last, ranks=2)
    cpu_ranks.run(fully_sharded, "qwen2", False, False, is_patched_last, ranks=2)  # tied


# --------------------------------------------------------------------------------------------------- tensor parallel


def cut_head(group: distributed.ProcessGroup, name: str) -> Any:
    """The model with its head cut as transformers' "colwise_gather_output" does."""
    from transformers.distributed.tensor_parallel import ColwiseParallel

    mesh = DeviceMesh.from_group(group, "cpu")
    model = tiny_model(name)
    style = ColwiseParallel(output_layouts=Replicate())
    style.shard_param(model.lm_head, "weight", mesh)
    if model.lm_head.bias is not None:
        model.lm_head.bias = torch.nn.Parameter(distribute_tensor(model.lm_head.bias.detach(), mesh, [Shard(0)]))
    style.install_forward(model.lm_head, mesh)
    return model


def tensor_parallel(group: distributed.ProcessGroup, name: str) -> None:
    expected = step(tiny_model(name))
    model = cut_head(group, name)
    forward = vars(model.lm_head)["forward"]
    with eaves.hf.patched(model, metrics=("accuracy",)):
        found = whole(step(model))
        assert found.output.logits is None and found.output.accuracy.shape == ()
        assert_same_step(found, expected, TOLERANCE)
        torch.testing.assert_close(model(**batch(), skip_logits=False).logits, expected.output.logits)
    assert vars(model.lm_head)["forward"] is forward and type(model.lm_head) is torch.nn.Linear
    assert_same_step(whole(step(model)), expected, TOLERANCE)


def tensor_parallel_by_hooks(group: distributed.ProcessGroup) -> None:
    """A head of transformers up to 5.15, whose hooks cut and gather: eaves computes the logits, and says so."""
    import transformers.integrations.tensor_parallel as theirs

    mesh, model = DeviceMesh.from_group(group, "cpu"), tiny_model(vocab_size=VOCABULARY + 1)  # hooks want even pieces
    expected = step(model)
    head = model.lm_head.weight.detach()
    if "gather_output" in inspect.signature(theirs.ColwiseParallel).parameters:
        style = theirs.ColwiseParallel(gather_output=True, device_mesh=mesh, rank=group.rank(), empty_param=head)
        model.lm_head.weight = torch.nn.Parameter(style.shard_tensor(head))
    else:  # a DTensor in 4.57
        style = theirs.ColwiseParallel(output_layouts=Replicate())
        model.lm_head.weight = style.partition_tensor(head, head, "weight", head.dtype, True, group.rank(), mesh)
    style.prepare_module_tp(model.lm_head, mesh)
    eaves.hf.patch(model)
    with pytest.warns(UserWarning, match="a hook of the head"):
        found = whole(step(model))
    grad = found.gradients["lm_head.weight"]
    own = expected.gradients["lm_head.weight"].chunk(group.size())[group.rank()] if len(grad) < len(head) else None
    gradients = expected.gradients if own is None else {**expected.gradients, "lm_head.weight": own}
    assert_same_step(found, expected._replace(gradients=gradients), TOLERANCE)
    assert model.eval()(**batch()).logits.shape[-1] == VOCABULARY + 1


@pytest.mark.filterwarnings("error:eaves.hf")
def test_transformers_has_cut_the_head(cpu_ranks: Ranks) -> None:
    if importlib.util.find_spec("transformers.distributed.tensor_parallel") is None:
        cpu_ranks.run(tensor_parallel_by_hooks, ranks=2)
        return
    for name in ("llama", "phi"):  # 131 classes over 4 ranks; a bias
        cpu_ranks.run(tensor_parallel, name)


def by_group(group: distributed.ProcessGroup) -> None:
    expected = step(tiny_model())
    model = tiny_model()
    size = -(-VOCABULARY // group.size())  # padded: all ranks have as many
    padded = torch.nn.functional.pad(model.lm_head.weight.detach(), (0, 0, 0, size * group.size() - VOCABULARY))
    padded[VOCABULARY:] = 100.0
    own = slice(size * group.rank(), size * (group.rank() + 1))
    model.lm_head.weight = torch.nn.Parameter(padded[own].clone())
    eaves.hf.patch(model, group=group)
    found = step(model)
    grad = torch.zeros_like(padded)
    grad[:VOCABULARY] = expected.gradients["lm_head.weight"]
    gradients = {**expected.gradients, "lm_head.weight": grad[own]}
    assert_same_step(found, expected._replace(gradients=gradients), TOLERANCE)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert_same_step(step(copied), expected._replace(gradients=gradients), TOLERANCE)
    for call in (lambda: model(batch()["input_ids"]), lambda: model(**batch(), skip_logits=False)):
        with pytest.raises(NotImplementedError, match="so no rank has whole logits"):
            call()


def test_a_group_has_the_head_in_pieces(cpu_ranks: Ranks) -> None:
    cpu_ranks.run(by_group)


def compiled(group: distributed.ProcessGroup) -> None:
    expected = tiny_model()(**batch()).loss
    model = tiny_model()
    size = -(-VOCABULARY // group.size())
    own = model.lm_head.weight.detach()[size * group.rank() : size * (group.rank() + 1)]
    model.lm_head.weight = torch.nn.Parameter(own.clone())
    eaves.hf.patch(model, group=group)
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(**batch()).loss
    torch.testing.assert_close(found, expected)
    found.backward()
    assert model.lm_head.weight.grad is not None


def test_a_model_over_a_group_compiles_without_a_graph_break(cpu_ranks: Ranks) -> None:
    cpu_ranks.run(compiled, ranks=2)


def by_rows(group: distributed.ProcessGroup, is_dtensor: bool) -> None:
    """Hidden states that are cut along the sequence in front of the head, as Megatron's are."""
    fill = {"input_ids": 1, "labels": -100}
    data = {name: torch.nn.functional.pad(each, (0, 1), value=fill[name]) for name, each in batch().items()}
    expected = tiny_model()(**data).loss
    model = tiny_model()
    whole = model.lm_head.weight.detach()
    size = -(-VOCABULARY // group.size())
    own = whole[size * group.rank() : size * (group.rank() + 1)].clone()
    cut = distribute_tensor(whole, DeviceMesh.from_group(group, "cpu"), [Shard(0)]) if is_dtensor else own
    model.lm_head.weight = torch.nn.Parameter(cut)
    positions = data["input_ids"].shape[1] // group.size()
    part = slice(positions * group.rank(), positions * (group.rank() + 1))
    model.model.norm.register_forward_hook(lambda module, arguments, result: result[:, part])
    eaves.hf.patch(model, group=None if is_dtensor else group.group_name, sequence_parallel=True)
    torch.testing.assert_close(model(**data).loss, expected)


@pytest.mark.parametrize("is_dtensor", (False, True))
def test_rows_are_cut_over_the_same_ranks(is_dtensor: bool, cpu_ranks: Ranks) -> None:
    cpu_ranks.run(by_rows, is_dtensor)


def test_zero_3_is_refused_with_what_to_do() -> None:
    model = eaves.hf.patch(tiny_model())
    model.lm_head.weight = torch.nn.Parameter(torch.empty(0))
    model.lm_head.weight.ds_id = 1
    with pytest.raises(NotImplementedError, match="ZeRO-3"):
        model(**batch())
