"""Download one file whose hash is known: resumed where it broke off, checked, renamed into place.

State: the target and, while it is incomplete, `<target>.part` beside it. Refuses everything of zl but errors.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import http.client
import os
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from zl.errors import TransferError

Progress = Callable[[str, int, int], None]
"""progress(what, done_bytes, total_bytes); total 0 while unknown."""

_CHUNK = 1 << 18
_TRIES = 5
_TIMEOUT_S = 30.0
_BROKEN_LINE = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ssl.SSLError)


def file_sha256(path: Path) -> str:
    """Hash a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(
    url: str, target: Path, sha256: str, progress: Progress | None = None, settings: Mapping[str, str] | None = None
) -> None:
    """Fetch `url` into `target`, going on from `<target>.part` where there is one.

    url       http, https or file
    settings  `cert` and `proxy`; default: pip's
    Raises    ModelError: no connection, an HTTP error, or a hash that is not `sha256`
    """
    part = target.with_name(target.name + ".part")
    opener = _opener(pip_settings() if settings is None else settings)
    resumed = part.exists() and part.stat().st_size > 0
    _fetch_all(opener, url, part, progress)
    if (found := file_sha256(part)) != sha256 and resumed:
        # What lay there may have been of another file: once more, from the start.
        part.unlink()
        _fetch_all(opener, url, part, progress)
        found = file_sha256(part)
    if found != sha256:
        part.unlink()
        raise TransferError(f"{_bare(url)} has sha256 {found}, expected {sha256}: a proxy or mirror alters it")
    part.replace(target)


def pip_settings() -> dict[str, str]:
    """Read `cert` and `proxy` as pip sees them: the environment before the configuration files. Empty without pip."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    found: dict[str, str] = {}
    for line in done.stdout.splitlines():
        key, equals, value = line.partition("=")
        scope, _, name = key.rpartition(".")
        if not equals or name not in ("cert", "proxy") or scope not in (":env:", "global", "install", "download"):
            continue
        with contextlib.suppress(ValueError, SyntaxError):
            text = str(ast.literal_eval(value))
            if scope == ":env:" or name not in found:
                found[name] = text
    return found


def _opener(settings: Mapping[str, str]) -> urllib.request.OpenerDirector:
    context = ssl.create_default_context()
    bundle = settings.get("cert") or os.environ.get("REQUESTS_CA_BUNDLE", "")
    if bundle:
        with contextlib.suppress(OSError, ssl.SSLError):
            context.load_verify_locations(cafile=bundle)
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    if settings.get("proxy"):
        handlers.append(urllib.request.ProxyHandler({"http": settings["proxy"], "https": settings["proxy"]}))
    return urllib.request.build_opener(*handlers)


def _fetch_all(opener: urllib.request.OpenerDirector, url: str, part: Path, progress: Progress | None) -> None:
    """Fetch until the file is whole; a connection that breaks is taken up again where it ended."""
    tries = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            if _fetch_once(opener, url, part, progress):
                return
            error: Exception | None = None
        except urllib.error.HTTPError as caught:
            if caught.code < 500:
                raise TransferError(f"{_bare(url)}: HTTP {caught.code} {caught.reason}") from caught
            error = caught
        except _BROKEN_LINE as broken:
            error = broken
        # Only tries that brought nothing count, so that a bad line still gets a large file.
        tries = 0 if part.exists() and part.stat().st_size > before else tries + 1
        if tries >= _TRIES:
            reason = getattr(error, "reason", None) or error or "the server sends too little"
            raise TransferError(f"{_bare(url)}: {reason}") from error
        time.sleep(0.2 * tries)


def _fetch_once(opener: urllib.request.OpenerDirector, url: str, part: Path, progress: Progress | None) -> bool:
    """Make one request; say whether the file is whole afterwards."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(_bare(url), headers={"User-Agent": "zl", "Accept-Encoding": "identity"})
    parts = urllib.parse.urlsplit(url)
    if parts.username is not None:
        pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        # Unredirected: a redirect to another host must not carry them along.
        request.add_unredirected_header("Authorization", "Basic " + base64.b64encode(pair.encode()).decode())
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        answer = opener.open(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        # Nothing lies behind our end: the file is whole, or not the one that is there now; the hash will tell.
        error.close()
        return True
    with answer, part.open("ab") as sink:
        span = answer.headers.get("Content-Range", "")
        if not (have and getattr(answer, "status", 200) == 206 and span.startswith(f"bytes {have}-")):
            sink.truncate(0)
            have = 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else 0
        while chunk := answer.read(_CHUNK):
            sink.write(chunk)
            have += len(chunk)
            if progress:
                progress("fetching", have, total)
    return not total or have >= total


def _bare(url: str) -> str:
    """Return the URL without user name and password: for messages, and because http.client takes them for a host."""
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
