"""Exported models that somebody edited, checksums included."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
from jax import export
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jaxrec.files.manifest import describe_files
from jaxrec.serve import load


def write_manifest(path: pathlib.Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest, checksum included."""
    content = json.loads((path / "manifest.json").read_text())
    content.pop("crc32")
    change(content)
    crc = f"{zlib.crc32(json.dumps(content).encode()):08x}"
    (path / "manifest.json").write_text(json.dumps({**content, "crc32": crc}))


def write_checksums(path: pathlib.Path) -> None:
    """Let the manifest have the sizes and checksums that the files have."""
    files = msgspec.to_builtins(describe_files(path))
    del files["manifest.json"]
    write_manifest(path, lambda manifest: manifest.update(files=files))


def edit_programs(
    path: pathlib.Path, change: Callable[[str], str], *, is_text: bool = False
) -> None:
    """Change the text of all programs of a model in both of their files.

    Args:
        path: The model.
        change: Returns the changed text.
        is_text: Whether the file for C++ is the text, which MLIR's reader takes, too.
    """
    for file in sorted((path / "programs").glob("*.jax")):
        exported = export.deserialize(bytearray(file.read_bytes()))
        with mlir.make_ir_context() as context:
            module = stablehlo.deserialize_portable_artifact(
                context, exported.mlir_module_serialized
            )
            changed = ir.Module.parse(change(str(module)))
            version = stablehlo.get_current_version()
            artifact = stablehlo.serialize_portable_artifact(changed, version)
        edited = dataclasses.replace(exported, mlir_module_serialized=artifact)
        file.write_bytes(edited.serialize())
        if (bytecode := file.with_suffix(".mlirbc")).exists():
            bytecode.write_bytes(change(str(module)).encode() if is_text else artifact)
    write_checksums(path)


def predict(connection, batch: tuple[Any, ...]) -> None:
    """Load models and predict a batch with each; send its error, "" if there is none."""
    while path := connection.recv():
        try:
            load(path).predict(*batch)
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")
        else:
            connection.send("")
