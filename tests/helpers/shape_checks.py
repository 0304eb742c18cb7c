"""What `--jaxtyping-packages` puts around functions, for less: beartype alone where an annotation names no array.

jaxtyping holds the shapes of a call's arrays against each other, and for that binds the arguments of every call and
checks them twice. Without arrays there is nothing to hold, and beartype checks the same arguments and the same result.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import jaxtyping
from beartype import BeartypeConf, beartype

REFUSES = BeartypeConf(violation_type=TypeError)  # as jaxtyping's own error is one
with_shapes = jaxtyping.jaxtyped


def names_an_array(annotation: Any) -> bool:
    """Whether it is, or has somewhere inside, a type of jaxtyping's, or may have one: text is not evaluated."""
    if isinstance(annotation, list | tuple):  # the arguments of a Callable
        return any(map(names_an_array, annotation))
    array = isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray)
    return array or isinstance(annotation, str) or any(map(names_an_array, get_args(annotation)))


def jaxtyped(fn: Any = None, *, typechecker: Callable[..., Any]) -> Any:
    """jaxtyping's decorator. Classes, generators and coroutines are left to it."""
    if fn is None:
        return partial(jaxtyped, typechecker=typechecker)
    odd = not inspect.isfunction(fn) or inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn)
    if odd or any(map(names_an_array, inspect.get_annotations(fn).values())):
        return with_shapes(fn, typechecker=typechecker)
    return beartype(conf=REFUSES)(fn)


jaxtyping.jaxtyped = jaxtyped  # the hook looks it up whenever it decorates
