"""The program of a replica: an ordinary server on a Unix socket that only its gateway can open.

The arguments are the socket's abstract name, the gateway's process id and the settings as JSON. The process prints
`READY`, or a user's error, to standard output, which the gateway reads. It ends with its gateway, even if the gateway
was killed.
"""

import gc
import json
import os
import socket
import struct
import sys
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import Receive, Scope, Send

from nvium_core import NviumError
from nvium_core.text.sandbox import die_with
from server.admission import Loading
from server.app import assemble, serve, started
from server.http.middleware import Check
from server.http.server import DrainingServer, Listener
from server.settings import Settings
from server.telemetry.logs import configure_logs
from server.telemetry.record import RequestRecord

KEY_ID, IS_LAST = "x-nvium-key-id", "x-nvium-is-last"
NOT_STORED = ("response_not_found", "previous_response_not_found")
"""Error codes after which the gateway tries the other replicas, unless the request has the header `IS_LAST`."""

READY, USER_ERROR = b"ready\n", 2
"""The line that tells the gateway that the model is loaded, and the exit code after a user's error."""


class FromGateway(Check):
    """Replaces `KeyGate` in a replica. Only the gateway can open the socket, so the key id that it sends is true."""

    def check(self, scope: Scope, headers: Headers) -> None:
        scope["state"]["record"].key_id = headers.get(KEY_ID, "")

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().handle(scope, receive, send)
        record: RequestRecord = scope["state"]["record"]
        if record.error and record.error.code in NOT_STORED and IS_LAST not in Headers(scope=scope):
            record.is_passed_on = True


class GatewayListener(Listener):
    """Accepts connections of the gateway only, because any process could open an abstract socket."""

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
        pid, _user, _group = struct.unpack("iII", peer)
        if pid != os.getppid():
            connection.close()
            raise ConnectionAbortedError
        return connection, address


class ReplicaServer(DrainingServer):
    def announce(self) -> None:
        os.write(1, READY)
        os.dup2(2, 1)  # nobody reads the pipe from now on


def main() -> None:
    name, parent, options = sys.argv[1:]
    die_with(int(parent))
    gc.disable()  # until the server is ready
    settings = Settings(**json.loads(options))
    configure_logs(settings.log_level)
    loading = Loading(settings)
    app = assemble(loading, Middleware(FromGateway))
    try:
        with GatewayListener(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            serve(app, listener, partial(started, settings, loading.metrics), ReplicaServer)
    except (NviumError, OSError) as error:
        print(" ".join(str(error).split()))  # noqa: T201 (the gateway reads it)
        sys.exit(USER_ERROR)
