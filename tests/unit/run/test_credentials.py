"""The credentials of a run, and an engine's server that asks for them."""

import asyncio
import http.client
import ssl
import stat
import subprocess

import pytest

from areal_megatron.config import ConfigError
from areal_megatron.engine.client import EngineClient, EngineError
from areal_megatron.run.credentials import Credentials, new_credentials
from areal_megatron.run.folder import RunFolder
from tests.support.listeners import listening


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    return run


def test_they_are_the_users_alone_and_renewed_with_the_secret(run):
    path = run.credentials.path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    run.create(exist_ok=True)
    assert path.read_bytes() == before
    run.renew_secret()
    assert path.read_bytes() != before and stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    assert not run.make_private() and stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()
    assert not run.make_private()  # there is nothing that others could have read
    run.create(exist_ok=True)
    run.credentials.calling()


def test_the_certificate_signs_nothing_else_and_outlives_the_run(run):
    """As openssl reads it."""
    shown = subprocess.run(
        ["openssl", "x509", "-in", run.credentials.path, "-noout", "-text"], capture_output=True, text=True, check=True
    ).stdout
    assert "CA:FALSE" in shown and "prime256v1" in shown and "9999 GMT" in shown


def test_a_damaged_file_is_named(tmp_path):
    for content in (b"", b"nothing", new_credentials()[:300]):
        (tmp_path / "site.pem").write_bytes(content)
        with pytest.raises(ConfigError, match=r"site\.pem holds no key with its certificate"):
            Credentials(tmp_path / "site.pem").calling()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """An engine's server at another site, and its credentials."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "site.pem").write_bytes(new_credentials())
    with listening("site", folder) as server:
        yield server, Credentials(folder / "site.pem")


def status(server, context, secret=None):
    connection = http.client.HTTPSConnection(server.host, server.port, timeout=20, context=context)
    try:
        connection.request("GET", server.path, headers={"Authorization": f"Bearer {secret or server.secret}"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_a_server_asks_for_credentials_and_secret(server):
    server, credentials = server
    assert status(server, credentials.calling()) == 200
    assert status(server, credentials.calling(), "another secret") == 401


@pytest.mark.parametrize("stranger", ["without", "others", "old"])
def test_a_stranger_gets_no_answer(server, tmp_path, stranger):
    server, credentials = server
    (tmp_path / "site.pem").write_bytes(new_credentials())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if stranger != "without":
        context.load_cert_chain(credentials.path if stranger == "old" else tmp_path / "site.pem")
    if stranger == "old":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError):
        status(server, context)


def test_in_clear_there_is_no_answer(server):
    server, _ = server
    connection = http.client.HTTPConnection(server.host, server.port, timeout=20)
    connection.request("GET", server.path, headers={"Authorization": f"Bearer {server.secret}"})
    with pytest.raises((OSError, http.client.HTTPException)):
        connection.getresponse()


def test_the_controller_speaks_to_no_other_server(server, tmp_path):
    server, credentials = server
    (tmp_path / "site.pem").write_bytes(new_credentials())

    async def ask(own):
        endpoint = f"https://{server.host}:{server.port}"
        client = EngineClient("engine-1", endpoint, server.secret, 20, own.calling())
        try:
            with pytest.raises(EngineError) as failed:  # the stand-in has no such route
                await client.check_health(20)
            return str(failed.value)
        finally:
            await client.close()

    assert "status 404" in asyncio.run(ask(credentials))
    assert "certificate verify failed" in asyncio.run(ask(Credentials(tmp_path / "site.pem")))
