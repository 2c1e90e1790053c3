"""Files behind addresses are those of this machine: found, read by ranges, converted, named."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pathlib
import pickle
import re
import subprocess
import sys
import urllib.request
from typing import ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from jaxrec.commands import main
from jaxrec.data import DataError, ParquetGroups
from jaxrec.data.addresses import Address, data_path
from jaxrec.data.formats import conversion
from jaxrec.data.formats.conversion import table_files
from tests.data.hub import serve_hub

pytestmark = pytest.mark.every_case


def parquet(columns: dict, **options) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, **options)
    return sink.getvalue()


def feather(columns: dict) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table(columns)
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


WIDE = {f"c{n}": np.random.default_rng(n).integers(0, 1 << 60, 4000) for n in range(20)}
FILES = {
    "parts/day=10/country=a%2Fb/part-0.parquet": parquet({"x": [3]}),
    "parts/day=2/country=DE/part-10.parquet": parquet({"x": [2]}),
    "parts/day=2/country=DE/part-2.parquet": parquet({"x": [1]}),
    "parts/_SUCCESS": b"",
    "parts/_temporary/0/part-0.parquet": b"",
    "text/day=1/rows.csv": b"x,y\n1,a\n2,b\n",
    "text/day=2/rows.csv": b"x,y\n3,c\n",
    "rows.jsonl": b'{"x": 1, "y": "a"}\n',
    "rows.feather": feather({"x": [1], "y": ["a"]}),
    "bad.csv": b"x,y\n1,2\n3\n",
    "bad.parquet": b"PAR1" + b"\0" * 40,
    "bad.avro": b"Obj\x01rest",
    "wide.parquet": parquet(WIDE, row_group_size=2000),
    "delta/_delta_log/0.json": b"",
    "delta/part.parquet": b"",
    "saved/state.json": json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}).encode(),
    "saved/data-0.arrow": feather({"x": [7], "y": ["s"]}),
    "saved/data-1.arrow": b"of another time",
}
X_Y = {"x": [1], "y": ["a"]}


class Watched(MemoryFileSystem):
    """A file system of its own whose ranges are counted, and which refuses and loses files."""

    protocol = "watched"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    ranges: ClassVar[list] = []
    lost: ClassVar[bool] = False

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("watched://", "memory://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        self.ranges.append((path, start, end))
        return super().cat_file(path, start=start, end=end)

    def info(self, path, **kwargs):
        if "secret" in path:
            raise PermissionError("Forbidden")
        if "nobody" in path:
            raise type("NoCredentialsError", (Exception,), {})("Unable to locate credentials")
        return super().info(path, **kwargs)

    def get_file(self, rpath, lpath, **kwargs):
        if "text" in rpath and "day=2" in rpath and self.lost:
            pathlib.Path(lpath).write_bytes(b"x,y\n")
            raise ConnectionError("connection lost")
        super().get_file(rpath, lpath, **kwargs)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("JAXREC_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True, scope="module")
def files():
    fsspec.register_implementation("watched", Watched, clobber=True)
    system = fsspec.filesystem("watched")
    for name, content in FILES.items():
        system.pipe(f"/bucket/{name}", content)


def rows(path) -> dict:
    found = table_files(path)
    groups = ParquetGroups.of_files(found)
    tables = [groups.read(group) for group in range(len(groups.sizes))]
    return pa.concat_tables(tables).to_pydict()


PARTS = {"x": [1, 2, 3], "day": [2, 2, 10], "country": ["DE", "DE", "a/b"]}
READ = {
    "parquet": ("parts", PARTS),
    "files": ("parts/day=2/*/*.parquet", {n: PARTS[n][:2] for n in ("x", "country")}),
    "directories": ("parts/day=*", PARTS),
    "csv": ("text", {"x": [1, 2, 3], "y": ["a", "b", "c"], "day": [1, 1, 2]}),
    "one_csv": ("text/day=2/rows.csv", {"x": [3], "y": ["c"]}),
    "json": ("rows.jsonl", X_Y),
    "arrow": ("rows.feather", X_Y),
    "saved": ("saved", {"x": [7], "y": ["s"]}),
}


@pytest.mark.parametrize(("path", "wanted"), READ.values(), ids=READ)
def test_rows(path, wanted):
    assert rows(f"watched://bucket/{path}") == wanted
    # A path that Python's own class has made lost a slash.
    assert rows(pathlib.Path(f"watched://bucket/{path}")) == wanted


def test_ranges_of_the_columns_alone_are_read():
    groups = ParquetGroups.of_directory("watched://bucket/wide.parquet", ["c3", "c4", "c17"])
    assert groups.sizes == (2000, 2000)
    Watched.ranges.clear()
    for group in range(2):
        table = groups.read(group)
        part = slice(2000 * group, 2000 * group + 2000)
        assert all(table[name].to_numpy().tolist() == WIDE[name][part].tolist()
                   for name in ("c3", "c4", "c17"))  # fmt: skip
    # Columns 3 and 4 lie side by side; the footer was read before.
    sizes = [end - start for _, start, end in Watched.ranges]
    assert len(sizes) == 4
    assert sum(sizes) < len(FILES["wide.parquet"]) * 0.2


ERRORS = {
    "missing": ("none.csv", FileNotFoundError, "there is no such file or directory: '.*none.csv'"),
    "missing_parquet": ("none.parquet", FileNotFoundError, "there is no such file or directory"),
    "no_match": ("none*", DataError, "no Parquet file matches this pattern"),
    "denied": ("secret.csv", PermissionError, "is denied .Forbidden.; give credentials .*secret"),
    "nobody": ("nobody.csv", PermissionError, "Unable to locate cred.*docs/your_own_data.md"),
    "bad_csv": ("bad.csv", DataError, r"^watched://bucket/bad.csv, line 3: .*Expected 2 columns"),
    "bad_parquet": ("bad.parquet", DataError, "^watched://bucket/bad.parquet is not a Parquet"),
    "avro": ("bad.avro", DataError, "bad.avro is an Avro file; .*polars.read_avro"),
    "delta": ("delta", DataError, "watched://bucket/delta is a Delta table"),
    "formats": ("", DataError, "watched://bucket is a Delta table"),
}


@pytest.mark.parametrize(("path", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_address(path, kind, message):
    with pytest.raises(kind, match=message):
        rows(f"watched://bucket/{path}".rstrip("/"))


SCHEMES = {
    "extra": ("s3://bucket/x.csv", ImportError, r"pip install 'jaxrec\[s3\]'"),
    "other": ("abfs://bucket/x.csv", ImportError, "Install adlfs"),
    "unknown": ("nothing://bucket/x.csv", OSError, "Protocol not known: nothing"),
    "chain": ("zip://x.csv::s3://bucket/x.zip", OSError, "a chain of addresses is not read"),
}


@pytest.mark.parametrize(("path", "kind", "message"), SCHEMES.values(), ids=SCHEMES)
def test_schemes(path, kind, message, monkeypatch):
    monkeypatch.setattr(REGISTRY, "get_filesystem_class", _without_packages)
    with pytest.raises(kind, match=message):
        table_files(path)


# The package has a mapping of this name, too.
REGISTRY = sys.modules["fsspec.registry"]


def _without_packages(protocol):
    if protocol in REGISTRY.known_implementations:
        raise ImportError(REGISTRY.known_implementations[protocol]["err"])
    raise ValueError(f"Protocol not known: {protocol}")


def test_a_lost_connection_leaves_nothing(monkeypatch):
    monkeypatch.setattr(Watched, "lost", True)
    with pytest.raises(OSError, match=r"day=2/rows.csv'|connection lost"):
        rows("watched://bucket/text")
    assert not [x for x in conversion.cache_directory().rglob("[!.]*") if x.is_file()]
    monkeypatch.setattr(Watched, "lost", False)
    assert rows("watched://bucket/text")["x"] == [1, 2, 3]
    kept = [x.name for x in conversion.cache_directory().rglob("[!.]*") if x.is_file()]
    assert kept == ["rows.csv.parquet"] * 2


def test_a_file_that_changed_is_converted_again():
    system = fsspec.filesystem("watched")
    for text in ("x\n1\n", "x\n2\n"):
        system.pipe("/bucket/changing.csv", text.encode())
        address = Address("watched://bucket/changing.csv")
        assert rows(address) == rows(str(address)) == {"x": [int(text[2])]}
    system.rm("/bucket/changing.csv")


def test_paths():
    address = data_path("s3://bucket/day=1/x.csv.gz")
    assert isinstance(address, Address)
    assert (address.parent / "y").name == "y"
    assert [str(x) for x in (address, address.parent, address.with_suffix(".bz2"))] == [
        "s3://bucket/day=1/x.csv.gz", "s3://bucket/day=1", "s3://bucket/day=1/x.csv.bz2",
    ]  # fmt: skip
    assert str(address.relative_to("s3://bucket")) == "day=1/x.csv.gz"
    assert pickle.loads(pickle.dumps(address)) == address == address.absolute()
    assert os.fspath(data_path(pathlib.Path("s3://bucket/x"))) == "s3://bucket/x"
    assert type(data_path("file:///data/x.csv")) is type(data_path("x:y/z")) is pathlib.PosixPath
    assert str(data_path("file:///data/x.csv")) == "/data/x.csv"
    assert Address("https://host/day=1/rows.csv?token=a").suffix == ".csv"
    with pytest.raises(OSError, match="never written"):
        address.open("wb")


def test_a_run_remembers_the_address(tmp_path):
    from jaxrec.train.config import load_config, parse_options, write_options

    config = parse_options(["--data", "s3://bucket/parts", "--data.eval-path", "gs://b/x.csv"])
    write_options(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml").data == config.data
    assert str(config.data.path) == "s3://bucket/parts"


OUTPUTS = {
    "train": ["train", "--data", "x.csv", "--output", "s3://bucket/run"],
    "predict": ["predict", "model", "x.csv", "-o", "s3://bucket/run"],
    "histories": ["data", "histories", "x.csv", "s3://bucket/run"],
}


@pytest.mark.parametrize("command", OUTPUTS.values(), ids=OUTPUTS)
def test_outputs_are_of_this_machine(tmp_path, capsys, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert re.search("the output is a .* of this machine, got s3://bucket/run", error)
    assert not [*tmp_path.iterdir()]


@pytest.fixture
def s3(monkeypatch):
    """The address of a server of S3 with a bucket."""
    for name in ("moto", "s3fs"):
        pytest.importorskip(name, reason="needs pip install 'moto[server]' and 'jaxrec[s3]'")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    system = fsspec.filesystem("s3", skip_instance_cache=False)
    system.mkdir("bucket")
    try:
        yield endpoint
    finally:
        with contextlib.suppress(OSError):
            _allow(endpoint, "inf")
        fsspec.filesystem("s3").clear_instance_cache()
        server.stop()


def _allow(endpoint: str, requests: str) -> None:
    """Say after how many requests the server asks for a user's keys."""
    url, kind = f"{endpoint}/moto-api/reset-auth", {"Content-Type": "text/plain"}
    urllib.request.urlopen(urllib.request.Request(url, requests.encode(), kind)).close()


