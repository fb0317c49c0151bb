"""Credentials in the URLs of a broker, apart from the addresses. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from shared.bus.access import from_urls


@dataclass(frozen=True, slots=True)
class SplitUrls:
    """Addresses without credentials, and the user and password, or the token, that the URLs had; "" for none."""

    bare: tuple[str, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)


def split_urls(urls: Sequence[str]) -> SplitUrls:
    """Return ``urls`` in parts; those without credentials are as they were given.

    Raises ConfigError when they name different users.
    """
    access = from_urls(urls)
    bare = (short if _has_user(url) else url for url, short in zip(urls, access.urls, strict=True))
    return SplitUrls(tuple(bare), access.user, access.password, access.token)


def _has_user(url: str) -> bool:
    return "@" in urlsplit(url if "://" in url else f"nats://{url}").netloc
