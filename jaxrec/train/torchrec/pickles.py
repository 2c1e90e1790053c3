"""Pickles of PyTorch's files, read without PyTorch and without running their code.

A pickle is a program. This interpreter knows only the instructions that PyTorch's files have, and
makes objects of a few classes. Its memory and time are proportional to the pickle's bytes: what one
instruction makes never depends on the size of what others made.
"""

from __future__ import annotations

import io
import math
import pickle
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from jaxrec.train.checkpoint import CheckpointError

# Largest pickle: a million tensors or shards.
PICKLE_BYTES = 1 << 28

# Largest numbers of axes of a tensor, which is PyTorch's, and of fields of an object.
_AXES = 64
_FIELDS = 16

# Largest product of a tensor's sizes, without those that are 0, which NumPy counts too.
_ELEMENTS = 1 << 59

# Instructions of protocols 2 to 5 that Python's unpickler may run. Left out are those that allocate
# as much as the pickle claims (BYTEARRAY8), make large integers (LONG4), or that PyTorch never
# writes.
_INSTRUCTIONS = (
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET"),
    *("LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1"),
    *("BINFLOAT", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2"),
    *("TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "GLOBAL", "STACK_GLOBAL"),
    *("BINPERSID",),
)

# A short text of any value, for errors.
_short = reprlib.Repr()
_short.maxlevel, _short.maxtuple, _short.maxstring, _short.maxlong = 2, 8, 80, 80
shorten = _short.repr


class Record:
    """An object of a PyTorch class with its fields as attributes; missing fields are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None  # a field that another version of PyTorch does not have


def read_pickle(
    content: bytes, known: Mapping[tuple[str, str], Any], where: str, wanted: str
) -> Any:
    """Return the object of a pickle; raise a CheckpointError if it is damaged or has other classes.

    ``known`` has a function or subclass of `Record`, with results of constant size, by the module
    and name in the pickle; ``where`` and ``wanted`` are for errors.
    """
    if len(content) > PICKLE_BYTES:
        raise CheckpointError(
            f"{where} holds {len(content):,} bytes of names and shapes, more than the "
            f"{PICKLE_BYTES:,} that are read"
        )
    try:
        return _Unpickler(io.BytesIO(content), known, where, wanted).load()
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle raises anything
        problem = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(f"{where} cannot be read as PyTorch's ({problem})") from None


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler with fewer and stricter instructions."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(
        self, file: io.BytesIO, known: Mapping[tuple[str, str], Any], where: str, wanted: str
    ) -> None:
        super().__init__(file)
        self._known, self._where, self._wanted = known, where, wanted

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        # Types of storages and data types, such as `torch.FloatStorage`: a name is all that is
        # needed.
        if module == "torch":
            return name
        raise CheckpointError(
            f"{self._where}: it holds an object of {f'{module}.{name}'[:80]}, which is not read. "
            f"{self._wanted}"
        )

    def persistent_load(self, pid: Any) -> Any:
        return pid  # ("storage", type, key, device, number of elements)

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if type(arguments) is not tuple or len(arguments) > _FIELDS or not callable(function):
            raise ValueError(f"a call of {shorten(function)}")
        self.stack[-1] = function(*arguments)

    def load_newobj(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if arguments != () or not (isinstance(kind, type) and issubclass(kind, Record)):
            raise ValueError(f"an object of {shorten(kind)}")
        self.stack.append(kind())

    def load_build(self) -> None:
        """Set the fields of a record."""
        state = self.stack.pop()
        instance = self.stack[-1]
        if not isinstance(instance, Record | dict):
            raise ValueError(f"state of {shorten(instance)}")
        # An OrderedDict's state is its attributes, which are of no use here.
        if isinstance(instance, Record) and isinstance(state, dict):
            if len(state) > _FIELDS or not all(isinstance(key, str) for key in state):
                raise ValueError(f"{type(instance).__name__} with fields {shorten(state)}")
            vars(instance).update(state)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError(f"items of {shorten(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # A tuple of tuples of tuples, each twice, has a hash that takes exponential time.
            if not all(map(_is_scalar, key if type(key) is tuple else (key,))):
                raise ValueError(f"a key {shorten(key)}")
            target[key] = value

    dispatch: ClassVar[dict[int, Any]] = {
        code: pickle._Unpickler.dispatch[code]
        for code in (getattr(pickle, name)[0] for name in _INSTRUCTIONS)
    } | {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def _is_scalar(key: Any) -> bool:
    return key is None or isinstance(key, str | bytes | int | float | Record)


def torch_size(*arguments: Any) -> tuple[int, ...]:
    """Return the integers of a ``torch.Size``."""
    (numbers,) = arguments or ((),)
    return integers(numbers)


def ignored(*_: Any) -> None:
    """Stand for a function whose result is not used."""


def array_shape(value: Any) -> tuple[int, ...]:
    """Return the shape of a stored tensor; raise a ValueError if no array can have it."""
    if math.prod(filter(None, integers(value))) > _ELEMENTS:
        raise ValueError(f"{shorten(value)} is larger than any tensor")
    return integers(value)


def integers(value: Any) -> tuple[int, ...]:
    """Return a shape, position or strides; raise a ValueError if the value is none of these."""
    if type(value) is not tuple or len(value) > _AXES:
        raise ValueError(f"{shorten(value)} is not the size of a tensor")
    for number in value:
        integer(number)
    return value


def integer(value: Any) -> int:
    """Return a size or position; raise a ValueError if the value is neither."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{shorten(value)} is not a size or a position")
    return value
