# Copyright (c) the d2_memfit developers.
"""The parameters of a model, from its text in a log."""

import math
import re

__all__ = ["parameters_in"]

# "(fc1): Linear(...)", "(0-5): 6 x Block(", or the first line of a layer that has parts
_LAYER = re.compile(r"\([\w-]+\): (?:\([\d-]+\): )?(?:(\d{1,3}) x )?(\w+)\((.*)")
_KERNEL = re.compile(r"kernel_size=\(([\d, ]{1,99})\)")
_LINE, _MOST = 1000, 10**13  # characters, and parameters


def parameters_in(model_text: str) -> int:
    """The parameters of convolutions, linear layers, embeddings and norms that a text names.

    Others, such as a transformer's queries, are missing: the model has at least as many.
    """
    total, kind = 0, ""
    repeats: list[tuple[int, int]] = []  # the indents of layers around the line, and their numbers
    for line in model_text.splitlines():
        arguments = line.lstrip()[:_LINE]
        indent = len(line) - len(line.lstrip())
        while repeats and repeats[-1][0] >= indent:
            repeats.pop()
        if layer := _LAYER.match(arguments):
            kind, arguments = layer[2], layer[3]
            repeats.append((indent, int(layer[1] or 1)))
        # Otherwise the arguments of a layer that has parts, on a line of their own.
        total += _parameters_of(kind, arguments) * math.prod(times for _, times in repeats)
    return min(total, _MOST)


def _parameters_of(kind: str, arguments: str) -> int:
    numbers = [int(n) for n in re.findall(r"(?:^|[ =(,])(\d{1,9})(?=[,) ]|$)", arguments)]
    bias = "bias=False" not in arguments
    kernel = _KERNEL.search(arguments)
    if kernel and len(numbers) > 1 and "Conv" in kind:
        groups = re.search(r"groups=(\d{1,9})", arguments)
        size = math.prod(int(n) for n in kernel[1].split(",") if n.strip())
        weights = numbers[0] * numbers[1] * size // max(int(groups[1]) if groups else 1, 1)
        return weights + numbers[1] * bias
    if "Linear" in kind and len(numbers) > 1:
        of_attention = kind in ("_LinearWithBias", "NonDynamicallyQuantizableLinear")
        # MultiheadAttention prints its last layer only, one of four.
        return (numbers[0] * numbers[1] + numbers[1] * bias) * (4 if of_attention else 1)
    if "Embedding" in kind and len(numbers) > 1:
        return numbers[0] * numbers[1]
    if "Norm" in kind and "Frozen" not in kind and numbers and "affine=False" not in arguments:
        # BatchNorm2d(64, ...), GroupNorm(32, 256, ...), LayerNorm((256,), ...)
        return 2 * numbers["GroupNorm" in kind and len(numbers) > 1]
    return 0
