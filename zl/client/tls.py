"""TLS on the client's side without I/O: whom to believe, records in and out, and the words for when it fails.

State: of each `Tls`, one connection's. Certificate and host name are always checked. Refuses asyncio and sockets.
"""

from __future__ import annotations

import contextlib
import ssl
import threading

from zl.address import TcpAddress, TlsAddress
from zl.client.errors import ConnectionFailed, TlsFailed
from zl.errors import ConfigError

_READ_BYTES = 1 << 16

# X509_V_ERR_* of OpenSSL, x509_vfy.h
_NOT_YET_VALID, _EXPIRED = 9, 10
_NOBODY_VOUCHES = (2, 18, 19, 20, 21)  # self-signed, or its issuer is not among those that are believed
_OTHER_NAME = (62, 63, 64)
# How OpenSSL says that the first bytes of the answer were no TLS record.
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_MESSAGE")


def client_context(ca_file: str = "") -> ssl.SSLContext:
    """Make a context that believes the authorities of a PEM file alone, or those of the system for "".

    Raises  ConfigError: the file cannot be read, or holds no certificate
    """
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ValueError) as error:
        reason = "it holds no PEM certificate" if isinstance(error, ssl.SSLError) else getattr(error, "strerror", error)
        raise ConfigError(f"CA file {ca_file!r}: {reason}; give a PEM file with the authority's certificate") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Python 3.13 sets both of these, earlier ones neither. A certificate in the file is believed for itself, be it an
    # authority's or the server's own; STRICT would refuse authorities made without the extensions of RFC 5280.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.options |= ssl.OP_NO_RENEGOTIATION  # TLS 1.2's, which would have a read wait for a write
    return context


def client_hello(host: str) -> bytes:
    """Make the first bytes of a handshake, to see whether a server answers them."""
    tls = Tls(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), host)
    tls.handshake(b"")
    return tls.outgoing()


class Tls:
    """One connection's TLS. Bytes go in and come out; one thread may decrypt while another encrypts."""

    def __init__(self, context: ssl.SSLContext, host: str):
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        # OpenSSL's object is for one thread at a time. Reentrant: a Stream's __del__ may come while we have it.
        self._lock = threading.RLock()
        self.error: ssl.SSLError | None = None  # nothing that comes can be decrypted any more
        self.ended = False  # the server has said that it sends no more

    def handshake(self, data: bytes) -> bool:
        """Take bytes of the server; say whether the handshake is done. `outgoing` has what to send, an error or not.

        Raises  ssl.SSLError
        """
        self._incoming.write(data)
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def outgoing(self) -> bytes:
        """Give what is to be sent for the handshake."""
        return self._outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        """Take bytes of the server and give all that they say; nothing while a record is incomplete.

        What TLS itself has to answer goes out with the next `encrypt`, before which the standard does not ask for it
        (RFC 8446, section 4.6.3).
        Raises  ssl.SSLError: once what came before it has been given
        """
        with self._lock:
            self.check()
            self._incoming.write(data)
            parts = []
            try:
                while part := self._object.read(_READ_BYTES):
                    parts.append(part)
                self.ended = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLZeroReturnError:
                self.ended = True
            except ssl.SSLError as error:
                self.error = error
                if not parts:
                    raise
            return b"".join(parts)

    def check(self) -> None:
        """Raise the ssl.SSLError that `decrypt` has met, if any, for what came before it has been given."""
        if self.error is not None:
            raise self.error.with_traceback(None)  # else the traceback grows with each

    def encrypt(self, data: bytes) -> bytes:
        """Give the records that carry bytes to the server; they must be sent in the order in which they were made."""
        with self._lock:
            rest = memoryview(data)
            while rest:
                rest = rest[self._object.write(rest) :]
            return self._outgoing.read()

    def end(self) -> bytes:
        """Give the record that says that we send no more (close_notify)."""
        with self._lock:
            with contextlib.suppress(ssl.SSLError):  # it wants to read the server's, which is not waited for
                self._object.unwrap()
            return self._outgoing.read()


def explain(address: TlsAddress, error: OSError, ca_file: str = "") -> ConnectionFailed | None:
    """Make the exception for a handshake that failed; None where no TLS had begun."""
    begin = f"cannot connect to {address}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsFailed(f"{begin}: {_distrust(address, error, ca_file)}")
    if isinstance(error, ConnectionResetError | ConnectionAbortedError | BrokenPipeError | ssl.SSLEOFError):
        return ConnectionFailed(f"{begin}: the connection was closed during the TLS handshake; is it a zl server with "
                                "tls_cert that answers there?")  # fmt: skip
    if not isinstance(error, ssl.SSLError):
        return None
    reason = error.reason or str(error)
    if reason in _NO_TLS:
        plain = TcpAddress(address.host, address.port)
        return TlsFailed(f"{begin}: what answers there does not speak TLS; write {plain}, or set tls_cert and tls_key "
                         "at the server")  # fmt: skip
    words = reason.lower().replace("_", " ")
    return TlsFailed(f"{begin}: the TLS handshake failed: {words}; compare the TLS versions and ciphers of both sides")


def _distrust(address: TlsAddress, error: ssl.SSLCertVerificationError, ca_file: str) -> str:
    code = error.verify_code
    if code == _EXPIRED:
        return "its certificate has expired; renew it at the server (tls_cert) and reload"
    if code == _NOT_YET_VALID:
        return "its certificate is not valid yet; compare the clocks of both machines"
    if code in _OTHER_NAME:
        return (f"its certificate is for another name than {address.host}; write a name that it has, or have one made "
                f"with {address.host} as a subjectAltName")  # fmt: skip
    if code in _NOBODY_VOUCHES:
        if ca_file:
            return f"its certificate is not of an authority in {ca_file}; give the file of the one that signed it"
        return ("its certificate is not of an authority that this system knows; give that authority's certificate with "
                "ca_file, --ca or ZL_CA")  # fmt: skip
    return f"its certificate is refused: {error.verify_message}; have another one made for the server (tls_cert)"
