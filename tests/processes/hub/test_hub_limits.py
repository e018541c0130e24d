"""A hub, a mirror or a proxy that is silent, slow, endless or hostile: a launcher ends in time, with one line, and
writes nothing outside of the cache."""

import gzip
import json
import time
from pathlib import Path

import pytest
from huggingface_hub import constants, get_session

from areal_megatron.hub import hub, hub_client
from areal_megatron.hub.hub import HubRepo, fetch_data, model_folder
from tests.processes.hub.test_hub import jsonl, refused, server, set_hub  # noqa: F401 - a fixture
from tests.support.soaking import with_soaked

EVIL = "\x1b]0;title\x07\x1b[2J\u202e\x9b"
LIMITS = {
    "SILENCE_S": 0.4,
    "REPLY_S": 1.0,
    "STALL_S": 1.0,
    "TOLD_AFTER_S": 0.2,
    "REPLIES_BYTES": 1 << 20,
    "REPLIES": 30,
}


@pytest.fixture
def model(server, world, monkeypatch):  # noqa: F811
    for name, value in LIMITS.items():
        monkeypatch.setattr(hub_client, name, value)
    monkeypatch.setattr(hub, "_SLACK_BYTES", 1000)
    return server.model("Tiny/Model-1.5B", world / "model")


def head(handler, status=200, **headers):
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()


def silent(handler):
    time.sleep(30)


def endless(handler):
    head(handler, Content_Type="application/json")
    while True:
        handler.wfile.write(b'["' + b"x" * 65536 + b'",')


def dripping(handler):
    head(handler, Content_Length="1000")
    while True:
        handler.wfile.write(b" ")
        time.sleep(0.1)


