"""Sphinx extension for a folder per version, without a service: plain files that any server serves.

    python -m sphinx -W -D versions_url=/ docs site/0.2.0

``versions_url`` is the address at which the folder of all versions, ``site``, is served; without it
there is one version. A page then has a menu of versions. The folder's ``switcher.json`` lists them,
and its ``index.html`` leads to the newest.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ConfigError

VERSION = re.compile(r"\d+(?:\.\d+)+")
LIST = "switcher.json"


def add_menu(app: Sphinx, config: Config) -> None:
    if not config.versions_url:
        return
    outdir = pathlib.Path(app.outdir)
    if outdir.name != config.version:
        raise ConfigError(
            f"With versions_url, a site is built in a folder named as its version: give "
            f"{outdir.parent / config.version} instead of {outdir}"
        )
    config.html_theme_options |= {
        "switcher": {"json_url": config.versions_url + LIST, "version_match": config.version},
        "check_switcher": False,  # The list is written below.
        "navbar_end": ["version-switcher", "theme-switcher", "navbar-icon-links"],
    }


def list_versions(app: Sphinx, error: Exception | None) -> None:
    if error is not None or not app.config.versions_url or app.builder.name != "html":
        return
    folder = pathlib.Path(app.outdir).parent
    names = (page.parent.name for page in folder.glob("*/index.html"))
    versions = sorted(filter(VERSION.fullmatch, names), key=numbers, reverse=True)
    urls = {version: f"{app.config.versions_url}{version}/" for version in versions}
    entries = [{"version": version, "url": url} for version, url in urls.items()]
    (folder / LIST).write_text(json.dumps(entries, indent=1) + "\n")
    if not versions:  # a pre-release alone
        return
    newest = urls[versions[0]]
    (folder / "index.html").write_text(
        f'<!doctype html>\n<meta http-equiv="refresh" content="0; url={newest}">\n'
        f'<link rel="canonical" href="{newest}">\n'
    )


def numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("versions_url", "", "html", str)
    app.connect("config-inited", add_menu)
    app.connect("build-finished", list_versions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
