"""The pixels of a PNG that a browser wrote: 8 bits, RGB or RGBA, not interlaced."""

from __future__ import annotations

import struct
import zlib
from collections import Counter


def colors(png: bytes) -> Counter[tuple[int, int, int]]:
    """How often each colour is there."""
    width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", png[16:29])
    assert (depth, kind in (2, 6), interlaced) == (8, True, 0)
    size = 3 if kind == 2 else 4
    packed, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            packed += png[at + 8 : at + 8 + length]
        at += length + 12
    raw, found, above = zlib.decompress(packed), Counter[tuple[int, int, int]](), bytearray(width * size)
    for number in range(height):
        start = number * (width * size + 1)
        line = _unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + width * size]), above, size)
        found.update(zip(line[::size], line[1::size], line[2::size], strict=True))
        above = line
    return found


def _unfiltered(method: int, line: bytearray, above: bytearray, size: int) -> bytearray:
    for index in range(len(line)):
        left = line[index - size] if index >= size else 0
        corner = above[index - size] if index >= size else 0
        up = above[index]
        line[index] = (line[index] + (0, left, up, (left + up) // 2, _paeth(left, up, corner))[method]) & 255
    return line


def _paeth(left: int, up: int, corner: int) -> int:
    guess = left + up - corner
    return min((left, up, corner), key=lambda value: abs(guess - value))