def dripping_headers(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        handler.wfile.write(b"x")
        time.sleep(0.1)


def compressed(handler):
    head(handler, Content_Encoding="gzip", Content_Type="application/json")
    handler.wfile.write(gzip.compress(b"[" + b" " * (64 << 20) + b"]"))


def deep(handler):
    head(handler, Content_Type="application/json")
    handler.wfile.write(b"[" * 100_000)


def with_pages(handler):
    host = handler.headers["Host"]
    head(handler, Link=f'<http://{host}{handler.path}&x>; rel="next"', Content_Type="application/json")
    handler.wfile.write(b"[]")


def redirecting(handler):
    head(handler, 302, Location="file:///etc/passwd", Content_Length="0")


def redirecting_for_ever(handler):
    head(handler, 302, Location=handler.path, Content_Length="0")


def evil(handler):
    head(handler, 418, X_Error_Message=EVIL.encode().decode("latin-1").replace("\n", ""), Content_Length="0")


def commit_elsewhere(handler):
    content = json.dumps({"id": "Tiny/Model-1.5B", "sha": "../../../../evil", "siblings": []}).encode()
    head(handler, Content_Type="application/json", Content_Length=str(len(content)))
    handler.wfile.write(content)


ANSWERS = (silent, endless, dripping, dripping_headers, compressed, deep, redirecting, redirecting_for_ever, evil)


def outside(folder):
    """The files that are not the cache's."""
    cache = Path(constants.HF_HUB_CACHE)
    return sorted(str(f) for f in folder.rglob("*") if not f.is_relative_to(cache) and f != cache)


def within(limit_s, call, *arguments):
    began = time.monotonic()
    text = refused(call, *arguments)
    assert time.monotonic() - began < limit_s
    assert text.isprintable() and text.startswith("model.path: "), text
    return text


@pytest.mark.parametrize("answer", [*ANSWERS, commit_elsewhere], ids=lambda answer: answer.__name__)
def test_a_look_up_of_a_revision_ends(server, model, tmp_path, capfd, answer):  # noqa: F811
    server.answer = answer
    text = within(20, model_folder, "Tiny/Model-1.5B", "model.path")
    said = capfd.readouterr().err
    assert "127.0.0.1" in text and outside(tmp_path) == []
    assert "\x1b" not in said and len(said) < 2000
    if answer in (silent, dripping, dripping_headers):
        assert "asking 127.0.0.1 about Tiny/Model-1.5B" in said
        assert len(server.asked) == (hub_client.TRIES if answer is silent else 1)


# Answers after which the library itself waits, for four seconds and more, are in `make soak`; the look-up meets
# them all.
@pytest.mark.parametrize(
    "answer",
    with_soaked([*ANSWERS, with_pages], [silent, dripping_headers]),
    ids=lambda answer: answer.__name__,
)
def test_a_listing_of_files_ends(server, model, tmp_path, answer):  # noqa: F811
    server.answer = lambda handler: answer(handler) if "/tree/" in handler.path else handler.usual()
    assert "127.0.0.1" in within(60, model_folder, "Tiny/Model-1.5B", "model.path") and outside(tmp_path) == []


@pytest.mark.parametrize("answer", with_soaked(ANSWERS, [silent, dripping]), ids=lambda answer: answer.__name__)
def test_a_download_ends(server, model, tmp_path, answer):  # noqa: F811
    """`deep` is a file as any other, but too long."""
    server.answer = lambda h: answer(h) if h.command == "GET" and h.path.endswith("/config.json") else h.usual()
    within(60, model_folder, "Tiny/Model-1.5B", "model.path")
    assert outside(tmp_path) == []


@pytest.mark.parametrize("answer", [silent, dripping_headers, redirecting_for_ever], ids=lambda answer: answer.__name__)
def test_a_question_about_a_file_ends(server, model, tmp_path, answer):  # noqa: F811
    server.answer = lambda handler: answer(handler) if handler.command == "HEAD" else handler.usual()
    within(90, model_folder, "Tiny/Model-1.5B", "model.path")
    assert outside(tmp_path) == []


@pytest.mark.parametrize("name", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
@pytest.mark.parametrize("value", ["../../../../evil", "/tmp/evil", "..", "a/../../../../../evil", ""])
def test_names_that_lead_out_of_the_cache(server, model, tmp_path, name, value):  # noqa: F811
    def answer(handler):
        if handler.command == "HEAD":
            usual = {"ETag": '"a"', "X-Repo-Commit": model.branches["main"], "Content-Length": "3"}
            shown = usual | {name: f'"{value}"' if name != "X-Repo-Commit" else value}
            head(handler, **{key.replace("-", "_"): text for key, text in shown.items()})
        else:
            handler.usual()

    server.answer = answer
    within(20, model_folder, "Tiny/Model-1.5B", "model.path")
    assert outside(tmp_path) == [] and not Path("/tmp/evil").exists()


@pytest.mark.parametrize(
    "entry",
    [
        {"path": "../../../../evil.json"},
        {"path": "/tmp/evil.json"},
        {"path": "a\\..\\..\\evil.json"},
        {"path": "a/./b.json"},
        {"path": f"{EVIL}/../x.json"},
        {"oid": "../../../../evil"},
    ],
)
def test_a_listing_that_leads_out_of_the_cache(server, model, tmp_path, entry):  # noqa: F811
    def answer(handler):
        if "/tree/" not in handler.path:
            return handler.usual()
        listed = [{"type": "file", "path": "config.json", "size": 3, "oid": "0" * 40} | entry]
        content = json.dumps(listed).encode()
        head(handler, Content_Type="application/json", Content_Length=str(len(content)))
        handler.wfile.write(content)

    server.answer = answer
    text = within(20, model_folder, "Tiny/Model-1.5B", "model.path")
    assert "127.0.0.1 lists a file that would lie outside of the cache" in text and outside(tmp_path) == []


def test_what_the_listing_of_a_mirror_calls_large_files_names_nothing(server, model, tmp_path):  # noqa: F811
    """Xet would take it for a name, without a question about the file."""
    size = len(model.commits[model.branches["main"]]["config.json"])
    lfs = {"oid": "../../../../evil", "size": size, "pointerSize": 1}
    listed = [{"type": "file", "path": "config.json", "size": size, "oid": "0" * 40, "lfs": lfs, "xetHash": "0" * 64}]

    def answer(handler):
        if "/tree/" not in handler.path:
            return handler.usual()
        content = json.dumps(listed).encode()
        head(handler, Content_Type="application/json", Content_Length=str(len(content)))
        handler.wfile.write(content)

    server.answer = answer
    assert "has no *.safetensors" in within(20, model_folder, "Tiny/Model-1.5B", "model.path")
    assert "config.json" in server.downloads() and outside(tmp_path) == []


def test_a_file_of_the_cache_that_leads_out_of_it_is_not_read(server, model, tmp_path):  # noqa: F811
    folder = Path(model_folder("Tiny/Model-1.5B", "model.path"))
    (folder / "config.json").unlink()
    (tmp_path / "elsewhere.json").write_text("{}")
    (folder / "config.json").symlink_to(tmp_path / "elsewhere.json")
    assert "leads out of the cache" in within(20, model_folder, "Tiny/Model-1.5B", "model.path")


def test_a_file_longer_than_announced_is_not_read_to_its_end(server, model, tmp_path):  # noqa: F811
    sent = 0

    def answer(handler):
        nonlocal sent
        if handler.command != "GET" or not handler.path.endswith("/model.safetensors"):
            return handler.usual()
        head(handler)
        while True:
            sent += handler.wfile.write(b"x" * 65536)

    server.answer = answer
    within(60, model_folder, "Tiny/Model-1.5B", "model.path")
    assert sent < 50 << 20 and outside(tmp_path) == []


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_shorter_than_listed_is_not_taken(server, model, tmp_path, name):  # noqa: F811
    """A mirror may have a part of it, and say that this is all."""
    content, (sha,) = model.commits[model.branches["main"]][name][:-20], model.branches.values()

    def answer(handler):
        if not handler.path.endswith(f"/{name}"):
            return handler.usual()
        head(handler, ETag='"0a"', X_Repo_Commit=sha, Content_Length=str(len(content)))
        handler.command == "GET" and handler.wfile.write(content)

    server.answer = answer
    text = within(20, model_folder, "Tiny/Model-1.5B", "model.path")
    assert f"has {len(content)} bytes, of {name} the hub lists {len(content) + 20}: remove it" in text
    server.answer = lambda handler: handler.usual()
    for blob in (tmp_path / "cache").rglob("blobs/0a"):
        blob.unlink()
    assert model_folder("Tiny/Model-1.5B", "model.path")


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("said", [{"Retry_After": "3600"}, {"RateLimit": '"api";r=0;t=3600'}])
@pytest.mark.parametrize("asked", ["/tree/", "/resolve/"])
def test_the_hub_may_not_ask_to_wait_for_hours(server, model, asked, said, status):  # noqa: F811
    server.answer = lambda handler: (
        head(handler, status, Content_Length="0", **said) if asked in handler.path else handler.usual()
    )
    assert "127.0.0.1 asks to wait 3600 s" in within(20, model_folder, "Tiny/Model-1.5B", "model.path")


def test_a_short_wait_is_told_and_waited_for(server, model, capfd):  # noqa: F811
    refusals = iter([429])

    def answer(handler):
        if "/tree/" in handler.path and next(refusals, None):
            return head(handler, 429, Content_Length="0", Retry_After="1")
        handler.usual()

    server.answer = answer
    assert model_folder("Tiny/Model-1.5B", "model.path")
    assert "127.0.0.1 asks to wait 1 s" in capfd.readouterr().err


@pytest.mark.parametrize("revision", ["../../../../evil", "refs/../../x", "..", "/evil", "a//b", "-rf", f"a{EVIL}"])
def test_a_revision_that_leads_out_of_the_cache(server, model, tmp_path, revision):  # noqa: F811
    """As a mirror may say that it has one."""
    sha = model.branches["main"]
    content = json.dumps({"id": "Tiny/Model-1.5B", "sha": sha, "siblings": []}).encode()

    def answer(handler):
        if f"/tree/{sha}" in handler.path or not handler.path.startswith("/api/"):
            return handler.usual()
        head(handler, Content_Type="application/json", Content_Length=str(len(content)))
        handler.wfile.write(content)

    server.answer = answer
    assert "can be no branch" in within(20, model_folder, f"Tiny/Model-1.5B@{revision}", "model.path")
    assert outside(tmp_path) == [] and not server.asked


def test_no_request_leaves_https(server, model, monkeypatch):  # noqa: F811
    monkeypatch.setattr(constants, "ENDPOINT", "https://127.0.0.1:1")
    with (
        hub_client.asking("x"),
        pytest.raises(hub_client.HubFault, match=r"redirected from https to http://127\.0\.0\.1"),
    ):
        get_session().get(server.address)
    assert not server.asked


def test_a_slow_hub_is_waited_for(server, model):  # noqa: F811
    """As long as it says something in time: here each answer takes half the limit."""
    server.answer = lambda handler: time.sleep(0.2) or handler.usual()
    assert (Path(model_folder("Tiny/Model-1.5B", "model.path")) / "model.safetensors").exists()


def test_what_a_data_set_says_of_itself_is_shown_in_one_line(server, model):  # noqa: F811
    card = {"configs": [{"config_name": name, "data_files": "x"} for name in (f"a{EVIL}\nb", "c")]}
    server.dataset("tiny/sums", {"README.md": f"---\n{json.dumps(card)}\n---\n", "train.jsonl": jsonl({"a": 1})})
    data = hub.HubData(HubRepo("dataset", "tiny/sums"))
    text = refused(fetch_data, data, "data.train", {})
    assert "has several subsets" in text and text.isprintable()
