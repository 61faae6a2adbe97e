"""TLS for the listeners: a PEM certificate and its key, exchangeable while the server runs.

State: the certificate in force. Refuses asyncio, gpu and dispatch.
"""

from __future__ import annotations

import os
import ssl

from zl.errors import ConfigError


def tls_context(certificate: str, key: str) -> ssl.SSLContext:
    """Load a PEM certificate chain and its key.

    Raises  ConfigError: a file is missing or not what it should be
    """
    for path in (certificate, key):
        if not os.path.isfile(path):
            raise ConfigError(f"TLS: {path!r} is no file; give a PEM certificate chain and its PEM key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    encrypted = False

    def no_password() -> str:
        # Without this function OpenSSL asks the terminal, and waits, in a running server too.
        nonlocal encrypted
        encrypted = True
        return ""

    try:
        context.load_cert_chain(certificate, key, no_password)
    except (OSError, ValueError) as error:
        pair = f"TLS: certificate {certificate!r} with key {key!r} cannot be used"
        raise ConfigError(f"{pair}: {_why(error, certificate, encrypted)}") from None
    return context


def _why(error: Exception, certificate: str, encrypted: bool) -> str:
    """Say what is wrong with a pair, where OpenSSL says no more than that something is."""
    if isinstance(error, ssl.SSLError):
        if encrypted:
            return "the key has a password, which zl cannot ask for; take it off (openssl pkey -in KEY -out NEW_KEY)"
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key is another certificate's; give the two that were made together"
        if error.reason is None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certificate)
            except ssl.SSLError:
                return "the first has no PEM certificate in it (-----BEGIN CERTIFICATE-----)"
            return "the second has no whole PEM key in it (-----BEGIN PRIVATE KEY-----)"
    return str(error)


class Certificate:
    """A certificate that can be exchanged: `context` goes to the listeners once, `load` changes what it presents.

    A listener keeps the context that it was made with. Loading into that one would, if the files do not fit each
    other, leave it with half a pair; so each handshake is handed the context in force, by the callback that OpenSSL
    makes for every ClientHello, with a server name or without (SSL_CTX_set_tlsext_servername_callback(3)).
    """

    def __init__(self, certificate: str, key: str):
        self._now = tls_context(certificate, key)
        self.context = tls_context(certificate, key)
        self.context.sni_callback = self._choose

    def use(self, context: ssl.SSLContext) -> None:
        """Present the certificate of `context`, made by `tls_context`, from the next handshake on."""
        self._now = context

    def _choose(self, handshake: ssl.SSLObject, name: str | None, listener: ssl.SSLContext) -> None:  # noqa: ARG002
        handshake.context = self._now
