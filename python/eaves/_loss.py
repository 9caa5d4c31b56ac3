"""What the losses share: the arguments that they have in common, their outputs as bits, and the samples of a batch."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from eaves._operator import (
    accumulator_dtype,
    check_bool,
    check_device,
    check_dtype_of,
    check_shape,
    check_tensor,
    index_of,
    name_of,
    number_of,
    number_tensor_of,
    refuse_gradient,
    value_for_message,
)

NONE, SUM, MEAN = 0, 1, 2  # enum Reduction of include/eaves/cross_entropy.h
REDUCTIONS = {"none": NONE, "sum": SUM, "mean": MEAN}
REDUCTION_NAMES = {mode: name for name, mode in REDUCTIONS.items()}

# The outputs that a call asks for beside the loss, as bits; those of python/csrc/loss_arguments.h. The extension gives
# them in this order.
LSE, DIVISOR, ARGMAX, ENTROPY, Z_LOSS, TARGET_MASS, SUM_SQ, MEAN_LOGIT = OUTPUTS = (1, 2, 4, 8, 16, 32, 64, 128)
OF_IGNORED_ROWS = 256  # no output: those per row of rows that are ignored too
# No output: lse is two numbers, [rows..., 2], which a backward needs (docs/numerics.md).
SPLIT_LSE = 512
# What the user may ask for, in the order of CrossEntropyOutput.
RETURNED = (LSE, ARGMAX, ENTROPY, Z_LOSS, SUM_SQ, MEAN_LOGIT)

CLASS_DTYPES = (torch.int64, torch.int32)

_RESULT_DTYPES = {dtype: accumulator_dtype(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)}
_RESULT_DTYPES[torch.float64] = torch.float64


class CrossEntropyOutput(NamedTuple):
    """What eaves.cross_entropy and eaves.linear_cross_entropy give with any of their return_* arguments; None for what
    was not asked for."""

    loss: Tensor
    lse: Tensor | None = None
    argmax: Tensor | None = None
    entropy: Tensor | None = None
    z_loss: Tensor | None = None
    sum_sq: Tensor | None = None
    mean_logit: Tensor | None = None


if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import TypedDict

    class LossKeywords(TypedDict, total=False):
        """What the losses have in common, for the overloads of their functions and for their modules."""

        reduction: str
        label_smoothing: float
        softcap: float | None
        scale: float | None
        z_loss: float

    class GroupKeywords(TypedDict, total=False):
        """Of a vocabulary that is cut over the ranks of a group."""

        group: ProcessGroup | None
        first_class: int | None
        classes: int | None

    class HeadGroupKeywords(GroupKeywords, total=False):
        sequence_parallel: bool
        reduce_input_grad: bool
        reduce_dtype: torch.dtype | None


class LossModule(torch.nn.Module):
    """A loss as a module. Its options are keywords of the function, each kept in an attribute of that name."""

    weight: Tensor | None
    _defaults: ClassVar[Mapping[str, object]]

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._defaults}

    def extra_repr(self) -> str:
        """The options that are not the default's."""
        return ", ".join(f"{n}={value!r}" for n, value in self._options().items() if value != self._defaults[n])


_Module = TypeVar("_Module", bound=LossModule)


def module_of(function: Callable[..., object], *given_with_each_call: str) -> Callable[[type[_Module]], type[_Module]]:
    """The decorator of a LossModule: its __init__ takes `weight`, and the keywords of `function` but for some."""
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]
    keywords = [each for each in named if each.name not in ("weight", *given_with_each_call)]

    def decorate(module: type[_Module]) -> type[_Module]:
        def __init__(self: _Module, weight: Tensor | None = None, **options: object) -> None:
            unknown = [name for name in options if name not in module._defaults]
            if unknown:
                refuse_unknown(function.__name__, unknown, __init__)
            super(module, self).__init__()
            self.register_buffer("weight", weight)
            for name, default in module._defaults.items():
                setattr(self, name, options.get(name, default))

        first = list(inspect.signature(__init__).parameters.values())[:2]
        __init__.__qualname__, __init__.__module__ = f"{module.__qualname__}.__init__", module.__module__
        __init__.__signature__ = inspect.Signature([*first, *keywords])  # type: ignore[attr-defined]
        module.__init__ = __init__  # type: ignore[method-assign,assignment]
        module._defaults = {each.name: each.default for each in keywords if each.kind is each.KEYWORD_ONLY}
        return module

    return decorate


# ----------------------------------------------------------------------------------------------------------- arguments


