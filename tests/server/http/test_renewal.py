import os
import signal
import ssl
from pathlib import Path

import pytest
import trustme

from server.http.keys import KeyRing, read_keys
from server.http.renewal import Renewal
from server.http.tls import tls_context
from server.settings import Settings
from server.telemetry.sink import LogSink
from tests.server.forked_server import forked_server
from tests.server.live_server import wait_until
from tests.server.log_lines import log_lines


@pytest.mark.parametrize("content", ["bob:sk-new", "", "# none", "a key: with spaces", None])
def test_a_valid_file_replaces_the_keys_and_an_invalid_one_does_not(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:sk-old")
    settings = Settings(api_keys_file=file)
    renewal = Renewal(settings, ring := KeyRing(read_keys(settings)), None)
    file.unlink() if content is None else file.write_text(content)
    with log_lines() as log:
        renewal.renew()
    is_valid = content == "bob:sk-new"
    assert (ring.owner("sk-old"), ring.owner("sk-new")) == ((None, "bob") if is_valid else ("alice", None))
    assert [line["level"] for line in log.lines] == ["info" if is_valid else "error"]


@pytest.mark.parametrize("setting", ["api_keys_file", "ssl_certfile", "ssl_keyfile"])
def test_a_pipe_is_not_read(tmp_path: Path, setting: str) -> None:
    keys, pipe = tmp_path / "keys", tmp_path / "pipe"
    keys.write_text("alice:sk-old")
    os.mkfifo(pipe)
    settings = Settings(**{"api_keys_file": keys, "ssl_certfile": keys, setting: pipe})
    renewal = Renewal(settings, ring := KeyRing(read_keys(Settings(api_keys_file=keys))), None)
    with log_lines() as log:
        renewal.renew()
    assert ring.owner("sk-old") == "alice"
    assert [line["reason"] for line in log.lines] == [f"{setting}: {pipe} is not a regular file"]


def test_new_connections_get_the_reloaded_certificate(tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    settings = Settings(ssl_certfile=both)
    authority = trustme.CA()

    def issue(name: str) -> None:
        authority.issue_cert(name).private_key_and_cert_chain_pem.write_to_path(both)

    issue("old.example")
    context = tls_context(settings)
    assert context
    renewal = Renewal(settings, KeyRing(), context)
    issue("new.example")
    renewal.renew()
    assert certificate_name(context, authority) == "new.example"
    both.write_text("no certificate")
    renewal.renew()
    assert certificate_name(context, authority) == "new.example"


def certificate_name(context: ssl.SSLContext, authority: trustme.CA) -> str:
    """Shake hands in memory and return the name on the certificate that the client receives."""
    trusting = ssl.create_default_context()
    trusting.check_hostname = False
    authority.configure_trust(trusting)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (client, server):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    certificate = client.getpeercert()
    assert certificate
    return str(dict(certificate["subjectAltName"])["DNS"])  # type: ignore[arg-type]


def signal_during_log_lines() -> None:
    """Send SIGHUP while the log line of a request is written and its lock is held."""
    write = LogSink.write

    def interrupted(sink: LogSink, line: str) -> None:
        if '"event": "request"' in line:
            os.kill(os.getpid(), signal.SIGHUP)
        write(sink, line)

    LogSink.write = interrupted  # type: ignore[method-assign]


@pytest.mark.slow
def test_sighup_reloads_the_keys_even_during_a_log_line(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-old")
    prepare = signal_during_log_lines
    with forked_server(model_folder, tmp_path / "log", prepare=prepare, api_keys_file=file) as server:

        def status(key: str) -> int:
            asked = {"model": "default", "prompt": "Once", "max_tokens": 2}
            return server.http.post(
                "/v1/completions", json=asked, headers={"authorization": f"Bearer {key}"}
            ).status_code

        file.write_text("sk-new")
        assert status("sk-old") == 200
        wait_until(lambda: status("sk-new") == 200, seconds=60)
        assert status("sk-old") == 401
