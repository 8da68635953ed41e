"""Media are images, sound and other content that is too large for a line. A media file's name is the hash of its bytes.

A file is durable before `put` returns its reference, so no crash leaves a record that names a missing file. Files are
never removed. The bytes may have any format.
"""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

from ..errors import Corrupt, NotATape
from ..pictures import MEDIA_NAME, MediaReference
from ..records import Begin, Call, StepRecord
from ..schema import parse_record
from .disk import REAL, Disk, file_digest, put_file, read_file

_NAME = re.compile(MEDIA_NAME)


class Media:
    """The media files of one run. This class is thread-safe."""

    def __init__(self, folder: Path, *, disk: Disk = REAL) -> None:
        self.folder, self.disk = folder, disk
        self._durable: set[str] = set()

    def put(self, data: bytes, suffix: str = "") -> MediaReference:
        """Store `data` with a suffix such as `.png`. Return the value for a step's `MediaReference` field.

        Blocks until the file would survive a power cut. In an event loop, use `asyncio.to_thread(media.put, …)`.
        """
        name = f"{sha256(data).hexdigest()}{suffix}"
        if not _NAME.fullmatch(name):
            raise ValueError(f"invalid suffix {suffix!r}: write a dot and up to 12 lower-case letters and digits")
        if name not in self._durable:
            self.disk.make_folder(self.folder)
            if self._holds(name):
                # The process that wrote this file may have died before it synced the folder.
                self.disk.sync_dir(self.folder)
            else:
                put_file(self.disk, self.folder / name, data)
            self._durable.add(name)
        return MediaReference(f"media:{name}")

    def _holds(self, name: str) -> bool:
        try:
            return file_digest(self.folder / name, self.disk) == name[:64]
        except FileNotFoundError:
            return False

    def get(self, reference: str) -> bytes:
        """Return the bytes for a reference. Raises Corrupt if the file was changed, and NotATape if the file is
        missing."""
        kind, _, name = reference.partition(":")
        if kind != "media" or not _NAME.fullmatch(name):
            raise ValueError(f"{reference[:90]!r} is not a media reference (media:<64 hex digits><.suffix>)")
        try:
            data = read_file(self.folder / name, self.disk)
        except FileNotFoundError:
            raise NotATape(f"{self.folder / name} is missing, but a record names it; restore it from a copy") from None
        if sha256(data).hexdigest() != name[:64]:
            raise Corrupt(f"{self.folder / name} does not have the bytes of its name; restore the file from a copy")
        return data

    def names(self) -> list[str]:
        """Return the names of the complete media files."""
        try:
            found = self.disk.names(self.folder)
        except FileNotFoundError:
            return []
        return sorted(name for name in found if _NAME.fullmatch(name))


def references(body: bytes) -> set[str]:
    """Return the names of the media files that a record lists in its `media` field. Its text is not searched."""
    if b'"media":' not in body:
        return set()
    try:
        record = parse_record(body)
    except ValueError:  # `verify` and the viewer's transcript report a record that can't be read
        return set()
    return set(record.media) if isinstance(record, Begin | StepRecord | Call) else set()
