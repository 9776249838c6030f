"""Encodings of blobs: plain, compressed, encrypted, or both (compressed first).

Encrypted content::

    b"SFE1"  key id (8)  salt (16)  then frames: up to 1 MiB each in AES-256-GCM, which adds 16 bytes to each

The key of one object is HMAC-SHA256(key, salt). A frame's nonce consists of its number and a flag for the last frame,
so that frames cannot be left out, reordered or cut off. The key id distinguishes a wrong key from a damaged object.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import os
from collections.abc import Iterable, Iterator
from typing import Any, Final

import zstandard

from stateflow.errors import CheckpointCorrupt, InvalidArgument, WrongKey
from stateflow.settings import CheckpointSettings

KEY_VARIABLE = "STATEFLOW_CHECKPOINT_KEY"
COMPRESSIONS: Final = ("none", "zstd")
STEP_BYTES = 1 << 20
ZSTD_LEVEL = 1
_ZSTD: Final = ".zst"
_MAGIC: Final = b"SFE1"
_SALT, _TAG, _HEAD = 16, 16, 4 + 8 + 16
_FRAME = 1 << 20


def configured_key() -> bytes | None:
    """Returns the encryption key, 32 bytes from 64 hexadecimal digits; None: none is set. Raises InvalidArgument."""
    text = CheckpointSettings().key.get_secret_value()
    if not text:
        return None
    try:
        key = binascii.unhexlify(text.strip())
    except ValueError:
        key = b""
    if len(key) != 32:
        raise InvalidArgument(
            f"{KEY_VARIABLE} is not a valid key",
            remedy="set it to 64 hexadecimal digits: python -c 'import secrets; print(secrets.token_hex(32))'",
        )
    return key


class Codec:
    """Encodes and decodes blobs and manifests.

    Args:
        compression: ``none`` or ``zstd``.
        key: 32 bytes; None: not encrypted.
    """

    def __init__(self, compression: str = "none", key: bytes | None = None) -> None:
        if compression not in COMPRESSIONS:
            raise InvalidArgument(f"unknown compression {compression!r}", remedy=f"use {' or '.join(COMPRESSIONS)}")
        self._compression = compression
        self._cipher = None if key is None else _Cipher(key)

    @property
    def suffix(self) -> str:
        """Suffix of the names of blobs that this codec writes; empty for plain content."""
        return (_ZSTD if self._compression == "zstd" else "") + (f".{self._cipher.id}" if self._cipher else "")

    def encode(self, content: Iterable[bytes]) -> Iterator[bytes]:
        if self._compression == "zstd":
            content = _compress(content)
        yield from self._cipher.encrypt(content) if self._cipher else content

    def decode(self, content: Iterable[bytes], blob: str) -> Iterator[bytes]:
        """Decodes a blob according to the suffix of its name. Raises WrongKey, or CheckpointCorrupt for content that
        does not decode."""
        _, *how = blob.rpartition("/")[2].split(".")
        encrypted = [part for part in how if len(part) == 16]
        if encrypted:
            content = self._key_for(encrypted[0], blob).decrypt(content, blob)
        yield from _decompress(content, blob) if _ZSTD[1:] in how else content

    @staticmethod
    def is_plain(blob: str) -> bool:
        """Returns whether a blob is stored unencoded."""
        return "." not in blob.rpartition("/")[2]

    def seal(self, data: bytes) -> bytes:
        """Returns a manifest in its stored form: encrypted if there is a key."""
        return b"".join(self._cipher.encrypt([data])) if self._cipher else data

    def unseal(self, data: bytes, place: str) -> bytes:
        if not data.startswith(_MAGIC):
            return data
        return b"".join(self._key_for(data[4:12].hex(), place).decrypt([data], place))

    def _key_for(self, key_id: str, place: str) -> _Cipher:
        if self._cipher is None or self._cipher.id != key_id:
            raise WrongKey(
                "the checkpoint is encrypted with another key" if self._cipher else "the checkpoint is encrypted",
                remedy=f"set {KEY_VARIABLE} to the key it was written with",
                key_id=key_id,
                place=place,
            )
        return self._cipher


def _compress(content: Iterable[bytes]) -> Iterator[bytes]:
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj()
    for data in content:
        yield compressor.compress(data)
    yield compressor.flush()


def _decompress(content: Iterable[bytes], place: str) -> Iterator[bytes]:
    """Decompresses in bounded steps, so that no more is inflated than the caller reads.

    Truncated content yields less data, which readers notice by the digest.
    """
    source: Any = _Source(iter(content))
    reader = zstandard.ZstdDecompressor().stream_reader(source)
    try:
        while data := reader.read(STEP_BYTES):
            yield data
    except zstandard.ZstdError as error:
        raise _damaged(place) from error


class _Source:
    """Presents pieces of content as a file that is read from front to end."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, b""

    def read(self, size: int) -> bytes:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._rest = piece
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


def _damaged(place: str) -> CheckpointCorrupt:
    return CheckpointCorrupt("an object is damaged", remedy="restore an older checkpoint", place=place)


class _Cipher:
    def __init__(self, key: bytes) -> None:
        from cryptography.exceptions import InvalidTag  # takes 50 ms, so only programs that encrypt import it
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aead: Any = AESGCM
        self._invalid = InvalidTag
        self._key = key
        self.id = hashlib.sha256(b"stateflow key id" + key).digest()[:8].hex()

    def _of(self, head: bytes) -> Any:
        return self._aead(hmac.digest(self._key, head[-_SALT:], "sha256"))

    def encrypt(self, content: Iterable[bytes]) -> Iterator[bytes]:
        head = _MAGIC + bytes.fromhex(self.id) + os.urandom(_SALT)
        aead = self._of(head)
        yield head
        for number, (frame, last) in enumerate(_frames(content, _FRAME)):
            yield aead.encrypt(_nonce(number, last), frame, head)

    def decrypt(self, content: Iterable[bytes], place: str) -> Iterator[bytes]:
        pieces = iter(content)
        start = b""
        while len(start) < _HEAD:
            piece = next(pieces, b"")
            if not piece:
                raise _damaged(place)
            start += piece
        head, rest = start[:_HEAD], start[_HEAD:]
        if head[:12] != _MAGIC + bytes.fromhex(self.id):
            raise _damaged(place)
        aead = self._of(head)

        def behind() -> Iterator[bytes]:
            yield rest
            yield from pieces

        for number, (frame, last) in enumerate(_frames(behind(), _FRAME + _TAG)):
            try:
                yield aead.decrypt(_nonce(number, last), frame, head)
            except (self._invalid, ValueError) as error:
                raise _damaged(place) from error


def _nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([last])


def _frames(content: Iterable[bytes], size: int) -> Iterator[tuple[bytes, bool]]:
    """Yields (piece, whether it is the last). Pieces have ``size`` bytes; the last may be shorter.

    There is at least one piece, which may be empty.
    """
    buffer = bytearray()
    for data in content:
        buffer += data
        while len(buffer) > size:
            yield bytes(buffer[:size]), False
            del buffer[:size]
    yield bytes(buffer), True
