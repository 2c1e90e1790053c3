"""The directory of what this machine keeps."""

from __future__ import annotations

from jaxrec.files.cache import cache_directory


def test_the_directory_can_be_named(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXREC_CACHE_DIR", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("JAXREC_CACHE_DIR")
    assert cache_directory().name == "jaxrec"
