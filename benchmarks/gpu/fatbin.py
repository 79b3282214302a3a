"""Erase device code that one kind of GPU does not need from a CUDA shared object.

The CUDA runtime finds device code in the section ``.nv_fatbin``: containers, each with entries for one architecture
(an ELF image or PTX). Erased images become zeros, which compress to nothing. Headers stay, so the object loads as
before, and lazy loading never reads an image of another architecture.
"""

import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = 0xBA55ED50
PTX, ELF = 1, 2
CONTAINER, ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQ")
ARCHITECTURE = 28
"""Offset of an entry's architecture, 90 for sm_90, in its header."""
KERNEL = re.compile(rb"_ZN7cutlass13device_kernel\w{0,3000}")
"""Mangled name of a CUTLASS kernel, which FlashAttention 3 instantiates once per image."""
SHAPE = re.compile(r"cute::tuple<cute::C<\d+>, cute::C<\d+>, cute::C<(\d+)> ?>, (\d+), cutlass::(\w+), float, ")
"""Head size of keys, head size of values and dtype in the demangled name."""


class Image(NamedTuple):
    """Device code for one architecture: its kind (PTX or ELF), architecture, offset and length in the section."""

    kind: int
    architecture: int
    offset: int
    length: int


def erase_other_code(
    path: Path, architecture: int, dtype: str | None = None, head_sizes: tuple[int, ...] = ()
) -> tuple[int, int]:
    """Erase, in place, images that a GPU does not need, and return the bytes of images kept and erased.

    Args:
        path: the shared object.
        architecture: 90 for sm_90.
        dtype: of FlashAttention 3's kernels, also erase those of other dtypes, e.g. "bfloat16_t"; None keeps all.
        head_sizes: and those of other head sizes.

    Raises:
        ValueError: the object has no device code.
    """
    content = bytearray(path.read_bytes())
    start, length = device_code(path)
    section = memoryview(content)[start : start + length]
    kept_bytes = erased_bytes = 0
    for images in containers(section):
        has_elf = any((image.kind, image.architecture) == (ELF, architecture) for image in images)
        for image in images:
            code = section[image.offset : image.offset + image.length]
            needed = image.architecture == architecture and (image.kind == ELF or not has_elf)
            if needed and dtype:
                needed = is_attention_of(bytes(code), dtype, head_sizes)
            if needed:
                kept_bytes += image.length
            else:
                code[:] = bytes(image.length)
                erased_bytes += image.length
    path.write_bytes(content)
    return kept_bytes, erased_bytes


def device_code(path: Path) -> tuple[int, int]:
    """Return the offset and length of the section ``.nv_fatbin`` in a shared object."""
    table = subprocess.run(["readelf", "-SW", path], capture_output=True, text=True, check=True).stdout
    match = re.search(r"\.nv_fatbin\s+\S+\s+\S+\s+(\S+)\s+(\S+)", table)
    if match is None:
        raise ValueError(f"{path} has no device code")
    return int(match[1], 16), int(match[2], 16)


def containers(section: memoryview) -> Iterator[list[Image]]:
    """Yield the images of each container of a section."""
    offset = 0
    while offset + CONTAINER.size <= len(section):
        magic, _, header, size = CONTAINER.unpack_from(section, offset)
        if magic != MAGIC:  # padding between containers
            offset += 8
            continue
        images, entry, end = [], offset + header, offset + header + size
        while entry < end:
            kind, _, entry_header, length = ENTRY.unpack_from(section, entry)
            (architecture,) = struct.unpack_from("<I", section, entry + ARCHITECTURE)
            images.append(Image(kind, architecture, entry + entry_header, length))
            entry += entry_header + length
        yield images
        offset = end


def is_attention_of(image: bytes, dtype: str, head_sizes: tuple[int, ...]) -> bool:
    """Return True unless an image's kernel is FlashAttention 3 of another dtype or head size."""
    names = KERNEL.findall(image)
    if not names:
        return True
    shortest = min(names, key=len).decode()
    demangled = subprocess.run(["c++filt"], input=shortest, capture_output=True, text=True, check=True).stdout
    shape = SHAPE.search(demangled)
    if shape is None:
        return True
    key_size, value_size, element = shape.groups()
    return key_size == value_size and int(key_size) in head_sizes and element == dtype
