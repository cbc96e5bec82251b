"""Reloads keys and certificates at SIGHUP."""

import signal
import ssl
from pathlib import Path
from types import FrameType

import structlog

from server.http.keys import KeyRing, read_keys
from server.http.tls import load_certificate, tls_context
from server.settings import Settings, SettingsError

FILES = ("api_keys_file", "ssl_certfile", "ssl_keyfile")

log = structlog.get_logger("nvium.server")


class Renewal:
    """Reloads from files. If one is invalid, nothing changes and a log line says why.

    The signal is only noted: it may come in the midst of a log line, whose lock another line would wait for, for ever.
    """

    def __init__(self, settings: Settings, keys: KeyRing, tls: ssl.SSLContext | None) -> None:
        self._settings = settings
        self._keys = keys
        self._tls = tls
        self._is_due = False

    @property
    def is_possible(self) -> bool:
        """Whether there is anything to reload: a certificate, or a key file in use."""
        return self._tls is not None or (self._settings.api_keys_file is not None and len(self._keys) > 0)

    def listen(self) -> None:
        """Reload after SIGHUP, which would end the process. From the main thread, before the model is loaded."""
        if self.is_possible:
            signal.signal(signal.SIGHUP, self._at_signal)

    def _at_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_due = True

    def tick(self) -> None:
        """Called ten times a second: reload if SIGHUP has arrived."""
        if self._is_due:
            self._is_due = False  # before reading, as the files may change again meanwhile
            self.renew()

    def renew(self) -> None:
        try:
            self._check_files()
            keys = read_keys(self._settings)
            tls_context(self._settings)  # a trial: a mismatched pair would break the context in use
            if self._tls and self._settings.ssl_certfile:
                load_certificate(self._tls, self._settings.ssl_certfile, self._settings.ssl_keyfile)
        except SettingsError as error:
            log.error("keys and certificate stay as they were", reason=str(error))
            return
        self._keys.replace(keys)
        log.info("keys and certificate renewed", api_keys=len(keys), tls=self._tls is not None)

    def _check_files(self) -> None:
        """Raise `SettingsError` for a pipe or device, on which the event loop could block."""
        for name in FILES:
            file: Path | None = getattr(self._settings, name)
            if file is not None and file.exists() and not file.is_file():
                raise SettingsError(f"{name}: {file} is no file that can be read again")
