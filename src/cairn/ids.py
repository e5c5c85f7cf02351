"""Names that never repeat, and digests that name content."""

from __future__ import annotations

import hashlib
import uuid


def new_id() -> str:
    """A random id: of a job, of a run, of a write whose outcome may have to be settled."""
    return uuid.uuid4().hex


def content_id(data: bytes) -> str:
    """The name of one piece of content: the digest of its bytes alone."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest(*parts: bytes) -> str:
    """The name of some content: equal bytes have equal names, others do not."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()
