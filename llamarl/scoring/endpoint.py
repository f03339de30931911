"""An OpenAI-compatible endpoint: a question goes out, the text of the reply comes back.

    ask(question) --> POST URL/chat/completions --> text | NoReply: down, slow, refused, nonsense

Requests go to the given url and nowhere else: no redirect is followed, and neither proxies nor
credentials are taken from the environment or from files, save for the key that the user names.
"""

from __future__ import annotations

import asyncio
import email.utils
import ipaddress
import logging
import os
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_exponential,
)

from llamarl.words.texts import read_json, url_problem

if TYPE_CHECKING:
    from llamarl.scoring.kinds.judge import JudgeKindSettings

FIRST_PAUSE_S = 0.5  # before the first retry; each further one waits twice as long
LONGEST_PAUSE_S = 30.0
LONGEST_ASKED_S = 300.0  # the longest wait that a server may ask for (Retry-After)
JITTER = 0.5  # a pause is shorter by up to this share, so that retries do not come all at once
MAX_REPLY_BYTES = 1 << 20
_SHOWN_CHARACTERS = 200  # of a server's text
_PROBE = "Reply with the word yes."
# Statuses that may pass: timeout, too early, too many requests, and errors of the server.
_PASSING = frozenset((408, 425, 429, 500, 502, 503, 504))

FailureKind = Literal["down", "slow", "refused", "nonsense"]

log = logging.getLogger(__name__)


class NoReply(Exception):
    """A question got no usable reply. The message says why, and holds no credentials.

    kind: "down": no connection, or it broke; "slow": no reply in time; "refused": the server said
    no; "nonsense": its reply cannot be read. may_pass: asking again may help. retry_after_s: how
    long the server asks to wait first.
    """

    def __init__(
        self,
        kind: FailureKind,
        message: str,
        *,
        may_pass: bool = False,
        retry_after_s: float | None = None,
    ):
        super().__init__(f"judge {kind}: {message}")
        self.kind = kind
        self.may_pass = may_pass
        self.retry_after_s = retry_after_s


class Endpoint:
    """Asks one endpoint, many questions at a time. Made, used and closed in one event loop.

    section: of the configuration, whose keys messages name. ValueError for a url or a key that
    cannot be used.
    """

    def __init__(self, settings: JudgeKindSettings, section: str):
        check_url(settings, section)
        self._settings = settings
        self._section = section
        self._key = read_key(settings, section)
        self.counts: Counter[str] = Counter()  # requests, retries
        self._places = asyncio.Semaphore(settings.max_parallel)
        # Not the shared generator: its draws may be part of a reproducible run.
        self._random = random.Random()
        # Otherwise each request would be a line of the log.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        headers = {"Accept-Encoding": "identity"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
            _warn_of_open_key(settings, section)
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=None,  # _fetch has one for the whole of a request
            trust_env=False,
            follow_redirects=False,
            limits=httpx.Limits(max_connections=settings.max_parallel),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def probe(self) -> None:
        """Ask one question whose reply does not matter. NoReply if no reply comes."""
        await self._reply(_PROBE)

    async def ask(self, question: str) -> str:
        """Return the text of the reply. NoReply if there is no whole reply."""
        text, is_cut = await self._reply(question)
        if is_cut:
            remedy = f"raise {self._section}.max_tokens"
            raise NoReply("nonsense", f"the reply was cut off; {remedy}")
        return text

    async def _reply(self, question: str) -> tuple[str, bool]:
        """Return the text of the reply, and whether it was cut off at max_tokens."""
        body: dict[str, object] = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": question}],
        }
        for name in ("max_tokens", "temperature"):
            value = getattr(self._settings, name)
            if value is not None:
                body[name] = value
        # A request keeps its place while it waits for its next try, so that a slow server gets
        # fewer requests.
        async with self._places:
            return self._read(await self._insist(body))

    async def _insist(self, body: dict[str, object]) -> bytes:
        """Return the content of the reply. Failures that may pass are retried, max_retries times
        at most; all tries share timeout_s, and the pauses between them do not count.
        """
        left_s = self._settings.timeout_s

        async def fetch() -> bytes:
            nonlocal left_s
            began_at = time.monotonic()
            try:
                return await self._fetch(body, left_s)
            finally:
                left_s -= time.monotonic() - began_at

        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, NoReply) and error.may_pass),
            stop=stop_after_attempt(self._settings.max_retries + 1),
            wait=self._pause_s,
            before_sleep=lambda state: self.counts.update(["retries"]),
            reraise=True,
        )
        return await retrying(fetch)

    async def _fetch(self, body: dict[str, object], limit_s: float) -> bytes:
        """Return the content of a reply with status 200, that comes within limit_s."""
        self.counts["requests"] += 1
        url = f"{self._settings.url.rstrip('/')}/chat/completions"
        try:
            async with asyncio.timeout(limit_s):
                async with self._client.stream("POST", url, json=body) as response:
                    content = await _content_of(response)
        except TimeoutError as error:
            what = f"no reply in {self._section}.timeout_s={self._settings.timeout_s:g}"
            raise NoReply("slow", what) from error
        except httpx.RequestError as error:
            what = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise NoReply("down", self._shown(what), may_pass=True) from error
        if response.status_code == httpx.codes.OK:
            return content
        raise self._refusal(response, content)

    def _refusal(self, response: httpx.Response, content: bytes) -> NoReply:
        """Return why there is no reply, for a status other than 200."""
        section = self._section
        status = response.status_code
        what = f"HTTP {status}: {self._shown(content.decode(errors='replace'))}"
        if response.has_redirect_location:
            target = self._shown(response.headers["location"])
            remedy = f"which is not followed; set {section}.url"
            what = f"HTTP {status}, a redirect to {target}, {remedy}"
        if status in (401, 403):
            what += f"; {section}.api_key_env names the variable that holds the key"
        if status not in _PASSING:
            return NoReply("refused", what)
        retry_after_s = seconds_of(response.headers.get("retry-after"))
        if retry_after_s is not None and retry_after_s > LONGEST_ASKED_S:
            return NoReply("refused", f"{what}; it asks to wait more than {LONGEST_ASKED_S:g} s")
        return NoReply("refused", what, may_pass=True, retry_after_s=retry_after_s)

    def _pause_s(self, state: RetryCallState) -> float:
        """Return the seconds until the next try: exponentially more each time, with jitter, and at
        least as many as the server asks for.
        """
        growing = wait_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S)
        jittered_s = growing(state) * (1 - JITTER * self._random.random())
        assert state.outcome is not None, "there is a pause after a failure only"
        failure = state.outcome.exception()
        assert isinstance(failure, NoReply), "nothing else may pass"
        if failure.retry_after_s is None:
            return jittered_s
        return failure.retry_after_s + jittered_s * JITTER

    def _read(self, content: bytes) -> tuple[str, bool]:
        try:
            choice = read_json(content)["choices"][0]
            text = choice["message"]["content"]
            is_cut = choice.get("finish_reason") == "length"
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            shown = self._shown(content.decode(errors="replace"))
            raise NoReply("nonsense", f"no chat completion: {shown}") from error
        if is_cut and text is None:  # the model used all its tokens to think
            text = ""
        if not isinstance(text, str):
            raise NoReply("nonsense", f"its content is no text, but {type(text).__name__}")
        return text, is_cut

    def _shown(self, text: str) -> str:
        """Return the beginning of a server's text on one line. The key is taken out, in case the
        server repeats it.
        """
        if self._key is not None:
            text = text.replace(self._key, "(the key)")
        return shown(text)


