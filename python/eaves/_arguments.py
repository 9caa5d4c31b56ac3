"""The arguments that the losses share between PyTorch and JAX: the reduction, the options of a teacher, the names of
outputs with the named tuples that return them, and the answers to keywords of other functions. Imports neither PyTorch
nor JAX."""

from __future__ import annotations

import functools
import inspect
import re
from collections import namedtuple
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

NONE, SUM, MEAN = 0, 1, 2  # enum Reduction of include/eaves/cross_entropy.h
REDUCTIONS = {"none": NONE, "sum": SUM, "mean": MEAN}

# The names that `outputs` takes.
LOSS_OUTPUTS = ("lse", "argmax", "entropy", "z_loss", "sum_sq", "mean_logit")
LOG_PROB_OUTPUTS = ("entropy", "is_top1", "sum_sq", "mean_logit")
KL_DIV_OUTPUTS = ("divergence", "hard_loss", "entropy", "lse", "teacher_lse")


def reduction_of(op: str, reduction: str) -> int:
    mode = REDUCTIONS.get(reduction) if isinstance(reduction, str) else None
    if mode is None:
        error = ValueError if isinstance(reduction, str) else TypeError
        hint = "; divide by a batch with normalizer=its size" if reduction == "batchmean" else ""
        raise error(f'{op}: reduction is {reduction!r}, expected "none", "sum" or "mean"{hint}')
    return mode


def check_teacher_options(op: str, teacher: str, **options: object) -> None:
    """Refuses options that do not fit the teacher. `teacher` is the name of its argument; `options` are teacher_bias,
    teacher_scale and teacher_softcap."""
    for name, option in options.items():
        takes = ("teacher_hidden",) if name == "teacher_bias" else ("teacher_hidden", "teacher_logits")
        if option is not None and teacher not in takes:
            raise ValueError(f"{op}: {name} is given, which {teacher} do not take; leave it out")


def check_temperature_of_top_k(op: str, rest: str, is_one: bool) -> None:
    """Refuses a temperature other than 1 for "class" and "ignore", because the rest at another one is unknown."""
    if not is_one and rest in ("class", "ignore"):
        raise ValueError(
            f'{op}: temperature is given beside teacher_tokens and teacher_rest="{rest}", but a top K does not '
            "determine the rest at another temperature; pass log-probabilities served at the temperature T, scale=1/T "
            'and no temperature, or teacher_rest="renormalize" or "zero"'
        )


# ------------------------------------------------------------------------------------------------------------- outputs

_Array = TypeVar("_Array")
_Element = TypeVar("_Element", covariant=True)
_Function = TypeVar("_Function", bound=Callable[..., object])


class _Tuple(Protocol[_Element]):
    def __iter__(self) -> Iterator[_Element]: ...
    def __getitem__(self, index: int, /) -> _Element: ...
    def __len__(self) -> int: ...


class CrossEntropyOutputs(_Tuple[_Array], Protocol[_Array]):
    """The named tuple that a loss returns with `outputs`: the loss, then these outputs in the order of their names."""

    loss: _Array
    lse: _Array
    argmax: _Array
    entropy: _Array
    z_loss: _Array
    sum_sq: _Array
    mean_logit: _Array


class LogProbOutputs(_Tuple[_Array], Protocol[_Array]):
    """The named tuple that functions of log-probabilities return with `outputs`: the log-probabilities, then these
    outputs in the order of their names."""

    log_prob: _Array
    entropy: _Array
    is_top1: _Array
    sum_sq: _Array
    mean_logit: _Array


class KlDivOutputs(_Tuple[_Array], Protocol[_Array]):
    """The named tuple that linear_kl_div returns with `outputs`: the loss, then these outputs in the order of their
    names."""

    loss: _Array
    divergence: _Array
    hard_loss: _Array
    entropy: _Array
    lse: _Array
    teacher_lse: _Array


