"""The modules of the losses, made of their functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from eaves._arguments import refuse_unknown


class LossModule(torch.nn.Module):
    """A loss as a module. Each option is a keyword of the function and an attribute of the same name."""

    weight: Tensor | None
    _defaults: ClassVar[Mapping[str, object]]

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._defaults}

    def extra_repr(self) -> str:
        """The options that differ from the default."""
        return ", ".join(f"{n}={value!r}" for n, value in self._options().items() if value != self._defaults[n])


_Module = TypeVar("_Module", bound=LossModule)


def module_of(function: Callable[..., object], *given_with_each_call: str) -> Callable[[type[_Module]], type[_Module]]:
    """A decorator for a LossModule: __init__ takes `weight` and the keywords of `function` but
    `given_with_each_call`."""
    parameters = inspect.signature(function).parameters
    named = [each for each in parameters.values() if each.kind in (each.KEYWORD_ONLY, each.VAR_KEYWORD)]
    keywords = [each for each in named if each.name not in ("weight", *given_with_each_call)]

    def decorate(module: type[_Module]) -> type[_Module]:
        def __init__(self: _Module, weight: Tensor | None = None, *more: object, **options: object) -> None:
            if more or not (weight is None or isinstance(weight, Tensor)):
                with_head = (
                    "; the head goes in with each call, as linear_weight" if "linear_weight" in parameters else ""
                )
                raise TypeError(f"{module.__name__}: expected weight, [V], and keywords{with_head}")
            unknown = {name: value for name, value in options.items() if name not in module._defaults}
            for name in unknown.keys() & given_with_each_call:
                raise TypeError(f"{module.__name__}: {name} is given with each call, not to the module")
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