@pytest.mark.slow
def test_s3(s3, tmp_path, capsys, monkeypatch):
    """A run trains on files of a bucket, and web addresses read the same."""
    system = fsspec.filesystem("s3")
    rng = np.random.default_rng(0)
    table = pa.table(
        {"user": rng.integers(0, 9, 400), "price": rng.random(400), "label": rng.random(400) < 0.5}
    )
    for day in (1, 2, 10):
        text = io.BytesIO()
        pyarrow.csv.write_csv(table, text)
        system.pipe(f"bucket/csv/day={day}/rows.csv.gz", gzip.compress(text.getvalue()))
        system.pipe(f"bucket/parquet/day={day}/rows.parquet", parquet(table.to_pydict()))
    assert rows("s3://bucket/csv") == rows("s3://bucket/parquet")
    assert rows("s3://bucket/csv/day=1*/*.gz") == rows("s3a://bucket/parquet/day=1*")
    monkeypatch.chdir(tmp_path)
    small = ["--label", "label", "--batch-size", "100", "--model", "deepfm"]
    small += ["--model.embedding-dim", "4", "--model.top-layer-sizes", "4"]
    assert main(["train", "--data", "s3://bucket/csv", *small, "--output", "run"]) == 0
    assert "path: s3://bucket/csv\n" in pathlib.Path("run/config.yaml").read_text()
    capsys.readouterr()
    # A signed address of the web is the file; one without a signature is refused.
    signed = system.sign("bucket/parquet/day=1/rows.parquet", expiration=100)
    assert rows(signed)["user"] == table["user"].to_pylist()
    csv = system.sign("bucket/csv/day=1/rows.csv.gz", expiration=100)
    assert rows(csv)["user"] == table["user"].to_pylist()
    plain = f"{s3}/bucket/parquet/day=1/rows.parquet"
    assert main(["train", "--data", plain, *small]) == 1
    assert f"{plain}: access is denied (403" in capsys.readouterr().err
    assert main(["train", "--data", "s3://bucket/none.csv", *small]) == 1
    assert "s3://bucket/none.csv: there is no such file or directory" in capsys.readouterr().err
    _allow(s3, "0")
    assert main(["train", "--data", "s3://bucket/csv", *small]) == 1
    message = capsys.readouterr().err
    assert message.startswith("jaxrec train: s3://bucket/csv: access is denied (")
    assert message.endswith("give credentials that may read it, see docs/your_own_data.md\n")


