"""Read CIFAR's pickles. They may build numpy arrays and plain values, and take memory in proportion to the file."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

from tbbn.errors import UserError

_MAX_ARRAYS = 16
_MAX_COPIED = 4  # times the file's size: a pickle may ask for copies of what it holds, again and again
_FORBIDDEN = {"PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "NEXT_BUFFER"}
_NDARRAY = object()  # the class may be named, but not called: it would allocate any shape


def unpickle(content: bytes) -> Any:
    """The value in a pickle; `UserError` says what it asks for and must not have."""
    _check_opcodes(content)
    return _ArrayUnpickler(content).load()


def _check_opcodes(content: bytes) -> None:
    """Parse without executing: the lengths of all values are checked, and no memo entry lies far beyond the others."""
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name in _FORBIDDEN:
            raise UserError(f"it has the opcode {opcode.name}; only numpy arrays and plain values are allowed")
        if "PUT" in opcode.name and cast(int, argument) > number:
            raise UserError(f"it has a memo entry {argument} after {number} opcodes")


class _ArrayUnpickler(pickle.Unpickler):
    """Finds what pickles of arrays and plain values refer to, whichever numpy and Python wrote them."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self.n_arrays, self.n_left = 0, _MAX_COPIED * len(content) + 2**16
        allowed: dict[tuple[str, str], Any] = {
            ("numpy", "ndarray"): _NDARRAY,
            ("numpy", "dtype"): _dtype,
            ("_codecs", "encode"): self._limited(lambda text, encoding: text.encode(encoding)),
            ("collections", "OrderedDict"): lambda: OrderedDict(),
        }
        for core in ("core", "_core"):
            allowed[f"numpy.{core}.multiarray", "_reconstruct"] = self._array
            allowed[f"numpy.{core}.multiarray", "scalar"] = self._limited(_scalar)
            allowed[f"numpy.{core}.numeric", "_frombuffer"] = _from_buffer
        for builtins in ("builtins", "__builtin__"):
            allowed[builtins, "bytes"] = lambda: b""  # others are written as text
            allowed[builtins, "bytearray"] = self._limited(_bytearray)
            allowed[builtins, "list"] = self._limited(lambda items=(): list(items))
            allowed[builtins, "set"] = self._limited(lambda items=(): set(items))
        self.allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.allowed:
            raise UserError(f"it asks for {module}.{name}; only numpy arrays and plain values are allowed")
        return self.allowed[module, name]

    def _limited(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Count the size of what is made against what is left."""

        def made(*arguments: Any) -> Any:
            self.n_left -= sum(len(argument) for argument in arguments if hasattr(argument, "__len__")) + 8
            if self.n_left < 0:
                raise UserError(f"it copies more than {_MAX_COPIED} times its size")
            return make(*arguments)

        return made

    def _array(self, kind: Any, shape: Any, dtype: Any) -> Any:
        """An empty array, whose shape and bytes follow in the pickle."""
        import numpy

        self.n_arrays += 1
        if self.n_arrays > _MAX_ARRAYS:
            raise UserError(f"it has more than {_MAX_ARRAYS} arrays")
        return numpy.empty(0)


def _dtype(*arguments: Any) -> Any:
    import numpy

    return numpy.dtype(*arguments)


def _scalar(dtype: Any, content: Any) -> Any:
    import numpy

    content = content.encode("latin1") if isinstance(content, str) else content
    return numpy.frombuffer(content, dtype=dtype)[0]


def _from_buffer(content: Any, dtype: Any, shape: Any, order: Any) -> Any:
    import numpy

    return numpy.frombuffer(content, dtype=dtype).reshape(shape, order=order)


def _bytearray(content: Any = b"", encoding: str = "latin1") -> bytearray:
    return bytearray(content.encode(encoding) if isinstance(content, str) else bytes(memoryview(content)))
