"""One file of a header and raw tensors, every byte of it under a checksum.

offset  bytes
0       8       89 4E 48 57 43 0D 0A 1A: "NHWC" guarded against text modes and truncation
8       4       version of the container, little endian, as all numbers here
12      8       length of the header
20      8       length of the whole file
28      32      SHA-256 of bytes 0 to 28 and of the header
60      ...     header: JSON, UTF-8
...             tensors, each at a multiple of 64, in the order and sizes the header lists
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..errors import FileError, InputError, NhwcError, is_out_of_memory
from ..formats import CHANNELS_LAST_OF, Format, format_of, strides_of, to_format
from ..machine.disk import open_file, put_file, why_not
from ..machine.documents import no_constant
from ..machine.host_memory import from_file, raw
from ..optimized.recipes import order_of
from ..shown import shown

MAGIC = b"\x89NHWC\r\n\x1a"
VERSION = 2
"""Since 2 a tensor may say in which order its dimensions lie; a file of none that does is of 1."""

_FIXED = struct.Struct("<8sIQQ")
_ALIGN = 64
_PIECE = 1 << 20
_DIMENSIONS = 64
_TENSORS = 100_000

_HEADER = 1 << 26
"""The most bytes of a header; that of a graph of thousands of steps takes a megabyte."""

Data = bytes | mmap.mmap

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8,
        torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.bool,
        torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn,
        torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    )
}  # fmt: skip


def write(path: Path, header: dict[str, Any], tensors: Sequence[Tensor]) -> None:
    """Write a header of plain values, and tensors, to a file that is there whole or not at all."""
    entries = [_entry(tensor) for tensor in tensors]
    text = json.dumps({**header, "tensors": entries}, allow_nan=False).encode()
    gaps, end = [], _FIXED.size + 32 + len(text)
    for tensor in tensors:
        gaps.append(b"\0" * (-end % _ALIGN))
        end += len(gaps[-1]) + tensor.nbytes
    version = VERSION if any("order" in entry for entry in entries) else 1
    fixed = _FIXED.pack(MAGIC, version, len(text), end)
    digest = hashlib.sha256(fixed + text).digest()
    # Tensors are made dense one after the other: all at once would be the model a second time.
    dense = (_stored(tensor)[0] for tensor in tensors)
    body = (part for gap, tensor in zip(gaps, dense, strict=True) for part in (gap, raw(tensor)))
    try:
        put_file(path, itertools.chain((fixed, digest, text), body))
    except (OSError, ValueError) as error:
        raise FileError(f"cannot write {path}: {why_not(error)}.") from error


def read(path: Path) -> tuple[dict[str, Any], list[Tensor]]:
    """Read what `write` wrote; anything else, and anything damaged, raises FileError.

    Large tensors lie in a copy of the file, and take memory once they are used. It is a copy
    because the file itself may be replaced or cut meanwhile.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            header, head = _header(path, file, size)
            # Only a file whose header is true is copied.
            file.seek(0)
            mapped = from_file(iter(lambda: file.read(_PIECE), b""), size)
        data: Data = mapped or path.read_bytes()
    except FileError:
        raise
    except (OSError, ValueError) as error:
        raise FileError(f"cannot read {path}: {why_not(error)}.") from error
    if data[: len(head)] != head:
        raise damaged(path, "it changed while it was read")
    try:
        return header, _tensors(path, data, header["tensors"], len(head))
    except NhwcError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise damaged(path, f"its list of tensors makes no sense ({shown(error)})") from error


def damaged(path: Path, why: str) -> FileError:
    return FileError(f"{path} is damaged: {why}. Save the model again, or copy the file again.")


def is_saved(path: str | Path) -> bool:
    """Whether a file begins as saved models do."""
    try:
        with open_file(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False


def _header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], bytes]:
    """The header, and the bytes up to its end."""
    start = _FIXED.size + 32
    head = file.read(start)
    if head[: len(MAGIC)] != MAGIC:
        raise FileError(
            f"{path} is no model saved by nhwc: it begins with {head[:8].hex(' ') or 'nothing'}. "
            "Write one with nhwc.save(model, path)."
        )
    if len(head) < start:
        raise damaged(path, f"it ends after {len(head)} bytes, within its first {start}")
    _, version, length, total = _FIXED.unpack_from(head)
    if version > VERSION:
        raise FileError(
            f"{path} is of version {version}; this nhwc reads up to {VERSION}. "
            "Load it with a newer nhwc."
        )
    if size != total:
        raise damaged(path, f"it has {size} bytes where its header says {total}")
    if length > _HEADER:
        raise damaged(path, f"its header of {length} bytes is longer than {_HEADER}")
    text = file.read(length)
    if hashlib.sha256(head[: _FIXED.size] + text).digest() != head[_FIXED.size :]:
        raise damaged(path, "its header does not match its checksum")
    try:
        header = json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header is no JSON ({shown(error)})") from error
    if not isinstance(header, dict):
        raise damaged(path, "its header is no mapping")
    return header, head + text


