"""Prefixes on their way to the disk, over a folder that fails."""

import sqlite3
from types import SimpleNamespace
from unittest.mock import Mock

from vllm_metal_lite.prefix_disk.parts import Part
from vllm_metal_lite.prefix_disk.writer import Writer


def test_the_rest_of_a_prefix_that_cannot_be_kept_is_left_out():
    written, warnings = [], []
    errors = [sqlite3.OperationalError("locked")] * 2  # of a refresh, and of a prefix

    def refresh():
        if errors:
            raise errors.pop()

    def write(files):
        written.extend(key for key, _ in files)
        return sum(len(data) for key, data in files if key != b"d")  # has no room

    folder = SimpleNamespace(known=(), unreadable=(b"h",), refresh=refresh, write=write)
    folder.use, folder.warn = Mock(), warnings.append
    store = SimpleNamespace(read=lambda group, place: b"rows")
    parts = SimpleNamespace(
        kv=SimpleNamespace(block_size=16),
        min_tokens=16,
        of=lambda names: [Part(name, 0, name, 16 << 20) for name in names],
        place_of=lambda part: 0,
    )
    writer = Writer(folder, parts, store)
    writer.add([b"a", b"b", b"c"])
    writer.add([b"d", b"e", b"f"])
    writer.add([b"g", b"h", b"i"])
    while writer.waiting:
        writer.flush()
        writer.copy()
    writer.flush()
    assert written == [b"d", b"g", b"i"]
    assert warnings == ["cannot write: locked"] * 2
