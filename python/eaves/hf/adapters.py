"""Adapters of PEFT around a head: LoRA, modules_to_save and trainable tokens.

The adapter's own forward runs, so its scaling, dropout, active copies and casts are PEFT's. It multiplies with
torch.nn.functional.linear. If the product would be logits, it gets `Products` instead, which record factors and sums.
LoRA's W x + s B (A x) is one product of longer features, [W, B] [x, s A x].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from eaves._torch.checks import is_distributed

# Modules around a torch.nn.Linear, and the attribute that holds it.
_ADAPTERS = {
    "peft.tuners.lora.layer.Linear": "base_layer",
    "peft.tuners.trainable_tokens.layer.TrainableTokensLayer": "base_layer",
    "peft.utils.other.ModulesToSaveWrapper": "original_module",
    "peft.utils.other.TrainableTokensWrapper": "original_module",
}


def inner_linear(head: Any) -> Any:
    """The module inside an adapter; any other head itself."""
    original = getattr(type(head), "_eaves_class", type(head))
    place = _ADAPTERS.get(f"{original.__module__}.{original.__qualname__}")
    return head if place is None else getattr(head, place)


def check_adapter(name: str, head: Any, is_in_pieces: bool) -> None:
    """Raises NotImplementedError for an adapter other than a sum of products, and for an adapted head over ranks."""
    of_head = vars(head)
    variants = [
        *of_head.get("lora_variant", ()),
        *(each for each, is_on in of_head.get("use_dora", {}).items() if is_on),
    ]
    if variants:
        raise NotImplementedError(
            f"patch: the adapter {variants[0]!r} on the head of this {name} is a variant of LoRA (DoRA, for instance), "
            "expected plain LoRA; leave the head out of its target_modules"
        )
    if is_in_pieces or is_distributed(inner_linear(head).weight):
        raise NotImplementedError(
            f"patch: the head of this {name} is in pieces over ranks and has an adapter of PEFT; leave the head out of "
            "the adapter"
        )


class _Term(NamedTuple):
    """factor * (hidden weight^T + bias)."""

    factor: float
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


class Products:
    """A sum of products that is not computed. Operations other than factors and sums get a tensor."""

    def __init__(self, terms: tuple[_Term, ...], dtype: torch.dtype) -> None:
        self._terms, self.dtype = terms, dtype

    def tensor(self) -> Tensor:
        logits: Any = 0
        for factor, hidden, weight, bias in self._terms:
            # _Noting does not intercept this name.
            logits = logits + torch.ops.aten.linear.default(hidden, weight, bias) * factor
        return logits.to(self.dtype)  # type: ignore[no-any-return]

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, Products):
            return self.tensor() + other
        return Products((*self._terms, *other._terms), torch.promote_types(self.dtype, other.dtype))

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return self.tensor() * other
        return Products(tuple(each._replace(factor=each.factor * other) for each in self._terms), self.dtype)

    __rmul__ = __mul__

    def to(self, dtype: torch.dtype) -> Products:
        return Products(self._terms, dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked by Python and its tools
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        arguments, options = torch.utils._pytree.tree_map(
            lambda each: each.tensor() if isinstance(each, Products) else each, (arguments, options or {})
        )
        return function(*arguments, **options)

    # The sum as one product, in the dtypes of the first. A GPU's kernels read 16 bytes at a time, so features are
    # padded with zeros.

    def joined_hidden(self) -> Tensor:
        first = self._terms[0].hidden
        states = [_times(each.hidden, each.factor).to(first.dtype) for each in self._terms]
        return states[0] if len(states) == 1 else torch.cat([*states, *self._padding(first)], -1)

    def joined_head(self) -> JoinedHead:
        first = self._terms[0].weight
        weights = [each.weight.to(first.dtype) for each in self._terms]
        weight = first if len(weights) == 1 else torch.cat([*weights, *self._padding(first)], 1)
        biases = [_times(each.bias, each.factor) for each in self._terms if each.bias is not None]
        return JoinedHead(weight, functools.reduce(torch.add, biases) if biases else None, self)

    def _padding(self, first: Tensor) -> list[Tensor]:
        columns = -sum(each.weight.shape[1] for each in self._terms) % 8
        return [first.new_zeros((*first.shape[:-1], columns))] if columns else []


def _times(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1 else tensor * factor


class JoinedHead(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    products: Products

    def product(self, _: Tensor) -> Tensor:
        """The logits, as the adapter computes them."""
        return self.products.tensor()


class _Noting(TorchFunctionMode):
    """In the block, torch.nn.functional.linear returns Products if the weight has this number of rows."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self._classes = classes

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if function is linear:
            term = _term_of(*arguments, **options)
            if isinstance(term.hidden, Tensor) and term.weight.shape[0] == self._classes:
                product = torch.get_autocast_dtype(term.hidden.device.type)
                is_cast = torch.is_autocast_enabled(term.hidden.device.type)
                return Products((term,), product if is_cast else term.hidden.dtype)
        return function(*arguments, **options)


def _term_of(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Term:
    return _Term(1.0, input, weight, bias)


def products_of(head: Any, forward: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    """The result of an adapter's forward: Products, or a tensor after an operation that Products do not record."""
    with _Noting(inner_linear(head).weight.shape[0]):
        return forward(hidden)
