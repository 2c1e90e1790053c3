"""Data sets and readers: click logs in Criteo's format, and generated ones."""

from jaxrec.data.batches import ClickBatch as ClickBatch
from jaxrec.data.batches import batches as batches
from jaxrec.data.clicks import ClickLog as ClickLog
from jaxrec.data.clicks import Clicks as Clicks
from jaxrec.data.criteo import CriteoFile as CriteoFile
from jaxrec.data.generated import GeneratedLog as GeneratedLog
from jaxrec.data.prefetch import prefetch as prefetch
from jaxrec.data.text import DataError as DataError