def shown(text: str) -> str:
    """Return the beginning of a text, on one printable line."""
    line = " ".join(text.split())
    if len(line) > _SHOWN_CHARACTERS:
        line = f"{line[:_SHOWN_CHARACTERS]}..."
    return "".join(c if c.isprintable() else "?" for c in line)


async def _content_of(response: httpx.Response) -> bytes:
    """Read all of a reply, of any status."""
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MAX_REPLY_BYTES:
            raise NoReply("nonsense", f"the reply is longer than {MAX_REPLY_BYTES} bytes")
    return bytes(content)


def seconds_of(retry_after: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for, as a number or as a date; None if it
    asks for nothing that can be read (RFC 9110, 10.2.3).
    """
    if retry_after is None:
        return None
    number = retry_after.strip()
    if number.isdecimal():
        return float(number)
    try:
        then_s = email.utils.parsedate_to_datetime(retry_after).timestamp()
    except (ValueError, OverflowError, OSError):  # no date, or one that is no time of this machine
        return None
    return max(0.0, then_s - time.time())


def check_url(settings: JudgeKindSettings, section: str) -> None:
    """Raise ValueError if the settings' url is no endpoint's."""
    problem = url_problem(settings.url)
    if problem is not None:
        raise ValueError(f"{section}.url {problem}")


def read_key(settings: JudgeKindSettings, section: str) -> str | None:
    """Return the key in the environment variable that is named; None if none is named. ValueError
    if the variable is missing or the key fits no header; it does not show the key.
    """
    name = settings.api_key_env
    if name is None:
        return None
    setting = f"{section}.api_key_env"
    key = os.environ.get(name, "").strip()
    if not key:
        raise ValueError(
            f"{setting}={name}: the environment has no such variable, or it is empty; "
            f"export {name}=... on the reward's host, or {setting}=null"
        )
    if not (key.isascii() and key.isprintable()):
        raise ValueError(f"{setting}={name}: its value cannot be sent in an HTTP header")
    return key


def _warn_of_open_key(settings: JudgeKindSettings, section: str) -> None:
    """Warn if the key travels unencrypted to another host."""
    parts = urlsplit(settings.url)
    if parts.scheme == "https" or parts.hostname == "localhost":
        return
    try:
        is_here = ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        is_here = False
    if not is_here:
        url = f"{section}.url={settings.url}"
        log.warning("%s: the key travels unencrypted; use https", url)
