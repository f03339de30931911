"""Urls that a user gives. Standard library only."""

from __future__ import annotations

from urllib.parse import urlsplit

_FORM = "needs the form http://HOST:PORT/v1"


def url_problem(url: str) -> str | None:
    """Return what is wrong with an endpoint's url, in words that do not repeat it; None if nothing
    is.
    """
    if " " in url or not url.isprintable():
        return f"holds a space or a sign that cannot be printed; it {_FORM}"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:  # whose message repeats the host, or what stands in the port's place
        return f"is no url; it {_FORM}"
    if "@" in parts.netloc or parts.query or parts.fragment:
        return (
            "holds a user name, a password or a query, which would stand in logs and checkpoints; "
            "put the key into an environment variable and name that: api_key_env=NAME"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return _FORM
    return None
