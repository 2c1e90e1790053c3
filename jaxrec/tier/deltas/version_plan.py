"""Plan of a folder's next version."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from typing import Any

from jaxrec.tier.deltas.folder import VersionError, VersionFolder, VersionName
from jaxrec.tier.deltas.manifest import File, Files, Manifest, TableFacts, num_bytes


@dataclasses.dataclass(frozen=True)
class VersionPlan:
    """Plan of the next version, and the totals of the versions before it.

    Attributes:
        version, token, base: As in its `Manifest`; ``base`` is None without a delta.
        is_full: Whether it is full.
        full_versions, delta_bytes, full_bytes, deltas: As in the `Manifest` before.
    """

    version: int
    token: str
    base: str | None
    is_full: bool
    full_versions: list[int]
    delta_bytes: int
    full_bytes: int
    deltas: int

    @property
    def name(self) -> VersionName:
        return VersionName(self.version, self.token)

    def manifest(
        self,
        facts: dict[str, TableFacts],
        dense: File,
        delta: Files | None,
        full: Files | None,
        step: int | None,
        keep: int,
    ) -> Manifest:
        """Return the manifest of the version."""
        full_versions = self.full_versions + ([self.version] if self.is_full else [])
        return Manifest(
            self.version,
            self.token,
            step,
            time.time(),
            facts,
            dense,
            delta,
            self.base,
            full,
            full_versions[-keep:],
            delta_bytes=0 if full is not None else self.delta_bytes + num_bytes(delta or {}),
            full_bytes=self.full_bytes if full is None else num_bytes(full),
            deltas=0 if full is not None else self.deltas + 1,
        )


def plan_version(
    folder: VersionFolder,
    position: str | None,
    facts: dict[str, TableFacts],
    full_every: int | None,
) -> dict[str, Any]:
    """Decide what the next version is, and make its folder; return the fields of `VersionPlan`."""
    names = folder.names()
    newest: Manifest | None = None
    if names:
        # After a damaged manifest the next version is full.
        with contextlib.suppress(VersionError):
            newest = folder.read_manifest(names[-1])
    version, token = (names[-1].version if names else 0) + 1, secrets.token_hex(8)
    plan = VersionPlan(version, token, None, True, [], 0, 0, 0)
    if newest is not None:
        follows = position == newest.token and newest.tables == facts
        is_due = (
            newest.delta_bytes >= newest.full_bytes
            if full_every is None
            else newest.deltas + 1 >= full_every
        )
        plan = dataclasses.replace(
            plan,
            base=newest.token if follows else None,
            is_full=is_due or not follows,
            full_versions=newest.full_versions,
            delta_bytes=newest.delta_bytes,
            full_bytes=newest.full_bytes,
            deltas=newest.deltas,
        )
    folder.begin(plan.name)
    return dataclasses.asdict(plan)
