"""Typed errors: each names the argument, what it got and what would do."""

from __future__ import annotations


class AttnBoundsError(Exception):
    """Base class of every error this package raises on purpose."""


class ArgumentError(AttnBoundsError, ValueError):
    """An argument cannot be used: names it, what it got and what would do."""


class ShapeError(ArgumentError):
    """An array has the wrong shape."""


class NotFiniteError(ArgumentError):
    """An array holds NaN or infinity."""


class RegionError(ArgumentError):
    """A region is empty, does not match its tokens or does not contain them."""


class MethodNotApplicableError(AttnBoundsError, NotImplementedError):
    """The method does not apply to this problem; the message names one that does."""


class UnsupportedModelError(AttnBoundsError, TypeError):
    """A model is not one that a loader reads; the message says which are."""


class ModelLoadError(AttnBoundsError, OSError):
    """A model, tokenizer or file could not be read or written."""


class MissingDependencyError(AttnBoundsError, ImportError):
    """An optional package is needed; the message says how to install it."""


class SolverError(AttnBoundsError, RuntimeError):
    """A solver failed and no valid bound could be recovered from what it left."""


class EngineError(AttnBoundsError, RuntimeError):
    """The workers of a run could not be reached or died; what was written before stays."""
