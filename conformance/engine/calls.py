"""A call as a tree of leaves, and the same call laid into guarded memory on a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

ZONE_MIN_BYTES = 1024
"""Smallest red zone before and behind every allocation."""

ZONE_MAX_BYTES = 64 * 1024
"""Largest red zone: two rows of the widest tensor, up to this."""

BASE_ALIGNMENT_BYTES = 256
"""Alignment of an aligned base, that of PyTorch's CUDA allocator rounded down."""


def walk(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a tree that is not a container, with its path.

    Containers are dicts (at the root only), lists, tuples, NamedTuples and objects that carry
    tensors as attributes (dataclasses and the like).
    """
    if isinstance(tree, Tensor) or _is_plain(tree):
        yield path, tree
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield from walk(value, f"{path}.{name}" if path else str(name))
    elif isinstance(tree, (list, tuple)):
        names = getattr(tree, "_fields", None)
        for index, value in enumerate(tree):
            yield from walk(value, f"{path}.{names[index]}" if names else f"{path}[{index}]")
    else:
        for name, value in attributes(tree).items():
            yield from walk(value, f"{path}.{name}")


def leaves(tree: Any, path: str = "") -> dict[str, Tensor]:
    """The tensors of a tree by path: `states[3]`, `steps[0].page_table_1`, `return[1]`."""
    return {where: value for where, value in walk(tree, path) if isinstance(value, Tensor)}


def scalars(tree: Any, path: str = "") -> dict[str, Any]:
    """What is not a tensor, by path."""
    return {where: value for where, value in walk(tree, path) if not isinstance(value, Tensor)}


def replace(tree: Any, change: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """The same tree with every tensor replaced by `change(path, tensor)`."""
    if isinstance(tree, Tensor):
        return change(path, tree)
    if _is_plain(tree):
        return tree
    if isinstance(tree, dict):
        return {
            name: replace(value, change, f"{path}.{name}" if path else str(name))
            for name, value in tree.items()
        }
    if isinstance(tree, (list, tuple)):
        names = getattr(tree, "_fields", None)
        values = [
            replace(value, change, f"{path}.{names[index]}" if names else f"{path}[{index}]")
            for index, value in enumerate(tree)
        ]
        if isinstance(tree, list):
            return values
        return type(tree)(*values) if names else tuple(values)
    fresh = copy.copy(tree)
    for name, value in attributes(tree).items():
        object.__setattr__(fresh, name, replace(value, change, f"{path}.{name}"))
    return fresh


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype))


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object of a call, by name; TypeError for what has none."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "__dict__"):
        return dict(vars(value))
    raise TypeError(f"a call cannot hold a {type(value).__name__}: {value!r}")


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type through which elements of a size are copied and compared, bit for bit."""


def patterns(tensor: Tensor) -> Tensor:
    """The same memory as integers; 16 bytes are two elements of 8, in a dimension of their own."""
    if tensor.element_size() > 8:
        tensor = torch.view_as_real(tensor)
    return tensor.view(BITS[tensor.element_size()])


@dataclass(frozen=True)
class Poison:
    """What fills the memory that a call must neither read nor write.

    Parameters
    ----------
    name : str
    patterns : mapping of torch.dtype to int
        Bit pattern of one element, for floating-point types.
    integer : int
        Value for integer types: small and valid, so that an index that was read outside does not
        crash but gives another result.
    byte : int
        Value for uint8.
    """

    name: str
    patterns: Mapping[torch.dtype, int]
    integer: int
    byte: int

    def fill(self, memory: Tensor, dtype: torch.dtype) -> None:
        """Fill 1-D uint8 memory with elements of `dtype`; a last partial element becomes 0."""
        if dtype.is_complex:
            dtype = dtype.to_real()
        typed = _typed(memory, dtype)
        memory[typed.numel() * dtype.itemsize :] = 0
        if dtype.is_floating_point:
            _bit_fill(typed, self.patterns[dtype])
        else:
            typed.fill_(self.byte if dtype is torch.uint8 else self.integer)


POISONS = (
    Poison(
        "nan",
        {
            torch.float64: 0x7FF8DEADDEADDEAD,
            torch.float32: 0x7FC0DEAD,
            torch.bfloat16: 0x7FDE,
            torch.float16: 0x7EDE,
            torch.float8_e4m3fn: 0x7F,
            torch.float8_e5m2: 0x7F,
            # Of these 0x80 is the only NaN, and there are no infinities.
            torch.float8_e4m3fnuz: 0x80,
            torch.float8_e5m2fnuz: 0x80,
            torch.float8_e8m0fnu: 0xFF,
        },
        integer=0,
        byte=0x5A,
    ),
    Poison(
        "inf",
        {
            torch.float64: 0x7FF0000000000000,
            torch.float32: 0x7F800000,
            torch.bfloat16: 0x7F80,
            torch.float16: 0x7C00,
            torch.float8_e4m3fn: 0x7E,
            torch.float8_e5m2: 0x7C,
            torch.float8_e4m3fnuz: 0x7F,
            torch.float8_e5m2fnuz: 0x7F,
            torch.float8_e8m0fnu: 0xFE,
        },
        integer=1,
        byte=0xA5,
    ),
)
"""Two different fills: a stray write equal to one is seen in the other, and a value read from
outside shows as a result that differs between them."""

FILLS = (0xFF, 0x5A)
"""Two different bytes for what an op writes and never reads; 0xFF makes NaN of every float."""

SPARSE_BYTES = 1 << 29
"""A storage this large whose rows leave gaps is not filled: only its red zones are watched, so
that strides past 2^31 need no memory beside the rows that are touched."""


def _typed(memory: Tensor, dtype: torch.dtype) -> Tensor:
    return memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _bit_fill(view: Tensor, pattern: int) -> None:
    width = 8 * min(8, view.element_size())
    if width > 8 and pattern >> (width - 1):
        pattern -= 1 << width
    patterns(view).fill_(pattern)


def byte_fill(view: Tensor, byte: int) -> None:
    """Set every byte of a tensor; a bool becomes the byte's top bit."""
    if not view.numel():
        return
    if view.dtype is torch.bool:
        view.fill_(bool(byte & 0x80))
    else:
        size = min(8, view.element_size())
        _bit_fill(view, int.from_bytes(bytes([byte]) * size, "little"))


def copy_bits(target: Tensor, source: Tensor) -> None:
    """Copy bit patterns; an expanded dimension (stride 0) is copied once."""
    for dim in range(target.dim()):
        if target.stride(dim) == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    if target.numel():
        patterns(target).copy_(patterns(source))


@dataclass(frozen=True)
class Leaf:
    """Where one tensor stands inside its storage."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Bytes from the start of the storage's used part."""

    def view(self, memory: Tensor, start: int) -> Tensor:
        """This tensor over uint8 memory whose used part begins at byte `start`."""
        typed = _typed(memory, self.dtype)
        return typed.as_strided(self.shape, self.stride, (start + self.offset) // typed.itemsize)


@dataclass(frozen=True)
class Storage:
    """Tensors that share memory, and the part of it that they use."""

    leaves: tuple[Leaf, ...]
    size: int
    """Bytes from the first byte that a tensor uses to the last."""
    align: int
    """Where the used part starts within 16 bytes."""
    dtype: torch.dtype
    """The widest of the tensors' types."""
    dense: bool
    """Whether one tensor covers every byte, so that there is nothing between rows."""

    @property
    def sparse(self) -> bool:
        """Whether the gaps are too large to be filled and watched."""
        return not self.dense and self.size > SPARSE_BYTES

    @property
    def names(self) -> str:
        """The tensors' paths, for messages."""
        return ", ".join(leaf.path for leaf in self.leaves)


def geometry(tree: Any) -> list[Storage]:
    """Shapes, strides, offsets and shared storage of a call's tensors, comparable with `==`."""
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for path, tensor in leaves(tree).items():
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append((path, tensor))
    storages = []
    for members in by_storage.values():
        spans = []
        for _, tensor in members:
            start = int(tensor.storage_offset()) * tensor.element_size()
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            length = (last + 1) * tensor.element_size() if tensor.numel() else 0
            spans.append((start, start + length))
        low = min(start for start, _ in spans)
        size = max(end for _, end in spans) - low
        first = members[0][1]
        covered = first.numel() * first.element_size()
        storages.append(
            Storage(
                leaves=tuple(
                    Leaf(path, t.dtype, tuple(t.shape), tuple(t.stride()), start - low)
                    for (path, t), (start, _) in zip(members, spans, strict=True)
                ),
                size=size,
                align=low % 16,
                dtype=max((t.dtype for _, t in members), key=lambda kind: kind.itemsize),
                dense=len(members) == 1 and covered == size,
            )
        )
    return storages


@dataclass
class _Block:
    """One storage of the call inside a larger allocation."""

    storage: Storage
    memory: Tensor
    start: int
    pristine: list[Tensor] = dataclasses.field(default_factory=list)

    def outside(self) -> list[Tensor]:
        """Copies of what must not change: before, behind, and between the rows."""
        end = self.start + self.storage.size
        parts = [self.memory[: self.start].clone(), self.memory[end:].clone()]
        if not self.storage.dense and not self.storage.sparse:
            lead = self.start % 16
            inner = self.memory[self.start - lead : end].clone()
            for leaf in self.storage.leaves:
                byte_fill(leaf.view(inner, lead), 0)
            parts.append(inner[lead:])
        return parts


class Placement:
    """One call's tensors in memory of their own on a device, with red zones around them.

    Every storage of the call becomes a larger poisoned allocation; its tensors become views into
    the middle, with the strides that they had. What lies before, behind and between their rows
    must never change.

    Parameters
    ----------
    call : dict
        Arguments by name, as a builder makes them.
    device : torch.device
    poison : Poison
    shifted : bool
        False: bases stand where the builder's did relative to 16 bytes. True: one element
        further, so that a base is aligned to its element only.
    guarded : bool
        False: no red zones (for the oracle's own copy).

    Attributes
    ----------
    args : dict
        The call on the device.
    views : dict of str to Tensor
        Its tensors by path; an implementation that puts other tensors into a container of `args`
        does not change these.
    """

    def __init__(
        self,
        call: Mapping[str, Any],
        device: torch.device,
        poison: Poison = POISONS[0],
        *,
        shifted: bool = False,
        guarded: bool = True,
    ) -> None:
        self.poison = poison
        self.guarded = guarded
        self._blocks: list[_Block] = []
        self.views: dict[str, Tensor] = {}
        for storage in geometry(call):
            zone = _zone_bytes(storage) if guarded else 0
            size = 2 * zone + storage.size + BASE_ALIGNMENT_BYTES + 2 * storage.dtype.itemsize
            memory = torch.empty(size, dtype=torch.uint8, device=device)
            start = zone + -(memory.data_ptr() + zone) % BASE_ALIGNMENT_BYTES + storage.align
            if shifted:
                start += storage.dtype.itemsize
            self._blocks.append(_Block(storage, memory, start))
            for leaf in storage.leaves:
                self.views[leaf.path] = leaf.view(memory, start)
        self.args: dict[str, Any] = self.laid(call)
        self.load(call)

    def laid(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call of the same geometry, its scalars included, in this memory."""
        arguments: dict[str, Any] = replace(call, lambda path, _: self.views[path])
        return arguments

    def load(self, call: Mapping[str, Any]) -> None:
        """Poison everything again and copy in the content of a call of the same geometry."""
        for block in self._blocks if self.guarded else ():
            if block.storage.sparse:
                self.poison.fill(block.memory[: block.start], torch.uint8)
                self.poison.fill(block.memory[block.start + block.storage.size :], torch.uint8)
            else:
                self.poison.fill(block.memory, block.storage.dtype)
        for path, tensor in leaves(call).items():
            copy_bits(self.views[path], tensor)
        for block in self._blocks if self.guarded else ():
            block.pristine = block.outside()

    def strays(self) -> list[str]:
        """One line for each place outside the tensors where a byte changed."""
        found = []
        for block in self._blocks:
            places = ("before", "behind", "between the rows of")
            for kind, was, now in zip(places, block.pristine, block.outside(), strict=False):
                if torch.equal(was, now):
                    continue
                changed = (was != now).nonzero().flatten()
                at = int(changed[-1]) if kind == "before" else int(changed[0])
                distance = block.start - at if kind == "before" else at
                found.append(
                    f"{changed.numel()} bytes were written {kind} {block.storage.names} (poison "
                    f"{self.poison.name!r}): the nearest {distance} bytes "
                    + ("before its start" if kind == "before" else "")
                    + ("behind its end" if kind == "behind" else "")
                    + ("from its start" if kind.startswith("between") else "")
                    + f", 0x{int(was[at]):02x} became 0x{int(now[at]):02x}"
                )
        return found

    def extents(self) -> list[tuple[int, int, int, int, str]]:
        """(allocation start, its end, first byte used, end of use, tensor paths) per storage."""
        return [
            (
                block.memory.data_ptr(),
                block.memory.data_ptr() + block.memory.numel(),
                block.memory.data_ptr() + block.start,
                block.memory.data_ptr() + block.start + block.storage.size,
                block.storage.names,
            )
            for block in self._blocks
        ]


def _zone_bytes(storage: Storage) -> int:
    """Two rows of the widest tensor, within limits, in whole alignments."""
    rows = [
        max(leaf.stride[:-1]) * leaf.dtype.itemsize
        for leaf in storage.leaves
        if len(leaf.shape) > 1
    ]
    zone = min(ZONE_MAX_BYTES, max(ZONE_MIN_BYTES, 2 * max(rows, default=0)))
    return -(-zone // BASE_ALIGNMENT_BYTES) * BASE_ALIGNMENT_BYTES


def clone(call: Mapping[str, Any], device: torch.device | None = None) -> dict[str, Any]:
    """A copy of a call, same geometry and shared storage, in memory of its own."""
    if device is None:
        device = next((tensor.device for tensor in leaves(call).values()), torch.device("cpu"))
    return Placement(call, device, guarded=False).args


def filled(call: Mapping[str, Any], paths: set[str], byte: int) -> dict[str, Any]:
    """A copy of a call in which every byte of some leaves is `byte` (bools: its top bit)."""
    copied = clone(call)
    for path, tensor in leaves(copied).items():
        if path in paths:
            byte_fill(tensor, byte)
    return copied


GROWTHS = 3
"""How often a spread grows from tensor to tensor before it begins again: memory grows with it."""


def restride(
    call: Mapping[str, Any], strides: Mapping[str, str], pad: int, growth: int = 0
) -> dict[str, Any]:
    """The same call with the tensors named in `strides` spread out as far as each may be.

    Parameters
    ----------
    strides : mapping of str to str
        Path to "outer" (dimension 0 alone), "rows" (all but the last) or "any" (all).
    pad : int
        Elements added to each row, and to whatever each further free dimension counts: no stride
        then follows from another. With "any", neighbours in the last dimension also stand
        `pad + 1` elements apart. Tensors that share storage are left alone.
    growth : int
        What is added to `pad` from one tensor to the next, `GROWTHS` times: strides of one tensor
        do not fit another then.
    """
    shared = {
        leaf.path
        for storage in geometry(call)
        if len(storage.leaves) > 1
        for leaf in storage.leaves
    }

    number = count()

    def change(path: str, tensor: Tensor) -> Tensor:
        kind = strides.get(path)
        if kind is None or path in shared or 0 in tensor.stride() or not tensor.numel():
            return tensor
        # The last dimension of a vector is its first, too.
        apart = kind == "any" or (kind == "outer" and tensor.dim() == 1)
        if tensor.dim() < 2 and not apart:
            return tensor
        own = pad + growth * (next(number) % (GROWTHS + 1))
        spread = [own + 1 if apart else 1]
        for dim in range(tensor.dim() - 1, 0, -1):
            free = kind != "outer" or dim == 1
            spread.append(spread[-1] * tensor.shape[dim] + (own if free else 0))
        stride = tuple(reversed(spread))
        room = torch.zeros(
            1 + sum((n - 1) * s for n, s in zip(tensor.shape, stride, strict=True)),
            dtype=tensor.dtype,
            device=tensor.device,
        )
        view = room.as_strided(tensor.shape, stride)
        copy_bits(view, tensor)
        return view

    return replace(call, change)
