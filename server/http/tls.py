"""TLS: loads a certificate and its key, and checks them before the server starts."""

import ssl
from pathlib import Path

from server.settings import Settings, SettingsError


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """Load the certificate, or return None if there is none. Raise `SettingsError` if the files cannot be used."""
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        if key is not None:
            raise SettingsError("ssl_keyfile: requires ssl_certfile")
        return None
    for name, file in (("ssl_certfile", certificate), ("ssl_keyfile", key or certificate)):
        check_readable(name, file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, certificate, key)
    return context


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    """Use these files for new connections. Raise `SettingsError` if they cannot be used."""
    try:
        context.load_cert_chain(certificate, key, password_required)
    except OSError as error:  # `ssl.SSLError` is an `OSError`
        reason = (error.reason or "not PEM") if isinstance(error, ssl.SSLError) else error.strerror
        raise SettingsError(f"ssl_certfile: {certificate} and its key cannot be used: {reason}") from error


def check_readable(name: str, file: Path) -> None:
    """Open the file without reading it: it may be a pipe, or have comments in any encoding."""
    try:
        file.open("rb").close()
    except OSError as error:
        raise SettingsError(f"{name}: cannot read {file}: {error.strerror}") from error


def password_required() -> str:
    """Reject an encrypted key. OpenSSL calls this instead of asking for the password on the terminal."""
    raise SettingsError("ssl_keyfile: the key must not be encrypted; restrict the file's permissions instead")
