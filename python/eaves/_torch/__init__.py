"""The way into the extension: its operators, the checks of arguments and outputs, and PyTorch's tracers."""

from eaves._torch import library as library  # the operators have to be there before they are described
