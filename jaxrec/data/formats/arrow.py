"""Arrow's own files (Feather) and streams, such as those of a saved Hugging Face data set."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pyarrow as pa

from jaxrec.data.files import DataError
from jaxrec.data.formats.base import Format, Types
from jaxrec.data.views import schema_without_views, without_views

_FILE = b"ARROW1"


class Arrow(Format):
    """Arrow IPC files and streams; they hold the types of their columns.

    They are read in place, so the file itself must not be compressed; its buffers may be.
    """

    name = "Arrow"
    suffixes = (".arrow", ".feather", ".ipc", ".arrows")
    compression = "$"
    takes_types = False

    def tables(self, path: pathlib.Path, types: Types, guesses: Types) -> Iterator[pa.Table]:
        try:
            with pa.memory_map(str(path)) as source:
                if source.read(len(_FILE)) == _FILE:
                    file = pa.ipc.open_file(source)
                    batches = (file.get_batch(n) for n in range(file.num_record_batches))
                    schema = file.schema
                else:
                    source.seek(0)
                    batches = stream = pa.ipc.open_stream(source)
                    schema = stream.schema
                yield schema_without_views(schema).empty_table()  # a file may have no rows
                for batch in batches:
                    # A damaged offset would make Arrow read other memory.
                    batch.validate(full=True)
                    yield without_views(pa.Table.from_batches([batch]))
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DataError(
                f"{path} is no Arrow file or stream, or damaged ({' '.join(str(error).split())})"
            ) from None
