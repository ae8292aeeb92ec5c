"""Options of methods, checked against the signatures that take them: names, types and ranges, in one place."""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from .errors import ArgumentError

AT_LEAST = {"seed": 0, "steps": 0}  # whole numbers are at least 1 where nothing else is said
NOT_OPTIONS = ("reduced", "point")  # what a bound reads, not what a user may choose
Function = TypeVar("Function", bound=Callable[..., Any])


def checked(function: Function) -> Function:
    """Have a function refuse arguments that are not what its annotations say.

    Read are int (at least 1, or AT_LEAST), bool, str, Literal, tuple[float, ...] and their unions with None.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        check_values(function, signature.bind(*args, **kwargs).arguments)
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def check_options(method: str, function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Refuse options that `function` does not take, or not so. Raises: ArgumentError."""
    fixed: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        fixed |= function.keywords
        function = function.func
    takes = [name for name in inspect.signature(function).parameters if name not in (*NOT_OPTIONS, *fixed)]
    unknown = [name for name in options if name not in takes]
    if unknown:
        there = f"its options are {', '.join(takes)}" if takes else "it has no options"
        raise ArgumentError(f"options: {method!r} does not take {', '.join(unknown)}; {there}")
    check_values(function, options)


def check_values(function: Callable[..., Any], given: dict[str, Any]) -> None:
    """Refuse values that are not what the annotations of `function` say. Raises: ArgumentError."""
    wanted = _hints(inspect.unwrap(function))
    for name, value in given.items():
        if name in wanted:
            expected = _expected(wanted[name], name, value)
            if expected:
                raise ArgumentError(f"{name}: expected {expected}, got {value!r}")


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(function)


def _expected(kind: Any, name: str, value: Any) -> str | None:
    """What was expected where `value` is not of the kind; None where it is, or the kind is none that is read here."""
    if get_origin(kind) in (Union, types.UnionType):
        others = [one for one in get_args(kind) if one is not type(None)]
        if len(others) != 1 or len(others) == len(get_args(kind)):
            return None
        expected = None if value is None else _expected(others[0], name, value)
        return expected and f"{expected}, or None"
    if kind is bool:
        return None if isinstance(value, (bool, np.bool_)) else "True or False"
    if kind is int:
        least = AT_LEAST.get(name, 1)
        fits = isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least
        return None if fits else f"a whole number of at least {least}"
    if kind is str:
        return None if isinstance(value, str) else "a string"
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        fits = any(type(value) is type(choice) and value == choice for choice in choices)
        return None if fits else " or ".join(map(repr, choices))
    if get_origin(kind) is tuple and get_args(kind) == (float, ...):
        fits = isinstance(value, Sequence) and len(value) > 0 and all(map(_is_finite, value))
        return None if fits else "one or more finite numbers"
    return None


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
