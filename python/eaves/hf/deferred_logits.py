"""Logits of a head that are computed only if their numbers are needed. A model patched by eaves.hf gets them from its
head in place of a tensor.

In each call the model's own forward applies its operations to the logits, and `DeferredLogits` records them. So no
scale and no soft cap is read from a configuration, in which the same name multiplies in one architecture and divides in
another (logits_scaling of HyperCLOVA X and of Granite), and no operation of an architecture can get lost.

A forward that calls torch.nn.functional.cross_entropy itself (BERT, T5, BART) passes these logits to it, and gets the
loss of `cross_entropy`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class DeferredLogits:
    """The logits of a head, while they are softcap * tanh(scale * z / softcap) of the product z (without a soft cap:
    scale * z), or z plus a number for each class, in rows of any shape.

    They are not a torch.Tensor, so code that does not know them cannot mistake them for one. Code that needs the
    numbers gets `tensor()`, computed as the model wrote it. From then on the loss is computed from that tensor too,
    because it may have been written to.
    """

    # NumPy numbers leave an operator to these logits; otherwise they would turn any object with a length into an array.
    __array_ufunc__ = None

    def __init__(
        self,
        head: Any,  # a torch.nn.Linear, or a patched one
        hidden: Tensor,
        scale: float = 1.0,
        softcap: float | None = None,
        source: DeferredLogits | None = None,
        function: Callable[[Tensor], Tensor] | None = None,
        dtype: torch.dtype | None = None,  # None: the dtype of the product
    ) -> None:
        self.head, self.hidden, self.scale, self.softcap = head, hidden, scale, softcap
        self._dtype = dtype
        # No cycles of references, because hidden states in one would wait for the garbage collector.
        self._source, self._function = source, function  # the logits before the last operation, and that operation
        self._root: DeferredLogits | None = (
            source if source is None or source._root is None else source._root
        )  # None: these are the root
        self._tensor: Tensor | None = None
        self._version = 0
        self._kept: Tensor | None = None
        self._is_flat: bool = source is not None and source._is_flat
        self._class_bias: Tensor | None = None if source is None else source._class_bias
        # Computes a loss of these logits, with the arguments of torch.nn.functional.cross_entropy; None: no such loss.
        self.cross_entropy: Callable[..., Tensor | None] | None = None if source is None else source.cross_entropy

    def keep(self) -> None:
        """Computes the numbers for the output of the model; the loss is then computed from them."""
        self._kept = self._product(self.hidden)

    @property
    def is_kept(self) -> bool:
        root = self if self._root is None else self._root
        return root._kept is not None

    def _product(self, hidden: Tensor) -> Tensor:
        product: Tensor = getattr(self.head, "product", self.head)(hidden)  # a patched head would defer again
        return product

    @property
    def bias(self) -> Tensor | None:
        """The bias of the head, plus the number for each class that the model adds."""
        bias: Tensor | None = self.head.bias
        if self._class_bias is None:
            return bias
        return self._class_bias if bias is None else bias + self._class_bias

    @property
    def is_deferred(self) -> bool:
        """True if neither these logits nor the logits that they were made of have needed their numbers yet."""
        root = self if self._root is None else self._root
        return root._tensor is None

    @property
    def shape(self) -> torch.Size:
        rows = self.hidden.shape[:-1]
        return torch.Size((*((rows.numel(),) if self._is_flat else rows), self.head.weight.shape[0]))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        if self._tensor is not None:
            return self._tensor.dtype
        device = self.hidden.device.type
        if self._dtype is None and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return self.hidden.dtype if self._dtype is None else self._dtype

    def tensor(self, reason: str) -> Tensor:
        """The numbers."""
        if self._tensor is None:
            if self._kept is not None:
                self._tensor = self._kept
            elif self._source is None or self._function is None:
                warnings.warn(
                    f"eaves.hf: the model uses the logits for more than the loss ({reason}), so eaves computes all "
                    "logits",
                    stacklevel=3,
                )
                self._tensor = self._product(self.hidden)
            else:
                source = self._source.tensor(reason)
                if source._version != self._source._version:
                    raise RuntimeError(
                        f"eaves.hf: the logits were overwritten before {reason} of a tensor that was computed from them"
                    )
                self._tensor = self._function(source)
            self._version = self._tensor._version
        return self._tensor

    def _made(
        self,
        reason: str,
        scale: float,
        softcap: float | None,
        function: Callable[[Tensor], Tensor],
        dtype: torch.dtype | None = None,
    ) -> Any:
        is_known = 0 < scale < math.inf and (self._class_bias is None or (scale == 1 and softcap is None))
        if self.is_deferred and is_known:
            dtype = self._dtype if dtype is None else dtype
            return DeferredLogits(self.head, self.hidden, scale, softcap, self, function, dtype)
        return function(self.tensor(reason))

    def view(self, *shape: Any) -> Any:
        """The logits as rows, for a loss. Any other shape is computed."""
        rows = self.shape[:-1].numel()
        if shape in ((-1, self.shape[-1]), (rows, self.shape[-1])):
            made = self._made("view", self.scale, self.softcap, lambda x: x.reshape(shape))
            if isinstance(made, DeferredLogits):
                made._is_flat = True
            return made
        return self.tensor("view").view(*shape)

    reshape = view

    def _times(self, reason: str, factor: float, function: Callable[[Tensor], Tensor]) -> Any:
        # A soft cap times a factor: softcap * factor * tanh(scale * factor * z / (softcap * factor)).
        softcap = None if self.softcap is None else self.softcap * factor
        return self._made(reason, self.scale * factor, softcap, function)

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, (int, float)):
            return self._times("a factor", other, lambda x: x * other)
        return self.tensor("a product") * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, (int, float)) and other != 0:
            return self._times("a divisor", 1 / other, lambda x: x / other)
        return self.tensor("a quotient") / other

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Tensor) and other.numel() == other.shape[-1:].numel() == self.shape[-1]:
            is_plain = self.scale == 1 and self.softcap is None and self._class_bias is None
            if is_plain and other.dim() <= len(self.shape):
                dtype = torch.promote_types(self.dtype, other.dtype)
                made = self._made("a bias", 1.0, None, lambda x: x + other, dtype)
                if isinstance(made, DeferredLogits):
                    made._class_bias = other.reshape(-1)
                return made
        return self.tensor("a sum") + other

    def tanh(self) -> Any:
        if self.softcap is None:
            return self._made("tanh", self.scale, 1.0, torch.tanh)
        return self.tensor("a second tanh").tanh()

    def float(self) -> Any:
        return self._made("float", self.scale, self.softcap, lambda x: x.float(), torch.float32)

    def to(self, *arguments: Any, **options: Any) -> Any:
        is_dtype = len(arguments) == 1 and isinstance(arguments[0], torch.dtype) and not options
        if is_dtype and arguments[0].is_floating_point:
            return self._made("to", self.scale, self.softcap, lambda x: x.to(arguments[0]), arguments[0])
        return self.tensor("to").to(*arguments, **options)

    def contiguous(self) -> Any:
        return self._made("contiguous", self.scale, self.softcap, lambda x: x.contiguous())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked by Python and its tools, copy for instance
            raise AttributeError(name)
        return getattr(self.tensor(name), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.tanh and len(arguments) == 1 and not options:
            return arguments[0].tanh()
        if function is torch.nn.functional.cross_entropy and isinstance(arguments[0], DeferredLogits):
            loss = arguments[0].cross_entropy
            found = None if loss is None else loss(*arguments, **(options or {}))
            if found is not None:
                return found
        name = getattr(function, "__name__", str(function))
        if name in ("add", "__add__") and isinstance(arguments[0], DeferredLogits) and not options:
            return arguments[0].__add__(*arguments[1:])  # from torch.compile, which does not look in the class
        arguments, options = torch.utils._pytree.tree_map(
            lambda each: each.tensor(name) if isinstance(each, DeferredLogits) else each, (arguments, options or {})
        )
        return function(*arguments, **options)


def _by_tensor(name: str) -> Callable[..., Any]:
    return lambda logits, *arguments: getattr(logits.tensor(name), name)(*arguments)


def _in_place(name: str) -> Callable[[DeferredLogits, Any], DeferredLogits]:
    def write(logits: DeferredLogits, other: Any) -> DeferredLogits:
        getattr(logits.tensor(name), name)(other)
        return logits  # the same object, so all references to the logits see the write

    return write


# Python looks operators up in the class and skips __getattr__. The operators that object has would give a wrong result.
for _name in (
    "abs and bool complex contains eq floordiv float ge getitem gt index int invert iter le len lshift lt matmul "
    "mod ne neg or pos pow radd rand reversed rfloordiv rlshift rmatmul rmod ror rpow rrshift rshift rsub rtruediv "
    "rxor setitem sub xor"
).split():
    setattr(DeferredLogits, f"__{_name}__", _by_tensor(f"__{_name}__"))

# Without these, Python would use the operators above and bind the result to the name: other references to the logits
# would not see it. For tensors `a @= b` is `a = a @ b` too.
for _name in "iadd iand ifloordiv ilshift imod imul ior ipow irshift isub itruediv ixor".split():
    setattr(DeferredLogits, f"__{_name}__", _in_place(f"__{_name}__"))