def output_names(op: str, outputs: object, known: Collection[str]) -> tuple[str, ...]:
    """The argument `outputs`, one name or a sequence of names, checked."""
    if type(outputs) is tuple and not outputs:
        return ()
    names = (outputs,) if isinstance(outputs, str) else outputs
    if not isinstance(names, (tuple, list)):
        raise TypeError(f"{op}: outputs is {outputs!r}, expected names among {', '.join(known)}, or () for none")
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise ValueError(f"{op}: outputs has {name!r}, expected names among {', '.join(known)}")
    if len(set(names)) < len(names):
        raise ValueError(f"{op}: outputs is {outputs!r}, expected each name once")
    return tuple(names)


_types: dict[tuple[str, ...], Any] = {}  # the classes of named tuples, by their names and fields


def named_outputs(kind: str, names: Sequence[str], values: Sequence[Any]) -> Any:
    """A named tuple. The same names give the same class."""
    # Like the class's __new__, which torch.compile cannot find, because the class comes from no variable.
    return tuple.__new__(_type_of(kind, *names), values)


def _type_of(*kind_and_fields: str) -> Any:
    if kind_and_fields not in _types:
        kind, *fields = kind_and_fields
        make: Any = namedtuple  # Any, because mypy would have to know the fields
        made = make(kind, fields)
        made.__reduce__ = lambda self: (named_outputs, (kind, fields, tuple(self)))
        _types[kind_and_fields] = made
    return _types[kind_and_fields]


# The mark of torch.compiler.assume_constant_result, which would load torch._dynamo. A graph cannot make a class.
_type_of._dynamo_marked_constant = True  # type: ignore[attr-defined]

# -------------------------------------------------------------------------------------------- names of other functions

# Keywords of other functions, each with the parameter here that replaces it, if the function at hand has it.
_PARAMETERS = (
    ("temperature", "scale"),
    ("logit_scale", "scale"),
    ("logit_softcap", "softcap"),
    ("logit_soft_cap", "softcap"),
    ("logit_softcapping", "softcap"),
    ("final_logit_softcapping", "softcap"),
    ("lse_square_scale", "z_loss"),
    ("logsumexp_weight", "z_loss"),
    ("e", "input"),
    ("e", "hidden"),
    ("c", "linear_weight"),
    ("c", "head"),
    ("hidden", "input"),
    ("logits", "input"),
    ("input", "logits"),
    ("input", "hidden"),
    ("head", "linear_weight"),
    ("linear_weight", "head"),
    ("student_input", "hidden"),
    ("student_weight", "head"),
    ("teacher_input", "teacher_hidden"),
    ("teacher_weight", "teacher_head"),
    ("bias", "linear_bias"),
    ("linear_bias", "bias"),
    ("ce_weight", "weight"),
    ("ce_weight", "class_weight"),
    ("class_weight", "weight"),
    ("weight", "class_weight"),
    ("num_items_in_batch", "normalizer"),
    ("sample_weight", "row_weight"),
    ("loss_mask", "row_weight"),
    ("mask", "row_weight"),
    ("accum_dtype", "grad_weight_dtype"),
    ("accum_dtype", "grad_head_dtype"),
    ("accum_c_fp32", "grad_weight_dtype=torch.float32"),
    ("accumulate_grad_in_fp32", "grad_weight_dtype=torch.float32"),
    ("grad_weight_dtype", "grad_head_dtype"),
    ("grad_head_dtype", "grad_weight_dtype"),
    ("process_group", "group"),
    ("impl", "algorithm"),
    ("num_chunks", "workspace_bytes, the scratch memory in bytes"),
    ("chunk_size", "workspace_bytes, the scratch memory in bytes"),
    ("targets", "target"),
    ("labels", "target"),
    ("target", "targets"),
    ("labels", "targets"),
    ("target", "tokens"),
    ("targets", "tokens"),
    ("labels", "tokens"),
    ("index", "tokens"),
    ("class_dim", "axis"),
    ("group", "axis_name"),
)
_TEMPERATURE = "scale=1 / temperature, and with a softcap c in front of the temperature softcap=c / temperature"
_SWITCHES = ("shift", "accum_c_fp32", "accumulate_grad_in_fp32")  # calls here behave as with these off
_OF_HEAD = ("sequence_parallel", "reduce_input_grad", "reduce_dtype")  # fields of an eaves.Shard


