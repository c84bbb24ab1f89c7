"""A headless Chromium through its driver's own protocol, without a package: with browser(width=390) as page: …"""

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--allow-file-access-from-files"]


def missing():
    """What is missing for a browser, in words, or None."""
    lacks = [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    return f"needs {' and '.join(lacks)} (apt-get install chromium chromium-driver)" if lacks else None


class Page:
    def __init__(self, address):
        self.address = address

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]

    def open(self, url):
        """Go there, and wait until pictures and styles are there, too: the driver's own wait sometimes ends earlier."""
        self.call("POST", "/url", {"url": url})
        loaded = """return document.readyState === "complete" && [...document.images].every((i) => i.complete)
            && [...document.styleSheets].length >= document.querySelectorAll("link[rel=stylesheet]").length"""
        for _ in range(200):
            if self.run(loaded):
                return
            time.sleep(0.05)

    def run(self, script, *arguments):
        """JavaScript as the body of a function; returns what it returns."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def console(self):
        """Errors and warnings since the last call."""
        return [line["message"] for line in self.call("POST", "/se/log", {"type": "browser"})
                if line["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))


@contextlib.contextmanager
def browser(*, width, height=900, phone=False):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as profile:
        options = {"args": [*FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}"]}
        if phone:
            options["mobileEmulation"] = {"deviceMetrics": {"width": width, "height": height, "pixelRatio": 2}}
        driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)
        start, page = Page(f"http://127.0.0.1:{port}"), None
        try:
            for _ in range(100):
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    if start.call("GET", "/status")["ready"]:
                        break
                time.sleep(0.1)
            session = start.call("POST", "/session", {"capabilities": {"alwaysMatch": {
                "browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}})
            page = Page(f"{start.address}/session/{session['sessionId']}")
            yield page
        finally:
            with contextlib.suppress(Exception):
                page and page.call("DELETE", "")
            driver.terminate()
            driver.wait()
