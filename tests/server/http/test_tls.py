import asyncio
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme
import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from nvium_core import LoadedModel
from server.admission import Loading
from server.app import assemble
from server.http.server import uvicorn_config
from server.settings import Settings, SettingsError
from tests.byte_model import NAME
from tests.server.live_server import LiveServer, live_server, wait_until

BODY: dict[str, Any] = {"model": NAME, "prompt": "Once", "seed": 1, "max_tokens": 100, "ignore_eos": True}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, issued = tmp_path_factory.mktemp("tls"), authority.issue_cert("localhost", "127.0.0.1")
    files = {"ssl_certfile": folder / "chain.pem", "ssl_keyfile": folder / "key.pem"}
    issued.cert_chain_pems[0].write_to_path(files["ssl_certfile"])
    issued.private_key_pem.write_to_path(files["ssl_keyfile"])
    return files


@pytest.fixture(scope="module")
def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture(scope="module")
def encrypted(byte_model: LoadedModel, files: dict[str, Path]) -> Iterator[LiveServer]:
    with live_server(byte_model, arrival_seconds=1, slow_client_seconds=1, **files) as server:
        yield server


@pytest.fixture
def https(encrypted: LiveServer, trusting: ssl.SSLContext) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=encrypted.url.replace("http", "https", 1), verify=trusting, timeout=30) as client:
        yield client


def test_only_a_client_that_trusts_the_certificate_can_connect(encrypted, https):
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{https.base_url}/livez")
    with pytest.raises(httpx.RemoteProtocolError):
        encrypted.http.get("/livez")
    assert https.get("/livez").json() == {"status": "ok"}
    client = openai.OpenAI(base_url=f"{https.base_url}/v1", api_key="none", http_client=https, max_retries=0)
    assert client.completions.create(model=NAME, prompt="Once", max_tokens=1).choices


async def test_a_client_that_reads_nothing_is_cut_off(encrypted, trusting):
    url = httpx.URL(encrypted.url)
    encrypted.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_000)
    body = httpx.Request("POST", "http://x", json=BODY | {"stream": True, "max_tokens": 2000, "return_token_ids": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body.content)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(url.host, url.port, ssl=trusting, limit=1_000)
    writer.write(head.encode() + body.content)
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    await asyncio.to_thread(wait_until, lambda: encrypted.service.admission.num_present == 1)
    await asyncio.to_thread(wait_until, lambda: encrypted.service.admission.num_present == 0, seconds=60)
    assert not encrypted.service.engine.has_work
    writer.transport.abort()


def test_one_file_may_contain_the_certificate_and_the_key_and_comments_in_any_encoding(authority, tmp_path):
    both = tmp_path / "both.pem"
    pem = authority.issue_cert("localhost").private_key_and_cert_chain_pem.bytes()
    both.write_bytes("subject=O = Müller GmbH\n".encode("latin-1") + pem)
    context = configured(ssl_certfile=both).ssl
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ssl_keyfile": "key"}, "ssl_keyfile: requires ssl_certfile"),
        ({"ssl_certfile": "missing"}, "^ssl_certfile: .*missing.* cannot be used: No such file"),
        ({"ssl_certfile": "chain", "ssl_keyfile": "missing"}, "^ssl_certfile: .* and .*missing.* cannot be used: No "),
        ({"ssl_certfile": "chain"}, "cannot be used"),
        ({"ssl_certfile": "chain", "ssl_keyfile": "other"}, "cannot be used: KEY_VALUES_MISMATCH"),
        ({"ssl_certfile": "chain", "ssl_keyfile": "encrypted"}, "cannot be used: not PEM, or encrypted"),
        ({"ssl_certfile": "nonsense"}, "cannot be used"),
    ],
)
def test_invalid_files_are_refused_at_start(given, message, files, authority, tmp_path):
    others = {name: tmp_path / name for name in ("missing", "other", "encrypted", "nonsense")}
    authority.issue_cert("localhost").private_key_pem.write_to_path(others["other"])
    others["nonsense"].write_text("no certificate")
    key, encryption = ec.generate_private_key(ec.SECP256R1()), BestAvailableEncryption(b"secret")
    others["encrypted"].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    known = others | {"chain": files["ssl_certfile"], "key": files["ssl_keyfile"]}
    with pytest.raises(SettingsError, match=message):
        configured(**{name: known[file] for name, file in given.items()})


def configured(**files: Path) -> uvicorn.Config:
    settings = Settings(**files)
    return uvicorn_config(assemble(Loading(settings)), settings)
