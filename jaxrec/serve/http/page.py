"""The page at ``/``."""

from __future__ import annotations

import base64
import hashlib
import pathlib
import re

HTML = pathlib.Path(__file__).with_name("page.html").read_bytes()


def _hashes(tag: str) -> str:
    """Return the hashes of the page's scripts or styles, as its policy names them."""
    found = re.findall(rb"<%s>(.*?)</%s>" % (tag.encode(), tag.encode()), HTML, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(content).digest()).decode() for content in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


# The page runs its own script alone, and asks this server alone.
HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