def answers_missing(function: _Function) -> _Function:
    """Decorates a function. If a required argument is missing because the call used another function's name for it, the
    TypeError says which name to pass."""

    @functools.wraps(function)
    def called(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except TypeError as error:
            if str(error).startswith(f"{function.__name__}() missing "):
                parameters = inspect.signature(function).parameters
                if unknown := {name: value for name, value in keywords.items() if name not in parameters}:
                    refuse_unknown(function.__name__, unknown, function)
            raise

    return called  # type: ignore[return-value]


def answers_unknown(function: _Function) -> _Function:
    """Decorates a function with check_options(). The name in its errors has the module: eaves.trl.install."""
    op = ".".join([*function.__module__.split(".")[:2], function.__name__])

    @functools.wraps(function)
    def called(*arguments: Any, **keywords: Any) -> Any:
        check_options(op, keywords, function)
        return function(*arguments, **keywords)

    return called  # type: ignore[return-value]


def check_options(op: str, keywords: Mapping[str, object], function: Callable[..., object]) -> None:
    """Raises TypeError for keywords that `function` does not have: it says which name to pass, or lists the options."""
    parameters = inspect.signature(function).parameters
    if unknown := {name: value for name, value in keywords.items() if name not in parameters}:
        options = ", ".join(name for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY)
        refuse_unknown(op, unknown, function, f"; expected {options}")


def refuse_unknown(
    op: str, unknown: Mapping[str, object], function: Callable[..., object], otherwise: str = ""
) -> NoReturn:
    """Raises TypeError for keywords that `function` does not have. `otherwise` is the answer to a keyword that no other
    function has."""
    hints = dict.fromkeys(_hint(name, value, function) or otherwise for name, value in unknown.items())
    names = ", ".join(map(repr, unknown))
    what = f"an unexpected keyword argument {names}" if len(unknown) == 1 else f"unexpected keyword arguments {names}"
    raise TypeError(f"{op}: got {what}{''.join(hints)}")


def _hint(name: str, value: object, function: Callable[..., object]) -> str:
    """The way out for a keyword of another function."""
    parameters = inspect.signature(function).parameters
    output = _output_of(name, parameters)
    is_off = value is None or value is False or (type(value) is int and value == 0)
    if is_off and (output or name in _SWITCHES):
        return f"; leave {name} out"
    if output:
        return f'; pass outputs="{output}"'
    has_head = "linear_weight" in parameters or "head" in parameters
    if "group" in parameters and (name == "first_class" or (has_head and name in _OF_HEAD)):
        return f"; pass group=eaves.Shard(group, {name}=...)"
    if name == "shift" and not parameters.keys().isdisjoint(("target", "targets", "tokens")):
        return "; pass the rows without the last and their classes without the first"
    if name == "filter_eps":
        return "; leave it out: no gradient is dropped"
    if name == "accum_e_fp32":
        return "; leave it out: the rows' gradient is summed in float32"
    if name in ("mask", "loss_mask") and "tokens" in parameters:
        return "; pass -100 in tokens for rows that do not count"
    for other, parameter in _PARAMETERS:
        if other == name and re.split("[,=]", parameter)[0] in parameters:
            return f"; pass {_TEMPERATURE if name == 'temperature' else parameter}"
    return ""


def _output_of(name: str, parameters: Mapping[str, object]) -> str | None:
    """The name of the output that corresponds to another function's return_*."""
    known: tuple[str, ...] = LOG_PROB_OUTPUTS if "tokens" in parameters else LOSS_OUTPUTS
    if "teacher_hidden" in parameters:
        known = KL_DIV_OUTPUTS
    output = name.removeprefix("return_")
    if output in ("argmax", "is_top1", "top1", "predicted_tokens"):
        output = "is_top1" if "tokens" in parameters else "argmax"
    return output if name.startswith("return_") and "outputs" in parameters and output in known else None
