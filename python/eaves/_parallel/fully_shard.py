"""A head that fully_shard (FSDP2) has cut over ranks. The ranks have different rows, so each rank needs the whole head.

A call with such a head runs as a forward of the module that was passed to fully_shard. That module's hooks gather the
head for the forward and for the backward, and reduce its gradient, with the dtypes, the divisor, the accumulation and
the offloading of the module. No other hook runs, because the result is not an output of the module.

A parameter does not say that fully_shard has cut it, and a parameter under tensor parallelism looks the same. So the
head is looked up among the parameters of all modules that were passed to fully_shard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_map_only

from eaves._torch.checks import is_distributed, name_in
from eaves._torch.transforms import is_transforming, uncompiled

_Result = TypeVar("_Result")


def is_fully_sharded(tensor: Any) -> bool:
    """True for a DTensor on a mesh over which fully_shard has cut parameters, or may have."""
    if not is_distributed(tensor):
        return False
    meshes = _meshes()
    return meshes is None or tensor.device_mesh in meshes


def needs_whole_head(head: Any, group: object, sequence_parallel: object) -> bool:
    """True for a head that fully_shard has cut. False with a group or with sequence_parallel, which make the head a
    piece of a vocabulary."""
    return group is None and not sequence_parallel and is_fully_sharded(head)


def with_whole_head(
    op: str, run: Callable[[Any], _Result], call: Any, names: Sequence[str] = ("hidden", "head", "bias")
) -> _Result:
    """The result of `run` with a call whose head is whole. `names` are its fields for hidden states, head and bias."""
    found: _Result = uncompiled(op, _with_whole_head)(op, run, call, names)
    return found


def is_hook_of_fully_shard(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def _with_whole_head(op: str, run: Callable[[Any], _Result], call: Any, names: Sequence[str]) -> _Result:
    cut = {name: getattr(call, name) for name in names[1:] if is_fully_sharded(getattr(call, name))}
    owners = {name: _owner_of(op, name, each) for name, each in cut.items()}
    if owners and is_transforming():
        raise NotImplementedError(
            f"{op}: a head that fully_shard has cut does not work inside of torch.vmap and torch.func; gather it "
            "with full_tensor()"
        )
    modules = list(dict.fromkeys(module for module, _, _ in owners.values()))
    arguments = (getattr(call, names[0]),)
    for module in modules:
        for hook in filter(is_hook_of_fully_shard, list(module._forward_pre_hooks.values())):
            changed = hook(module, arguments, {})
            arguments = arguments if changed is None else changed[0]
    output: Any = None
    try:
        whole = {name: getattr(owner, attribute) for name, (_, owner, attribute) in owners.items()}
        # FSDP registers hooks on the result, and autograd drops a view's hooks when the view is changed in place.
        output = tree_map_only(Tensor, _no_view, run(call._replace(**{names[0]: arguments[0]}, **whole)))
    finally:
        for module in reversed(modules):
            for hook in filter(is_hook_of_fully_shard, list(module._forward_hooks.values())):
                hook(module, arguments, output)  # its result is not used, because a hook may round a module's output
    found: _Result = output
    return found


def _no_view(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor._is_view() else tensor


def _owner_of(op: str, name: str, tensor: Any) -> tuple[Any, Any, str]:
    """The module whose hooks gather a parameter, the module that owns it, and its name in the owner."""
    try:
        for state, parameter in _parameters():
            # If reshard_after_forward is a number, the second tensor is the parameter between forward and backward.
            if tensor is parameter.sharded_param or tensor is getattr(parameter, "_sharded_post_forward_param", None):
                owner, name = parameter._module_info.module, parameter._module_info.param_name
                return next(module for module in state._modules if owner in module.modules()), owner, name
    except AttributeError:  # the names above are not public
        pass
    name = name_in(op, name)
    raise NotImplementedError(
        f"{op}: {name} is a DTensor on a mesh of fully_shard, but no parameter that fully_shard has cut. Pass the "
        f"parameter itself, or gather the tensor with {name}.full_tensor(grad_placements=[Partial('avg')]) (of "
        f"torch.distributed.tensor). If ranks have the same rows, pass {name}.to_local() and its group"
    )


def _parameters() -> Iterator[tuple[Any, Any]]:
    """FSDP's records of each parameter that fully_shard has cut, and of its module."""
    composable: Any = sys.modules.get("torch.distributed._composable_state")
    if composable is None:
        return
    for state in {each() for each in list(composable._module_state_mapping.values())}:
        if hasattr(state, "_fsdp_param_groups"):
            groups = state._fsdp_param_groups
        else:  # before PyTorch 2.12; or the state is DistributedDataParallel's
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for parameter in () if group is None else group.fsdp_params:
                yield state, parameter


def _meshes() -> tuple[Any, ...] | None:
    """The meshes over which fully_shard has cut parameters. None: this PyTorch does not show them."""
    try:
        meshes = [parameter.sharded_param.device_mesh for _, parameter in _parameters()]
    except AttributeError:
        return None
    return tuple({id(mesh): mesh for mesh in meshes}.values())


# The mark of torch.compiler.assume_constant_result, which would load torch._dynamo. The result is constant, because
# models are cut before a call is traced.
_meshes._dynamo_marked_constant = True  # type: ignore[attr-defined]
