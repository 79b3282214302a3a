"""Triton's interpreter without what it computes again and again: for tests, which run small programs, and wait for little else.

Each change leaves results as they are: it remembers what follows from its arguments alone, or leaves out what nobody reads.
"""

from __future__ import annotations

import functools
import types


def quicken() -> None:
    """Changes the interpreter of this process. Raises AttributeError where a version of Triton names things otherwise."""
    import triton.language as tl
    from triton.runtime import interpreter

    _exchange_once(tl, interpreter)
    _compute_no_overflows(interpreter)
    _remember_dtypes(tl, interpreter)
    _remember_shapes(tl)
    _unwrap_quickly(tl)
    _broadcast_what_differs()


def _exchange_once(tl, interpreter) -> None:
    """The functions of its language are exchanged before every call of a kernel's own functions, though the launch has done so."""
    exchange, done = interpreter._patch_lang, types.SimpleNamespace(restore=lambda: None)

    @functools.cache
    def seen(fn):
        return [module for module in fn.__globals__.values() if module is tl or module is tl.core]

    @functools.wraps(exchange)
    def exchange_once(fn):
        return done if seen(fn) and not any(tl.core.is_builtin(module.load) for module in seen(fn)) else exchange(fn)

    interpreter._patch_lang = exchange_once


def _compute_no_overflows(interpreter) -> None:
    """Sums and products of integers are made a second time, in 64 bits, for an assertion that is then dropped: it is for debugging."""
    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _remember_dtypes(tl, interpreter) -> None:
    """NumPy's dtype of a type follows from the name of its scalar."""
    original, found = interpreter._get_np_dtype, {}

    @functools.wraps(original)
    def dtype(of):
        scalar = of.scalar
        kind = scalar.name if type(scalar) is tl.dtype else tl.pointer_type
        if kind not in found:
            found[kind] = original(of)
        return found[kind]

    interpreter._get_np_dtype = dtype


def _remember_shapes(tl) -> None:
    """Types of blocks, and what a tensor says of its shape, follow from lengths."""
    core = tl.core
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks, shapes = {}, {}

    @functools.wraps(make_block)
    def block(self, element_ty, shape):
        key = element_ty.name, *(s.value if type(s) is core.constexpr else s for s in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = self.__dict__.copy()
        self.__dict__.update(blocks[key])
        self.element_ty = element_ty

    @functools.wraps(make_tensor)
    def tensor(self, handle, type):
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    core.block_type.__init__, core.tensor.__init__ = block, tensor


def _unwrap_quickly(tl) -> None:
    """Most of what is unwrapped is a number."""
    core = tl.core
    unwrap, nested = core._unwrap_if_constexpr, (list, tuple, core.tuple)

    @functools.wraps(unwrap)
    def quickly(o):
        if type(o) is core.constexpr:
            return o.value
        return unwrap(o) if isinstance(o, nested) else o

    core._unwrap_if_constexpr = quickly


def _broadcast_what_differs() -> None:
    """Tensors of one shape, which they share since ``_remember_shapes``, stay as they are."""
    from triton.language.semantic import TritonSemantic

    broadcast = TritonSemantic.broadcast_impl_value

    @functools.wraps(broadcast)
    def differing(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = differing
