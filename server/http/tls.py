"""TLS: a certificate and its key from files, checked before serving."""

import ssl
from pathlib import Path

from server.settings import Settings, SettingsError


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """None without a certificate. Raises `SettingsError`."""
    certificate, key = settings.ssl_certfile, settings.ssl_keyfile
    if certificate is None:
        if key is not None:
            raise SettingsError("ssl_keyfile: needs ssl_certfile too")
        return None
    for name, file in (("ssl_certfile", certificate), ("ssl_keyfile", key or certificate)):
        check_readable(name, file)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, certificate, key)
    return context


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    """Use these files for new connections. Raises `SettingsError`."""
    try:
        context.load_cert_chain(certificate, key, refuse_to_ask)
    except OSError as error:  # OpenSSL's are such too
        reason = (error.reason or "not PEM") if isinstance(error, ssl.SSLError) else error.strerror
        raise SettingsError(f"ssl_certfile: {certificate} and its key cannot be used: {reason}") from error


def check_readable(name: str, file: Path) -> None:
    try:
        file.open("rb").close()
    except OSError as error:
        raise SettingsError(f"{name}: cannot read {file}: {error.strerror}") from error


def refuse_to_ask() -> str:
    """Keeps OpenSSL from asking for a password on the terminal."""
    raise SettingsError("ssl_keyfile: the key is encrypted; give one that is not, in a file that only the server reads")
