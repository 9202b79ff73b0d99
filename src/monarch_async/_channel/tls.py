"""TLS between hosts: which files a process uses, and the contexts made of them.

Every process of a job is a server for some peers and a client for others, so it has one certificate for both and asks every peer for one.
The files are read in each process, on its own host; what travels is their paths.
"""

from __future__ import annotations

import os
import ssl

from monarch_async.errors import UsageError

__all__ = ["TLS"]


class TLS:
    """Paths of PEM files: this host's certificate (with its chain), its private key, and the authorities that peers must be signed by.

    The certificate must hold the host's name or address as it is dialed. Raises `UsageError` for a path that is not a string or
    `os.PathLike`.
    """

    __slots__ = ("ca", "cert", "key")

    def __init__(self, cert: str | os.PathLike[str], key: str | os.PathLike[str], ca: str | os.PathLike[str]) -> None:
        self.cert = _path("cert", cert)
        self.key = _path("key", key)
        self.ca = _path("ca", ca)

    def to_map(self) -> dict[str, str]:
        return {"cert": self.cert, "key": self.key, "ca": self.ca}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TLS) and self.to_map() == other.to_map()

    def __hash__(self) -> int:
        return hash((self.cert, self.key, self.ca))

    def __repr__(self) -> str:
        return f"TLS(cert={self.cert!r}, key={self.key!r}, ca={self.ca!r})"

    def server(self) -> ssl.SSLContext:
        """For accepting; only peers with a certificate of `ca` get in. Raises `UsageError` if a file can't be used."""
        context = self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self) -> ssl.SSLContext:
        """For dialing; the certificate of the other side must be of `ca` and for the name that was dialed. Raises `UsageError`."""
        return self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"the certificate {self.cert} with the key {self.key} can't be used: {error}") from error
        try:
            context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(f"the authorities in {self.ca} can't be used: {error}") from error
        return context


def _path(name: str, value: object) -> str:
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise UsageError(f"TLS needs the path of a PEM file as {name!r}, not {value!r}")
    return os.path.abspath(os.fspath(value))