@pytest.mark.slow
def test_hub(monkeypatch, tmp_path):
    """Data sets of Hugging Face's hub, whose package reads its address when it is imported."""
    pytest.importorskip("huggingface_hub", reason="needs pip install 'jaxrec[hf]'")
    table = {"x": [1, 2, 3], "y": ["a", "b", "c"]}
    files = {
        "README.md": b"",
        "data/train-00000-of-00001.parquet": parquet(table, row_group_size=2),
        "data/test-00000-of-00001.parquet": parquet(table),
        "text/rows.csv": b"x,y\n1,a\n2,b\n3,c\n",
    }
    with serve_hub(files) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        code = """
import sys
import pyarrow as pa
from jaxrec.data import ParquetGroups
from jaxrec.data.formats.conversion import table_files
for name in sys.argv[1:]:
    try:
        groups = ParquetGroups.of_files(table_files(f"hf://datasets/owner/{name}"))
        parts = [groups.read(group) for group in range(len(groups.sizes))]
        print(pa.concat_tables(parts).to_pydict())
    except (OSError, ValueError) as error:
        print(error)
"""
        names = ["name/data/train-*.parquet", "name/text", "name/data", "other/x.csv"]
        command = [sys.executable, "-P", "-c", code, *names]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    parts, text, splits, missing = run.stdout.splitlines()
    assert parts == text == str(table)
    assert "has the splits test, train" in splits
    assert "there is no such file or directory: 'hf://datasets/owner/other/x.csv'" in missing
