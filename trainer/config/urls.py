"""Recognise URLs among the settings that take a path, and refuse those that hold credentials.

A setting of type `Path` keeps a URL as the path s3:/bucket/key, because pathlib joins repeated slashes; `url_of` gives
the URL back. Local paths are absolute once a configuration is read, so the two cannot be confused.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath
from typing import Annotated
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import AfterValidator, PlainSerializer

from onward.trainer.bounds import PATH_BYTES, PATH_PART_BYTES

PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
}
"""Scheme -> the package with which fsspec opens it."""
EXTRAS = {
    "s3fs": "remote",
    "aiohttp": "remote",
    "gcsfs": "gcs",
    "adlfs": "azure",
    "huggingface_hub": "huggingface",
}
"""Such a package -> the extra of Onward that has it."""
CREDENTIALS = {
    "s3fs": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or ~/.aws/credentials",
    "gcsfs": "GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth application-default login`",
    "adlfs": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    "huggingface_hub": "HF_TOKEN, or `hf auth login`",
    "aiohttp": "~/.netrc (NETRC names another file)",
}
"""Package -> where it finds credentials."""
HARMLESS = {"alt", "dl", "download", "format", "id", "path", "raw", "ref", "rev", "revision", "version", "versionid"}
"""Query parameters that hold no credentials, in lower case."""

REGISTRIES = ("models", "runs")
"""The schemes of MLflow: `models:/NAME@champion`, `runs:/ID/model`."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?:/|(?!/))(.*)", re.DOTALL)


def url_of(location: str | PurePath) -> str:
    """Return the URL that a setting names, also one that pathlib has shortened; "" for a local path."""
    found = _URL.fullmatch(str(location))
    # MLflow writes one slash behind the scheme
    if found and found[1] in REGISTRIES:
        return f"{found[1]}:/{found[2].lstrip('/')}"
    # a file may have a colon in its name: without two slashes only schemes that are known count
    if not found or (found[1].lower() not in PACKAGES and "://" not in str(location)):
        return ""
    return f"{found[1].lower()}://{found[2].lstrip('/')}"


def is_registered(url: str) -> bool:
    """Return whether MLflow's registry, or a run in MLflow, has what the URL names."""
    return url.startswith(tuple(f"{scheme}:/" for scheme in REGISTRIES))


def redacted(url: str) -> str:
    """Return a URL without user name, password and query, for messages."""
    if is_registered(url):
        return url
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def credentials_hint(url: str) -> str:
    """Return where the library that opens the URL finds credentials."""
    return CREDENTIALS[PACKAGES[urlsplit(url).scheme]]


def check_url(location: str) -> str:
    """Return a location as it is kept. Raises ValueError for a URL that cannot be read or holds credentials."""
    url = url_of(location)
    if not url:
        _check_length(location)
        return location
    if is_registered(url):
        return url
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:  # such as an IPv6 address without its bracket
        raise ValueError(f"{location[:80]!r} is not a URL: {error}") from None
    if parts.scheme not in PACKAGES:
        raise ValueError(f"{redacted(url)} has scheme {parts.scheme}://; known are {', '.join(PACKAGES)}")
    if not parts.netloc or (not parts.path.strip("/") and parts.scheme not in ("s3", "s3a", "gs", "gcs")):
        raise ValueError(f"{redacted(url)} names no file")
    user = parts.netloc.rpartition("@")[0]
    # Azure writes container@account; a colon always is a password
    if (user and parts.scheme not in ("abfs", "abfss")) or ":" in user:
        raise ValueError(_without_credentials(url, "a user name or password"))
    if secret := sorted({name for name, _ in parse_qsl(parts.query, True) if name.lower() not in HARMLESS}):
        raise ValueError(_without_credentials(url, f"the query parameters {', '.join(secret)}"))
    # libraries decode %2e before they ask for the path
    if "//" in parts.path or ".." in unquote(parts.path).split("/"):
        raise ValueError(f"{redacted(url)} has an empty part or '..' in its path, which cannot be kept as a path")
    return url


def _check_length(path: str) -> None:
    """Raise ValueError for a path that no file can have."""
    if "\0" in path:
        raise ValueError("holds a null character, which no path may")
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        raise ValueError("holds half of a surrogate pair, which is no character of Unicode") from None
    for limit, found in ((PATH_BYTES, len(encoded)), (PATH_PART_BYTES, max(map(len, encoded.split(b"/"))))):
        if found > limit.most:
            raise ValueError(f"has {limit.exceeded(found)}")


def _without_credentials(url: str, what: str) -> str:
    return (
        f"{redacted(url)} is given with {what}: credentials in a URL would get into records and logs; give the URL "
        f"without, and the credentials by {credentials_hint(url)}"
    )


def _check_path(path: Path) -> Path:
    return Path(check_url(str(path)))


def _as_text(path: Path) -> str:
    return url_of(path) or str(path)


FilePath = Annotated[Path, AfterValidator(_check_path), PlainSerializer(_as_text, return_type=str, when_used="json")]
"""A local path or a URL."""
Location = Annotated[str, AfterValidator(check_url)]
"""A local path, a glob or a URL, as text; or a name such as `digits`."""
