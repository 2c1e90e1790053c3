"""The task that follows published versions while requests are answered."""

from __future__ import annotations

import asyncio
import logging

from jaxrec.serve.artifact.load import ServedModel
from jaxrec.serve.artifact.refresh import Refresher
from jaxrec.serve.http.metrics import Metrics
from jaxrec.tier import VersionError

logger = logging.getLogger(__name__)


class Follower:
    """Looks for published versions, and takes them over.

    Args:
        served: The model.
        refresher: Takes versions over; None: there are none.
        seconds: Seconds between two looks.
        metrics: Metrics of the endpoint.
    """

    def __init__(
        self, served: ServedModel, refresher: Refresher | None, seconds: float, metrics: Metrics
    ) -> None:
        self._served, self._refresher = served, refresher
        self._seconds, self._metrics = seconds, metrics

    async def begin(self) -> None:
        """Take over the versions that are there before the first request.

        Raises:
            ValueError: They are of another model.
        """
        if self._refresher is not None:
            try:
                await self._update(self._refresher)
            except (OSError, VersionError) as error:
                self._report(error)

    async def follow(self) -> None:
        """Take versions over as they appear, until the task is cancelled."""
        while self._refresher is not None:
            await asyncio.sleep(self._seconds)
            try:
                await self._update(self._refresher)
            except Exception as error:  # the tables of before stay in use
                self._report(error)

    async def _update(self, refresher: Refresher) -> None:
        if await asyncio.to_thread(refresher.update):
            version = self._served.variables.version
            self._metrics.tables_version.set(version)
            logger.info("tables are of version %d", version)

    def _report(self, error: Exception) -> None:
        self._metrics.refresh_errors.inc()
        logger.warning("tables stay at version %d: %s", self._served.variables.version, error)
