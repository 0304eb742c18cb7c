"""Triton's interpreter, made to work with NumPy 2.4: it takes an array of one element for an int, as Triton 3.6 does.

NumPy refuses that now. Triton takes the element since; the CUDA build of torch 2.11 comes with a Triton that does not.
"""

from typing import Any

import numpy as np
from triton.runtime import interpreter


def takes_arrays_for_ints() -> bool:
    """Whether this Triton's scalars, which are arrays of one element, fail as the bounds of a loop."""
    scope, kind = interpreter._LangPatchScope(), type("Scalar", (), {})
    interpreter._patch_lang_tensor(kind, scope)
    try:
        scalar = kind()
        scalar.handle = type("Handle", (), {"data": np.ones(1, dtype=np.int32)})()
        scalar.__index__()
    except TypeError:
        return True
    finally:
        scope.restore()
    return False


def patch_scalars() -> None:
    """Let a scalar of an interpreted kernel be an int wherever this Triton's own is refused."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    if takes_arrays_for_ints():
        interpreter._patch_lang_tensor = patched