def _shape(entry: dict[str, Any]) -> tuple[int, ...]:
    shape = entry["shape"]
    if not isinstance(shape, list) or len(shape) > _DIMENSIONS:
        raise ValueError(f"the shape {str(shape)[:40]}")
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
        raise ValueError(f"the shape {str(shape)[:40]}")
    return tuple(shape)


def _tensors(path: Path, data: Data, entries: Any, place: int) -> list[Tensor]:
    if len(entries) > _TENSORS:
        raise ValueError(f"{len(entries)} tensors, of which there may be {_TENSORS}")
    found = []
    for number, entry in enumerate(entries):
        shape = _shape(entry)
        dtype = DTYPES[entry["dtype"]]
        size = math.prod(shape) * dtype.itemsize
        end = place + -place % _ALIGN
        # The gaps carry nothing, yet a flipped bit in them is a sign of a bad copy.
        if any(data[place:end]):
            raise damaged(path, f"there is something between tensors {number - 1} and {number}")
        with memoryview(data)[end : end + size] as blob:
            if len(blob) != size or zlib.crc32(blob) != entry["crc32"]:
                raise damaged(path, f"tensor {number} does not match its checksum")
        flat = torch.empty(0, dtype=dtype)
        if size and isinstance(data, bytes):
            flat = torch.frombuffer(bytearray(data[end : end + size]), dtype=dtype).clone()
        elif size:
            flat = torch.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=end)
        found.append(_restored(flat, shape, Format(entry["format"]), entry.get("order", [])))
        place = end + size
    if place != len(data):
        raise damaged(path, f"{len(data) - place} bytes follow its last tensor")
    return found


def _entry(tensor: Tensor) -> dict[str, Any]:
    """The header's entry for a tensor."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise InputError(
            f"the model cannot be saved: it holds a tensor of {name}, which a file cannot. Convert "
            "it to a type of whole bytes, or keep the model as code and weights."
        )
    if tensor.dim() > _DIMENSIONS:
        raise InputError(
            f"the model cannot be saved: it holds a tensor of {tensor.dim()} dimensions; a file "
            f"holds up to {_DIMENSIONS}. Give it fewer, or keep the model as code and weights."
        )
    dense, format = _stored(tensor)
    order = {} if dense.is_contiguous() or format.is_last else {"order": [*order_of(dense)]}
    return {
        "shape": list(tensor.shape),
        "dtype": name,
        "format": str(format),
        "crc32": zlib.crc32(raw(dense)),
        **order,
    }


def _stored(tensor: Tensor) -> tuple[Tensor, Format]:
    """The tensor dense in memory, and its format: what has gaps or overlaps turns contiguous."""
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    last = CHANNELS_LAST_OF.get(tensor.ndim)
    kept = last if last and _says(tensor, last) else Format.CONTIGUOUS
    if kept is Format.CONTIGUOUS and order_of(tensor):
        return tensor, kept
    return to_format(tensor, kept), kept


def _says(tensor: Tensor, last: Format) -> bool:
    """Whether it lies so; of one channel or one pixel torch goes by what the strides say."""
    found = format_of(tensor)
    told = strides_of(tensor.shape, last)
    return found is last or (
        found is Format.AMBIGUOUS
        and tensor.stride() == told != strides_of(tensor.shape, Format.CONTIGUOUS)
    )


def _restored(flat: Tensor, shape: tuple[int, ...], format: Format, order: list[int]) -> Tensor:
    if order:
        if format is not Format.CONTIGUOUS or sorted(order) != [*range(len(shape))]:
            raise ValueError(f"{len(shape)} dimensions and the order {str(order)[:40]}")
        back = sorted(range(len(order)), key=order.__getitem__)
        return flat.view([shape[place] for place in order]).permute(back)
    if format is Format.CONTIGUOUS or not flat.numel():
        return flat.view(shape)
    if CHANNELS_LAST_OF.get(len(shape)) is not format:
        raise ValueError(f"{len(shape)} dimensions and {format}")
    outer, channels, *inner = shape
    return flat.view(outer, *inner, channels).movedim(-1, 1)
