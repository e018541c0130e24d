"""A browser for tests of pages: Debian's chromium without a window, driven by its DevTools protocol."""

import asyncio
import base64
import itertools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import aiohttp
import pytest

START_S = 60.0
MINE = ("chromium", "chromium-browser", "google-chrome")


class Navigated(Exception):
    """The page was left for another one before the browser could answer."""


class Chromium:
    """One tab. `errors` holds what its pages wrote on the console as errors or warnings, and exceptions in them.

    Example:
        with Chromium(folder) as browser:
            browser.open("http://127.0.0.1:8000/", width=400)
            browser.wait("document.title === 'ready'")
            assert browser.errors == []
    """

    def __init__(self, folder: Path):
        """Skips the test if there is no such browser. `folder`: for its profile."""
        program = next(filter(None, map(shutil.which, MINE)), None)
        if program is None:
            pytest.skip("no browser: apt-get install chromium (Debian's package)")
        self._folder, self._program = folder, program
        self.errors: list[str] = []
        self._numbers = itertools.count(1)
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> "Chromium":
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        options = ["--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"]
        options += ["--remote-debugging-port=0", f"--user-data-dir={self._folder}", *sandbox]
        self._process = subprocess.Popen(
            [self._program, "--headless=new", *options, "--hide-scrollbars", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._run(self._connect())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._run(self._disconnect())
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._loop.close()

    def open(self, address: str, width: int = 1300, height: int = 900, dark: bool = False) -> None:
        """Loads a page, in a window of that many CSS pixels."""
        self.show(width, height, dark)
        self.leave()  # another fragment alone would not load anything
        self.call("Page.navigate", url=address)
        self.wait("location.protocol !== 'about:' && document.readyState === 'complete'")

    def show(self, width: int = 1300, height: int = 900, dark: bool = False) -> None:
        """Has the page shown in a window of that many CSS pixels, in light or dark."""
        self.resize(width, height)
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=media)

    def leave(self) -> None:
        """Leaves the page, which then asks its server for nothing more."""
        self.call("Page.navigate", url="about:blank")
        self.wait("location.protocol === 'about:'")

    def resize(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def value(self, expression: str):
        """Returns the value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 20.0):
        """Waits until an expression is true, also of the page to which a link is leading meanwhile, and returns its
        value."""
        deadline = time.monotonic() + timeout_s
        while not (found := self._value_there(expression)):
            assert time.monotonic() < deadline, f"not true within {timeout_s:g} s: {expression}; {self.errors}"
            time.sleep(0.05)
        return found

    def _value_there(self, expression: str):
        """Returns the value of an expression; None if the page is left before it is known."""
        try:
            return self.value(expression)
        except Navigated:
            return None

    def screenshot(self, path: Path) -> None:
        """Writes a PNG of the whole page."""
        height = self.value("document.documentElement.scrollHeight")
        self.resize(self.value("innerWidth"), height)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def call(self, method: str, **parameters) -> dict:
        return self._run(self._call(method, parameters))

    def _run(self, work):
        return self._loop.run_until_complete(work)

    async def _connect(self) -> None:
        self._session = self._socket = None
        announced, deadline = self._folder / "DevToolsActivePort", time.monotonic() + START_S
        while not announced.exists() or len(announced.read_text().split()) < 2:
            assert time.monotonic() < deadline and self._process.poll() is None, "the browser does not start"
            await asyncio.sleep(0.05)
        port = announced.read_text().split()[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as response:
            (tab,) = [target for target in await response.json() if target["type"] == "page"]
        self._socket = await self._session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)
        for domain in ("Page", "Runtime", "Log"):
            await self._call(f"{domain}.enable", {})

    async def _disconnect(self) -> None:
        if self._socket:
            await self._socket.close()
        if self._session:
            await self._session.close()

    async def _call(self, method: str, parameters: dict) -> dict:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=60)
            if message.get("id") == number:
                if "navigated" in message.get("error", {}).get("message", ""):
                    raise Navigated(message["error"]["message"])
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def _note(self, event: dict) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif event.get("method") == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(str(parameters["args"]))
