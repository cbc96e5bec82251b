"""Keys and certificates read again while the server runs, when SIGHUP asks for it."""

import asyncio
import signal
import ssl

import structlog

from server.http.keys import KeyRing, read_keys
from server.http.tls import load, tls_context
from server.settings import Settings, SettingsError

log = structlog.get_logger("nvium.server")


class Renewal:
    """Of what stands in files. Where something is wrong with one, all stays as it was, and a line says what."""

    def __init__(self, settings: Settings, keys: KeyRing, tls: ssl.SSLContext | None) -> None:
        self._settings = settings
        self._keys = keys
        self._tls = tls

    @property
    def is_possible(self) -> bool:
        """There is a file to be read again, and a layer that asks for keys."""
        return self._tls is not None or (self._settings.api_keys_file is not None and len(self._keys) > 0)

    def listen(self) -> None:
        """Renew at every SIGHUP, which ends the process otherwise. Called on the event loop."""
        if self.is_possible:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.renew)

    def renew(self) -> None:
        try:
            keys = read_keys(self._settings)
            tls_context(self._settings)  # as a trial: a certificate without its key would leave the old one useless
        except SettingsError as error:
            log.error("keys and certificate stay as they were", reason=str(error))
            return
        self._keys.replace(keys)
        if self._tls and self._settings.ssl_certfile:
            load(self._tls, self._settings.ssl_certfile, self._settings.ssl_keyfile)
        log.info("keys and certificate renewed", api_keys=len(keys), tls=self._tls is not None)
