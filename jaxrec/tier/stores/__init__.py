"""Row stores: rows that do not fit the devices, in memory, files, RocksDB or Redis."""

from jaxrec._public import public_names as _public_names
from jaxrec.tier.stores.record_format import RecordFormat as RecordFormat
from jaxrec.tier.stores.row_store import RowStore as RowStore
from jaxrec.tier.stores.urls import open_store as open_store
from jaxrec.tier.stores.urls import url_for as url_for

__all__ = _public_names(globals())


def __dir__() -> list[str]:
    return __all__
