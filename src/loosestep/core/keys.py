"""The run key, and keys for one purpose each that follow from it."""

from __future__ import annotations

import hmac


def key_bytes(key: bytes | str | None) -> bytes | None:
    """The run key as bytes; a key too short to be one is an error."""
    if key is None:
        return None
    raw = key.encode() if isinstance(key, str) else bytes(key)
    if len(raw) < 16:
        raise ValueError(
            f"the run key must have at least 16 bytes, got {len(raw)}: use a random one, such as "
            "32 hex digits"
        )
    return raw


def derive(key: bytes, *parts: object) -> bytes:
    """A 32-byte key for one purpose: HMAC-SHA256(key, parts), parts separated by their lengths."""
    mac = hmac.new(key, digestmod="sha256")
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode()
        mac.update(len(raw).to_bytes(4, "little") + raw)
    return mac.digest()
