"""The type of options that name data: paths of this machine, and addresses of others."""

from __future__ import annotations

import pathlib
from typing import Annotated

from tyro.constructors import PrimitiveConstructorSpec

from jaxrec.data.addresses import data_path

# tyro makes a `pathlib.Path` of text, which takes a slash from "s3://bucket".
DataPath = Annotated[
    pathlib.Path,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH|ADDRESS",
        instance_from_str=lambda texts: data_path(texts[0]),
        is_instance=lambda value: isinstance(value, pathlib.Path),
        str_from_instance=lambda path: [str(path)],
    ),
]
