"""Triton's interpreter without what it computes again and again: for tests, which run small programs, and wait for little else.

Each change leaves results as they are: it remembers what follows from its arguments alone, or leaves out what nobody reads. Types
and tensors of one shape share what they say of it, which Triton changes nowhere.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator
from contextlib import contextmanager

_changed: list[tuple[object, str, object]] = []
"""Owners, names, and what was there."""


def quicken() -> None:
    """Changes the interpreter of this process, once.

    Raises:
        AttributeError: this version of Triton names something otherwise; nothing is changed then.
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
    """The interpreter unchanged, for a while."""
    now = [(owner, name, getattr(owner, name)) for owner, name, _ in _changed]
    for before in _changed:
        setattr(*before)
    try:
        yield
    finally:
        for change in now:
            setattr(*change)


def _exchange_once(tl, interpreter):
    """The functions of its language are exchanged before every call of a kernel's own functions, though the launch has done so."""
    exchange, done = interpreter._patch_lang, types.SimpleNamespace(restore=lambda: None)

    @functools.cache
    def seen(fn):
        return [module for module in fn.__globals__.values() if module is tl or module is tl.core]

    @functools.wraps(exchange)
    def exchange_once(fn):
        return done if seen(fn) and not any(tl.core.is_builtin(module.load) for module in seen(fn)) else exchange(fn)

    return interpreter, "_patch_lang", exchange_once


def _compute_no_overflows(interpreter):
    """Sums and products of integers are made a second time, in 64 bits, for an assertion that is then dropped: it is for debugging."""
    builder = interpreter.interpreter_builder
    return builder, "options", dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)


def _remember_dtypes(tl, interpreter):
    """NumPy's dtype of a type follows from the name of its scalar."""
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
    """Types of blocks follow from types of elements and lengths."""
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
    """What a tensor says of its shape follows from lengths."""
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
    """Most of what is unwrapped is a number."""
    unwrap, nested = core._unwrap_if_constexpr, (list, tuple, core.tuple)

    @functools.wraps(unwrap)
    def quickly(o):
        if type(o) is core.constexpr:
            return o.value
        return unwrap(o) if isinstance(o, nested) else o

    return core, "_unwrap_if_constexpr", quickly


def _broadcast_what_differs(semantic):
    """Tensors of one shape, which they share since ``_remember_shapes``, stay as they are."""
    broadcast = semantic.broadcast_impl_value

    @functools.wraps(broadcast)
    def differing(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    return semantic, "broadcast_impl_value", differing
