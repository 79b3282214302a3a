"""Triton's interpreter without repeated computations, for tests that run small programs.

Each change leaves results as they are: it caches what follows from its arguments alone, or omits what nothing
reads. Types and tensors of one shape share its description, which Triton never changes.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager

_changed: list[tuple[object, str, object]] = []
"""Owner, name and original value of each change."""


def quicken() -> None:
    """Change the interpreter of this process, once.

    Raises:
        AttributeError: this version of Triton uses another name for something; nothing is changed then.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    if _changed:
        return
    changes = [
        _exchange_once(tl, interpreter),
        _compute_no_overflows(interpreter),
        _remember_dtypes(tl, interpreter),
        _remember_blocks(tl.core),
        _remember_shapes(tl.core),
        _unwrap_quickly(tl.core),
        _broadcast_what_differs(TritonSemantic),
    ]
    _changed.extend((owner, name, getattr(owner, name)) for owner, name, _ in changes)
    for change in changes:
        setattr(*change)


@contextmanager
def as_it_was() -> Iterator[None]:
    """Restore the original interpreter within the context."""
    now = [(owner, name, getattr(owner, name)) for owner, name, _ in _changed]
    for before in _changed:
        setattr(*before)
    try:
        yield
    finally:
        for change in now:
            setattr(*change)


def _exchange_once(tl, interpreter):
    """Exchange the functions of the language only at a launch.

    Triton also exchanges them before every call of a kernel's own functions, although the launch has done so.
    """
    exchange, done = interpreter._patch_lang, types.SimpleNamespace(restore=lambda: None)

    @functools.cache
    def seen(fn):
        return [module for module in fn.__globals__.values() if module is tl or module is tl.core]

    @functools.wraps(exchange)
    def exchange_once(fn):
        return done if seen(fn) and not any(tl.core.is_builtin(module.load) for module in seen(fn)) else exchange(fn)

    return interpreter, "_patch_lang", exchange_once


def _compute_no_overflows(interpreter):
    """Omit the checks for integer overflow.

    For these, sums and products are computed a second time in 64 bits, for an assertion that is only used for
    debugging.
    """
    builder = interpreter.interpreter_builder
    return builder, "options", dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def _remember_dtypes(tl, interpreter):
    """Cache NumPy's dtype of a type by the name of its scalar."""
    original, found = interpreter._get_np_dtype, {}

    @functools.wraps(original)
    def dtype(of):
        scalar = of.scalar
        kind = scalar.name if type(scalar) is tl.dtype else tl.pointer_type
        if kind not in found:
            found[kind] = original(of)
        return found[kind]

    return interpreter, "_get_np_dtype", dtype


def _remember_blocks(core):
    """Cache block types by element type and lengths."""
    original, found = core.block_type.__init__, {}

    @functools.wraps(original)
    def block(self, element_ty, shape):
        lengths = [s.value if type(s) is core.constexpr else s for s in shape]
        if type(shape) not in (list, core.tuple) or not all(type(length) is int for length in lengths):
            return original(self, element_ty, shape)
        key = element_ty.name, *lengths
        if key not in found:
            original(self, element_ty, shape)
            found[key] = self.__dict__.copy()
        self.__dict__.update(found[key])
        self.element_ty = element_ty

    return core.block_type, "__init__", block


def _remember_shapes(core):
    """Cache the shape and size of tensors by their lengths."""
    original, found = core.tensor.__init__, {}

    @functools.wraps(original)
    def tensor(self, handle, type):
        key = tuple(type.shape) if type.is_block() else ()
        if key not in found:
            original(self, handle, type)
            found[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = found[key]

    return core.tensor, "__init__", tensor


def _unwrap_quickly(core):
    """Unwrap numbers quickly, because they are most of what is unwrapped."""
    unwrap, nested = core._unwrap_if_constexpr, (list, tuple, core.tuple)

    @functools.wraps(unwrap)
    def quickly(o):
        if type(o) is core.constexpr:
            return o.value
        return unwrap(o) if isinstance(o, nested) else o

    return core, "_unwrap_if_constexpr", quickly


def _broadcast_what_differs(semantic):
    """Return tensors of one shape unchanged; they share it since ``_remember_shapes``."""
    broadcast = semantic.broadcast_impl_value

    @functools.wraps(broadcast)
    def differing(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    return semantic, "broadcast_impl_value", differing