def shape_of(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def check_input(op: str, input: Tensor, target: Tensor, meaning: str) -> torch.dtype:
    """Both are tensors that eaves has, and input may be what it means. Returns the dtype of the loss."""
    check_tensor(op, "input", input)
    check_tensor(op, "target", target)
    check_device(op, "target", target, "input", input)
    dtype = _RESULT_DTYPES.get(input.dtype)
    if dtype is None:
        raise ValueError(f"{op}: input has dtype {name_of(input.dtype)}, expected a floating-point type: {meaning}")
    return dtype


def check_class_dtype(op: str, target: Tensor, input: Tensor) -> None:
    if target.dtype not in CLASS_DTYPES:
        raise ValueError(
            f"{op}: target has dtype {name_of(target.dtype)}, expected int64 or int32 for classes, "
            f"{_or_float32(input)} for probabilities"
        )


def check_soft(op: str, target: Tensor, input: Tensor, shape: Sequence[int], of: str) -> None:
    """A target of a floating-point type holds probabilities: has it the dtype and the shape that they have?"""
    if target.dtype != input.dtype and target.dtype != torch.float32:
        raise ValueError(
            f"{op}: target has the floating-point type {name_of(target.dtype)}, expected {_or_float32(input)} for "
            "probabilities, or int64 or int32 for classes"
        )
    if target.shape != tuple(shape):
        raise ValueError(
            f"{op}: target has shape {shape_of(target)} and the floating-point type {name_of(target.dtype)}, expected "
            f"{list(shape)} for probabilities ({of}), or int64 or int32 for classes"
        )


def _or_float32(input: Tensor) -> str:
    """The dtypes that probabilities may have, for a message."""
    return " or ".join(dict.fromkeys((name_of(input.dtype), "float32")))


def reduction_of(op: str, reduction: str) -> int:
    mode = REDUCTIONS.get(reduction) if isinstance(reduction, str) else None
    if mode is None:
        error = ValueError if isinstance(reduction, str) else TypeError
        raise error(f'{op}: reduction is {reduction!r}, expected "none", "sum" or "mean"')
    return mode


def numbers_of(
    op: str,
    label_smoothing: float = 0,
    scale: float | None = None,
    softcap: float | None = None,
    z_loss: float = 0,
) -> tuple[tuple[float, ...], Tensor | None]:
    """The numbers among the options, checked, as the extension takes them, none where all are absent; and None. Where
    torch.compile has symbols for them, none, and the tensor that stands for them.

    What is absent is 0 and not 0.0: torch.compile(dynamic=True) takes a default that is a float for one that changes,
    and compiles twice.
    """
    given = (label_smoothing, scale, softcap, z_loss)
    if not torch.compiler.is_compiling():
        if all(map(operator.is_, given, _ABSENT)):
            return (), None
        return tuple([
            default if value is absent else number_of(op, name, value, low, high, expected)
            for value, absent, (name, default, low, high, expected) in zip(given, _ABSENT, _TABLE)
        ]), None  # fmt: skip
    numbers = []
    for value, absent, (name, default, low, high, expected) in zip(given, _ABSENT, _table()):
        is_absent = value is None if absent is None else type(value) is int and value == 0
        numbers.append(default if is_absent else number_of(op, name, value, low, high, expected))
    number_tensor = number_tensor_of(*numbers)
    return (tuple(numbers) if number_tensor is None else ()), number_tensor


# The table of the extension, kLossOptions in src/core/loss_options.h, has the ranges, and says in which order they are.
_ABSENT = numbers_of.__defaults__ or ()
NUMBERS = numbers_of.__code__.co_varnames[1 : 1 + len(_ABSENT)]
_words, _numbers = torch.ops.eaves.loss_options()
assert _words[::2] == [f"--{name.replace('_', '-')}" for name in NUMBERS], _words
assert NUMBERS[0] == "label_smoothing"  # whether there is smoothing both losses ask numbers[0]
NUMBERS_IN_WORDS = f"{', '.join(NUMBERS[:-1])} and {NUMBERS[-1]}"
_TABLE = tuple(zip(NUMBERS, _numbers[::3], _numbers[1::3], _numbers[2::3], _words[1::2]))
# Of each number the least, the largest and what an error says of the two.
RANGES = {name: (low, high, expected) for name, _, low, high, expected in _TABLE}


def _table() -> tuple[tuple[str, float, float, float, str], ...]:
    return _TABLE


# As torch.compiler.assume_constant_result does, which would load torch._dynamo: floats of a module would be symbols.
_table._dynamo_marked_constant = True  # type: ignore[attr-defined]


def weight_of(op: str, weight: Tensor, input: Tensor, classes: int, of: str = "input") -> Tensor:
    """The weights of the classes, as the core takes them; `of` is the argument that says how many there are."""
    check_tensor(op, "weight", weight)
    check_device(op, "weight", weight, "input", input)
    check_dtype_of(op, "weight", weight, (input.dtype, torch.float32), "that of input, or float32")
    check_shape(op, "weight", weight, [classes], f"one per class of {of}")
    refuse_gradient(op, "weight", weight)
    return weight.contiguous() if weight.layout == torch.strided else weight  # others are refused further down


def row_weight_of(op: str, row_weight: Tensor, input: Tensor, rows: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The weights of the rows, as the core takes them; `dtype` is that of the loss."""
    check_tensor(op, "row_weight", row_weight)
    check_device(op, "row_weight", row_weight, "input", input)
    if row_weight.shape != tuple(rows):
        check_shape(op, "row_weight", row_weight, rows, f"one per row of input {shape_of(input)}")
    refuse_gradient(op, "row_weight", row_weight)
    return row_weight.to(dtype).contiguous() if row_weight.layout == torch.strided else row_weight


def normalizer_of(op: str, normalizer: object, mode: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One number on the device, without waiting for it."""
    if mode != MEAN:
        raise ValueError(f'{op}: normalizer is given, but only the mean divides: expected reduction="mean"')
    if not isinstance(normalizer, Tensor):
        expected = f"a number that is not negative and that {name_of(dtype)} has, or a tensor of one"
        number = number_of(op, "normalizer", normalizer, 0, torch.finfo(dtype).max, expected)
        if torch.compiler.is_compiling():  # so that it stays variable, see number_tensor_of
            return torch.ones((), dtype=dtype, device=device) * number
        return torch.full((), number, dtype=dtype, device=device)
    check_tensor(op, "normalizer", normalizer)
    if normalizer.numel() != 1:
        raise ValueError(f"{op}: normalizer has shape {shape_of(normalizer)}, expected one element")
    if normalizer.device != device:
        raise ValueError(f"{op}: normalizer is on {normalizer.device}, expected {device} (as input), or a number")
    refuse_gradient(op, "normalizer", normalizer)
    return normalizer.to(dtype)


def limit_of(op: str, workspace_bytes: object) -> int:
    limit = index_of(op, "workspace_bytes", workspace_bytes)
    if limit <= 0:
        raise ValueError(f"{op}: workspace_bytes is {value_for_message(limit)}, expected a positive number of bytes")
    return limit


# The names that other libraries have for what is a parameter here.
_PARAMETERS = {
    "temperature": "scale",
    "logit_scale": "scale",
    "logit_softcap": "softcap",
    "logit_soft_cap": "softcap",
    "logit_softcapping": "softcap",
    "final_logit_softcapping": "softcap",
    "lse_square_scale": "z_loss",
    "logsumexp_weight": "z_loss",
    "bias": "linear_bias",
    "linear_bias": "bias",
    "ce_weight": "weight",
    "num_items_in_batch": "normalizer",
    "sample_weight": "row_weight",
    "loss_mask": "row_weight",
    "accum_dtype": "grad_weight_dtype",
    "return_predicted_tokens": "return_argmax",
}
_TEMPERATURE = "scale=1 / temperature, and with a softcap c in front of the temperature softcap=c / temperature"


def refuse_unknown(op: str, names: Iterable[str], function: Callable[..., object]) -> NoReturn:
    """Raises TypeError for the first of `names`, keywords that `function` got and does not have."""
    name = next(iter(names))
    parameter = _PARAMETERS.get(name)
    hint = ""
    if parameter in inspect.signature(function).parameters:
        hint = f"; pass {_TEMPERATURE if name == 'temperature' else parameter}"
    raise TypeError(f"{op}: got an unexpected keyword argument {name!r}{hint}")


# ------------------------------------------------------------------------------------------------------------- outputs


def kept_for_backward(wanted: int, mode: int, needs_target_mass: bool) -> int:
    """The outputs that are wanted, and those that a backward reads."""
    computed = wanted | LSE | SPLIT_LSE
    if mode == MEAN:
        computed |= DIVISOR
    return computed | TARGET_MASS if needs_target_mass else computed


_RETURN_NAMES = tuple(f"return_{name}" for name in CrossEntropyOutput._fields[1:])


def wanted_outputs(op: str, *returns: object, has_factors: bool) -> int:
    """The bits of the return_* arguments, which are in the order of CrossEntropyOutput. `has_factors`: the sum over the
    classes has weights, so that there is no mean of z'."""
    wanted = 0
    for name, bit, is_wanted in zip(_RETURN_NAMES, RETURNED, returns):
        if is_wanted is False:
            continue
        check_bool(op, name, is_wanted)
        wanted |= bit
    if wanted & MEAN_LOGIT and has_factors:
        raise ValueError(
            f"{op}: return_mean_logit does not go with probabilities as the target, nor with weight and "
            "label_smoothing together; leave it out"
        )
    return wanted


# Where each output lies in what a call gives, for each set of bits; 0, where the loss lies, for one that is not there.
# Looked up, because counting bits in each call costs the host as much as an allocation.
POSITIONS = [
    {
        bit: 1 + sum(1 for other in OUTPUTS if other < bit and computed & other) if computed & bit else 0
        for bit in OUTPUTS
    }
    for computed in range(OF_IGNORED_ROWS)
] * (2 * SPLIT_LSE // OF_IGNORED_ROWS)  # the bits that are no outputs change no place

_SAVED_POSITIONS = [(positions[ENTROPY], positions[TARGET_MASS], positions[DIVISOR]) for positions in POSITIONS]


def pick(outputs: Sequence[Any], computed: int, bit: int) -> Any:
    """Of what a call gave (the loss, and what the bits `computed` say), that of `bit`; None where it is not there."""
    position = POSITIONS[computed][bit]
    return outputs[position] if position else None


def in_order(outputs: Sequence[Tensor], computed: int, wanted: int) -> list[Tensor]:
    """The outputs of an operator for the bits `wanted`, from outputs that were computed for more bits."""
    found = [outputs[0], *(pick(outputs, computed, bit) for bit in OUTPUTS if wanted & bit)]
    if wanted & LSE and not wanted & SPLIT_LSE:
        found[1] = found[1].select(-1, 0).contiguous()
    return found


def output_of(outputs: Sequence[Tensor], computed: int, wanted: int) -> CrossEntropyOutput:
    """What the user gets of what was computed."""
    returned = [pick(outputs, computed, bit) if wanted & bit else None for bit in RETURNED]
    if computed & SPLIT_LSE and returned[0] is not None:
        returned[0] = returned[0].select(-1, 0).contiguous()
    return CrossEntropyOutput(outputs[0], *returned)


def keep_outputs(ctx: Any, outputs: Sequence[Tensor], computed: int, followed: int) -> tuple[Tensor | None, ...]:
    """In a setup_context: which outputs have a derivative (the loss and, of the bits `followed`, lse and entropy), and
    those to save, in the order in which the extension's backward takes them."""
    ctx.set_materialize_grads(False)  # or each backward would fill a tensor of zeros for each output
    ctx.computed, ctx.followed = computed, followed
    if followed & (LSE | ENTROPY):
        positions, differentiable = POSITIONS[computed], (followed & LSE) | ENTROPY
        constant = [outputs[positions[bit]] for bit in OUTPUTS if computed & bit and not differentiable & bit]
        ctx.mark_non_differentiable(*constant)
    else:
        ctx.mark_non_differentiable(*outputs[1:])
    entropy, target_mass, divisor = _SAVED_POSITIONS[computed]
    return (
        outputs[1],  # lse
        outputs[entropy] if entropy else None,
        outputs[target_mass] if target_mass else None,
        outputs[divisor] if divisor else None,
    )


def upstream_of(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Of the upstream gradients those of the loss, lse and entropy, as far as the user has these; none where all are
    absent."""
    grad_loss, grad_lse = grads[0], grads[1] if ctx.followed & LSE else None
    grad_entropy = pick(grads, ctx.computed, ENTROPY)
    if grad_loss is None and grad_lse is None and grad_entropy is None:
        return ()
    if grad_lse is not None and ctx.computed & SPLIT_LSE:
        grad_lse = grad_lse.select(-1, 0)
    return grad_loss, grad_lse, grad_entropy


def for_backward(upstream: Sequence[Any], saved: Sequence[Any], mode: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The upstream gradients and the saved outputs as the extension takes them."""
    grad_loss, grad_lse, grad_entropy = upstream
    lse, entropy, target_mass, divisor = saved
    if grad_loss is None:
        grad_loss = lse.new_zeros(()).expand(lse.shape[:-1] if mode == NONE else ())
    if grad_lse is not None:
        grad_lse = grad_lse.contiguous()
    if grad_entropy is None:
        return (grad_loss, grad_lse, None), (lse.detach(), None, target_mass, divisor)
    return (grad_loss, grad_lse, grad_entropy.contiguous()), (lse.detach(), entropy.detach(), target_mass, divisor)


def empty_outputs(like: Tensor, rows: Sequence[int], mode: int, outputs: int) -> list[Tensor]:
    """The loss and the outputs that the bits name, without values."""
    dtype = accumulator_dtype(like.dtype)
    loss_shape = rows if mode == NONE else ()
    shapes = dict.fromkeys(OUTPUTS, rows) | {DIVISOR: (), Z_LOSS: loss_shape}
    tensors = [like.new_empty(loss_shape, dtype=dtype)]
    for bit, shape in shapes.items():
        if outputs & bit:
            of_output = (*shape, 2) if bit == LSE and outputs & SPLIT_LSE else shape
            tensors.append(like.new_empty(of_output, dtype=torch.int64 if bit == ARGMAX else dtype))
    return tensors


# ------------------------------------------------------------------------------------------------ samples of torch.vmap


def divisors_of(
    samples: int,
    targets: Tensor,
    weight: Tensor | None,
    row_weight: Tensor | None,
    normalizer: Tensor | None,
    ignore_index: int,
    rows: Tensor,
) -> Tensor:
    """What the mean of each sample is divided by; `targets` has the samples as its first axis, and so have `row_weight`
    and `rows`, one number for each row in the dtype of the divisors."""
    if normalizer is not None:
        return normalizer.reshape(samples).clone()
    weights = torch.ones_like(rows) if row_weight is None else row_weight
    if targets.is_floating_point():  # with probabilities no row is ignored
        return divisor_of_sum(_sums(weights))
    # int32 classes would be compared with the last 32 bits of ignore_index.
    counts = (targets.to(torch.int64) != ignore_index) & (weights != 0)
    if weight is not None:
        classes = torch.where(counts, targets, 0).clamp(0, max(weight.shape[0] - 1, 0))
        weights = weights * weight.to(rows.dtype)[classes]
    return divisor_of_sum(_sums(torch.where(counts, weights, 0.0)))


def divisor_of_sum(weights: Tensor) -> Tensor:
    """As the core's: by infinite weights neither a mean nor its gradient is a number."""
    return weights.masked_fill(weights.isinf(), math.nan)


def _sums(rows: Tensor) -> Tensor:
    """The sum of each sample's rows, in float64 as the core's."""
    return rows.reshape(rows.shape[0], math.prod(rows.shape[1:])).sum(1, dtype=torch.float64).to(rows.dtype)


def _quotient(numbers: Tensor, divisors: Tensor) -> Tensor:
    """Without rows that count, a mean is 0."""
    return torch.where(divisors == 0, torch.zeros_like(numbers), numbers / divisors)


def reduce_samples(tensors: list[Tensor], outputs: int, mode: int, divisors: Tensor | None) -> list[Tensor]:
    """What a call with reduction "none" gave for all samples at once, each sample's losses reduced.

    `outputs` are those of the call that was asked for; the one for all has no divisor. `divisors` are there with the
    mean.
    """
    if mode == NONE:
        return tensors
    z_losses = pick(tensors, outputs & ~DIVISOR, Z_LOSS)
    losses, parts = _sums(tensors[0]), None if z_losses is None else _sums(z_losses)
    if divisors is not None:
        losses = _quotient(losses, divisors)
        parts = None if parts is None else _quotient(parts, divisors)
    reduced = list(tensors)
    if outputs & DIVISOR and divisors is not None:
        reduced.insert(POSITIONS[outputs][DIVISOR], divisors)
    reduced[0] = losses
    if parts is not None:
        reduced[POSITIONS[outputs][Z_LOSS]] = parts
    return reduced


def row_gradients(grad_loss: Tensor, mode: int, divisor: Tensor | None, rows: Tensor) -> Tensor:
    """dL/d(loss) of each row, from that of each sample's reduced loss. `rows` has the samples as its first axis."""
    if mode == NONE:
        return grad_loss
    samples = rows.shape[0]
    grads = grad_loss.reshape(samples)
    if divisor is not None:
        grads = _quotient(grads, divisor.reshape(samples))
    return grads.reshape([samples] + [1] * (rows.dim() - 1)).expand(rows.shape)
