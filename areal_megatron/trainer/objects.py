"""Object collectives of torch that take nothing from strangers.

megatron-core shares Python objects between ranks when it makes optimizers and loads checkpoints, by torch's object
collectives, and these unpickle what they receive: whoever joins the process group runs code on every rank. Nothing in
torch or gloo asks him who he is, so the pickles are signed. Our own code shares bytes (Parallel.share, gather).
"""

from __future__ import annotations

import hmac
import pickle
from typing import Any, BinaryIO

_TAG_BYTES = 32


class StrangerError(RuntimeError):
    """An object came from a process without the run's keys."""


def signing(key: bytes) -> tuple[type, type]:
    """Returns a pickler that signs with the key, and an unpickler that raises StrangerError without such a signature;
    both as torch's object collectives use them."""

    def tag(data: bytes) -> bytes:
        return hmac.digest(key, b"torch object" + data, "sha256")

    class SigningPickler:
        def __init__(self, file: BinaryIO):
            self._file = file

        def dump(self, value: Any) -> None:
            data = pickle.dumps(value)
            self._file.write(tag(data) + data)

    class SignedUnpickler:
        def __init__(self, file: BinaryIO):
            self._file = file

        def load(self) -> Any:
            signed = self._file.read()
            data = signed[_TAG_BYTES:]
            if not hmac.compare_digest(signed[:_TAG_BYTES], tag(data)):
                raise StrangerError(
                    "a process without the run's keys is among the trainer ranks and sent an object, which was not "
                    "read; keep strangers off the trainers' network (docs/security.md)"
                )
            return pickle.loads(data)

    return SigningPickler, SignedUnpickler
