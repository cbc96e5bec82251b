"""Reloads keys and certificates at SIGHUP."""

import signal
import ssl
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import structlog

from server.http.keys import KeyRing, read_keys
from server.http.tls import load_certificate, tls_context
from server.settings import Settings, SettingsError

FILES = ("api_keys_file", "ssl_certfile", "ssl_keyfile")

log = structlog.get_logger("nvium.server")


@dataclass
class Reloader:
    """Reloads the files. If a file is invalid, logs the reason and changes nothing.

    The signal handler only sets a flag. It may interrupt a log call, so logging in the handler could deadlock.
    """

    settings: Settings
    keys: KeyRing
    tls: ssl.SSLContext | None
    _is_due: bool = False

    def listen(self) -> None:
        """Handle SIGHUP if there is a key file or a certificate. Call this from the main thread."""
        if self.tls or self.settings.api_keys_file:
            signal.signal(signal.SIGHUP, self._at_signal)

    def _at_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_due = True

    def tick(self) -> None:
        if self._is_due:
            self._is_due = False  # reset before reading, because the files may change again
            self.reload()

    def reload(self) -> None:
        try:
            self._check_files()
            keys = read_keys(self.settings)
            tls_context(self.settings)  # check the pair first: a mismatched pair would break the context in use
            if self.tls and self.settings.ssl_certfile:
                load_certificate(self.tls, self.settings.ssl_certfile, self.settings.ssl_keyfile)
        except SettingsError as error:
            log.error("cannot reload keys and certificate, keeping the old ones", reason=str(error))
            return
        self.keys.replace(keys)
        log.info("reloaded keys and certificate", api_keys=len(keys), tls=self.tls is not None)

    def _check_files(self) -> None:
        """Raise `SettingsError` if a file is a pipe or device: reading it could block the event loop."""
        for name in FILES:
            file: Path | None = getattr(self.settings, name)
            if file is not None and file.exists() and not file.is_file():
                raise SettingsError(f"{name}: {file} is not a regular file")
