"""The credentials of a run: one key with a self-signed certificate, by which its processes at different sites know each
other. Both sides of a connection show it, and accept no other. TLS 1.3 alone.
"""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

from areal_megatron.config import ConfigError

_NAME = "areal_megatron run"
_VALID = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)
"""A run ends before its credentials do, and the clocks of two sites may differ."""


def new_credentials() -> bytes:
    """Returns a new key and its certificate, in PEM."""
    from cryptography import x509  # takes as long to import as all else of a program that only reads a run folder
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), *_VALID)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    return key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain) + certificate.public_bytes(pem)


class Credentials:
    """The credentials in a file (site.pem in the run folder). Raises ConfigError for what is none."""

    def __init__(self, path: Path):
        self.path = path

    def listening(self) -> ssl.SSLContext:
        """Returns what a server needs: nobody gets past the handshake without the same credentials."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # a client that never reads would close its end with them unread, which resets it
        return context

    def calling(self) -> ssl.SSLContext:
        """Returns what a client needs: no server without the same credentials is spoken to."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate itself is known
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.path)
            context.load_verify_locations(self.path)
        except OSError as e:  # as ssl.SSLError is
            raise ConfigError(f"{self.path} holds no key with its certificate: {e.strerror or e}") from None
        return context
