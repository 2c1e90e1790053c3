#!/usr/bin/env python3
"""Runs the commands of README.md and docs in a fresh environment with what README installs.

Usage: python .ci/docs_commands.py [--keep DIRECTORY] [--first NUMBER]
A copy of the last commit is installed by ``pip install .`` into a new environment, and each command
runs there on small data: in a directory with the files that the docs name, or in the copy if it
starts something of the checkout. Each command of the docs must be in one of the two lists here, in
the same words: of those that run, or of those that are left out. Ends with exit code 1 if a command
fails, or if the docs have a command that the lists lack, or the lists one that the docs lack.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]

GENERATED = "--data.generated-rows 20000 --data.generated-eval-rows 4000"
SMALL = "--data.batch-size 104 --data.table-rows 1000 --hold-out 0.2"

# Options of the commands of docs/choosing_a_model.md.
_LIKED = "--label liked --exclude rating timestamp loved history"
_SEQUENCES = "--user user --item movie --time timestamp"
SMALL_MODEL = "--batch-size 100 --model.embedding-dim 4 --epochs 1"
CHOICES = (
    f"{_LIKED} --model dlrm --output dlrm",
    f"{_LIKED} --model dcn_v2 --output dcn",
    f"{_LIKED} --model deepfm --output deepfm",
    f"{_LIKED} --model wide_deep --output wide",
    f"{_LIKED} --model wukong --output wukong",
    f"{_LIKED} --model finalmlp --user user --item movie --output final",
    "--label liked --exclude rating timestamp loved --model din --history history --item movie "
    "--output din",
    "--label liked --exclude rating timestamp loved --model longer --history history --item movie "
    "--output longer",
    "--label liked loved --exclude rating timestamp history --model mmoe --output mmoe",
    "--label liked loved --exclude rating timestamp history --model ple --output ple",
    "--label liked loved --exclude rating timestamp history --model pepnet --user user "
    "--item movie --model.domain occupation --output pepnet",
    "--label rating --exclude liked timestamp loved history --model dcn_v2 --output stars",
    f"{_LIKED} --model two_tower --user user --item movie genres year --patience 3 --output towers",
    f"--model sasrec {_SEQUENCES} --output sasrec",
    f"--model bert4rec {_SEQUENCES} --output bert",
)

# Hold-outs of docs/your_own_data.md.
HOLD_OUTS = (
    "--hold-out 0.2",
    "--hold-out random:0.2",
    "--hold-out last --user user --time ts",
    "--hold-out-by user --hold-out 0.2",
    "--hold-out-from ts=2024-03-01",
    "--hold-out-data later.parquet",
)

# Commands of the docs, and the options that make them small. Each finds the files of those before.
COMMANDS = (
    ("jaxrec doctor", ""),
    ("jaxrec train", f"{GENERATED} --output first"),
    ("jaxrec data criteo INPUT OUTPUT", ""),
    ("jaxrec data npy OUTPUT NPY", ""),
    (
        "jaxrec data multi-hot OUTPUT MULTI_HOT",
        f"--table-rows {' '.join(['1000'] * 26)}",
    ),
    ("jaxrec data records OUTPUT train_data.bin", ""),
    ("jaxrec train --data OUTPUT", f"{SMALL} --output second"),
    ("jaxrec train --data clicks.parquet", "--data.batch-size 100 --output columns"),
    (
        "jaxrec train --data clicks.parquet --label click --weight importance --exclude item user",
        "--data.batch-size 100 --output chosen",
    ),
    (
        "jaxrec train --data clicks.parquet --schema schema.yaml --output run",
        "--data.batch-size 100",
    ),
    ("jaxrec train run/config.yaml --output again", ""),
    ("jaxrec train --data visits.parquet --output visits", SMALL_MODEL),
    (
        "jaxrec train --data visits.parquet --label click buy --model mmoe --output tasks",
        SMALL_MODEL,
    ),
    ("jaxrec train --data visits.parquet --schema visits.yaml --output articles", SMALL_MODEL),
    (
        "jaxrec train --data visits.parquet --exclude 'user.home.*' '*.month' --dense ts.hour "
        "--output chosen_parts",
        SMALL_MODEL,
    ),
    (
        "jaxrec train --data visits.parquet --exclude ts published --dense member 'user.home.r*' "
        "--output plain",
        SMALL_MODEL,
    ),
    ("jaxrec export run model", ""),
    ("jaxrec predict model clicks.parquet -o scores.parquet", ""),
    (
        "jaxrec train --data clicks.parquet --schema schema.yaml --model deepfm",
        "--data.batch-size 100 --output by_schema",
    ),
    (
        "jaxrec train --data clicks.parquet --vocabulary dynamic --data.table-rows 1000000 "
        "--vocabulary.eviction lfu",
        "--data.batch-size 100 --data.table-rows 2000 --output dynamic",
    ),
    ("jaxrec train --data clicks.parquet --label click", "--data.batch-size 100 --output labelled"),
    (
        "jaxrec train --data clicks.parquet --label click --memory 500MB",
        "--data.batch-size 100 --output bounded",
    ),
    ("jaxrec train --data by_day --label click", "--data.batch-size 100 --output by_keys"),
    (
        "jaxrec train --data 'by_day/country=DE/day=*' --label click",
        "--data.batch-size 100 --output by_pattern",
    ),
    (
        "jaxrec train --data clicks.csv --data.types zip=string",
        "--data.batch-size 100 --output from_csv",
    ),
    (
        "jaxrec train --data 'logs/*.jsonl.gz' --label click",
        "--data.batch-size 100 --output from_json",
    ),
    (
        "jaxrec train --data logs --follow --vocabulary dynamic --output followed",
        "--data.batch-size 100 --data.table-rows 2000 --until caught_up",
    ),
    ("jaxrec train --resume followed", ""),
    (
        "jaxrec train --model hstu_ranker --ranker.history 20 --ranker.window 1",
        "--data.generated-rows 500 --data.generated-eval-rows 100 --output ranker_generated",
    ),
    ("jaxrec train --model hstu_ranker --data ratings/u.data --windows 4 --output ranker", ""),
    (
        "jaxrec train --model hstu_ranker --data listens.parquet --item item_id is_organic",
        "--output ranker_listens",
    ),
    (
        "jaxrec train --data clicks.parquet --model dcn_v2 --epochs 20 --evaluate-every 100 "
        "--patience 3 --output early",
        "--data.batch-size 100 --evaluate-every 5",
    ),
    (
        "jaxrec train --data clicks.parquet --patience 3 --output sweep --sweep lr=0.002,0.004 "
        "embedding_dim=8,16",
        "--data.batch-size 100",
    ),
    *((f"jaxrec train --data ratings.parquet {options}", SMALL_MODEL) for options in CHOICES),
    *(
        (
            f"jaxrec train --data clicks.parquet --label click {options}",
            f"--data.batch-size 100 --output held_out_{number}",
        )
        for number, options in enumerate(HOLD_OUTS)
    ),
    *(
        (
            f"jaxrec train --data ratings.parquet --model sasrec {_SEQUENCES} {options}",
            f"{SMALL_MODEL} --output held_out_{options.split()[0].strip('-')}",
        )
        for options in ("--hold-out-by user", "--hold-out-from timestamp=900000000")
    ),
    ("jaxrec train [CONFIG.yaml] --data LOG --output RUN [--checkpoint.every 1000]", SMALL),
    ("jaxrec train --resume RUN", "--data.epochs 2"),
    ("jaxrec train --resume RUN --devices 8", "--data.epochs 3"),
    ("jaxrec train --resume RUN --eval-only", ""),
    (
        "jaxrec quantize RUN --dtype int4 --per-table cat_0=float16 --prune cat_1=0.1 --out SMALL",
        "",
    ),
    ("jaxrec plan model.yaml --devices 64 --machine h200 --output plan.json", "--devices 8"),
    ("jaxrec plan model.yaml --machines 2xh100 8xh100 2x8xh200 --prices h100=2", ""),
    ("jaxrec tune model.yaml", "--batch-size 256 --seconds 0.01 --memory 0.01 --no-keep"),
    ("jaxrec plan --calibrate --output here.json", "--devices 2"),
    ("python -m jaxrec.mesh.selftest", "--cpu-devices 4 --types row_wise:rows grid:pooled"),
    (
        "python examples/sasrec.py --data amazon-beauty.txt --dropout-rate 0.5 --minutes 58 "
        "--epochs 200",
        "--epochs 1 --batch-size 32 --dim 16 --num-blocks 1 --max-length 10",
    ),
    ("python examples/deepfm_movielens.py --data ml-100k", "--epochs 1 --seeds 0"),
    ("python -m benchmarks.pipeline", "--text-megabytes 2 --steps 5 --repeats 1 --batch 256"),
    ("python -m benchmarks.sequences", "--users 50"),
    ("python -m benchmarks.hstu", "--length 64 --timed-length 32 --rows 2 --seconds 0.01"),
    ("python -m benchmarks.quantize_memory", "--tables 2 --rows 1000"),
    (
        "python -m benchmarks.quantized_quality --output benchmarks/results/quantized_quality",
        "--seeds 0 --rows 20000 --eval-rows 4000 --output quantized_quality",
    ),
    (
        "python -m benchmarks.precision --output benchmarks/results/precision.json",
        "--seeds 0 --rows 4096 --eval-rows 4096 --only int8 --output precision.json",
    ),
    (
        "python -m benchmarks.rankers --output benchmarks/results/rankers_generated",
        "--seeds 0 --steps 6 --batch-size 32 --evaluations 1 --output rankers_generated",
    ),
    (
        "python -m benchmarks.rankers --data ml-100k --window 0 --steps 500 --dropout-rate 0.2 "
        "--learning-rate 2e-3 --output benchmarks/results/rankers_movielens",
        "--seeds 0 --steps 6 --batch-size 32 --evaluations 1 --output rankers_movielens",
    ),
    ("python -m benchmarks.dlrm --batch 8192", "--batch 64 --max-rows 1000 --steps 2"),
    ("python -m benchmarks.gpu.dlrm --losses", "--steps sasrec_512x200"),
    ("python -m benchmarks.gpu.attention --dry-run", ""),
    ("python -m benchmarks.core_distance", "--times 2"),
    ("python -m benchmarks.growth", "--only tables --largest 3 --seconds 0.01"),
    ("python -m benchmarks.dense_dtype", "--models dlrm --batch 64 --steps 2 --rounds 1"),
    ("python -m benchmarks.tier ids", "--resident 20000 --batch 1000 --rounds 2"),
    ("python -m benchmarks.tier stream", "--steps 2000 --batch 16 --interval 1000"),
    (
        "python -m benchmarks.tier cache",
        "--features 2 --batch 64 --bag 4 --rows 4000 --dim 8 --steps 2 --rounds 1",
    ),
    (
        "python -m benchmarks.tier policies",
        "--rows 4000 --batch 64 --steps 20 --shares 0.2 --drifts 0 --windows 4",
    ),
    (
        "python -m benchmarks.tier huge",
        "--cached 2000 --steps 20 --interval 10 --dim 8",
    ),
    (
        "python -m benchmarks.tier sizes",
        "--features 2 --batch 64 --bag 4 --rows 4000 --dim 8 --steps 2 --rounds 1 --warm-up 4 "
        "--shares 0.4 --stores memory file",
    ),
    (
        "python -m benchmarks.tier plan",
        "--batch 64 --memories 0.5 --warm-up 5 --steps 2 --rounds 1 --output plan_caches.json",
    ),
    (
        "python -m benchmarks.tier step",
        "--features 2 --batch 64 --bag 4 --rows 4000 --dim 8 --steps 2 --rounds 1",
    ),
)

# Lines of README that start a server and ask it, and what the answer has.
SERVING = "jaxrec serve model &"
ANSWER = '"probability"'

SELFTEST = "python -m jaxrec.mesh.selftest"
RUN_ON_HOSTS = "jaxrec train run.yaml --output /shared/run"
TOGETHER = "is run with the lines around it"
PEER = "needs an environment with TorchRec"
CUDA = "needs what compiles for CUDA, 3 GB"

# Commands of the docs that are not run, and why.
LEFT_OUT = {
    **dict.fromkeys(
        (
            "jaxrec train --data s3://bucket/by_day --label click",
            "jaxrec train --data 's3://bucket/by_day/country=*/*/*.parquet' --label click",
            "jaxrec train --data 'hf://datasets/USER/NAME/data/train-*.parquet' --label click",
            "jaxrec predict model s3://bucket/new.csv --output scores.parquet",
        ),
        "needs a bucket; tests/data/test_addresses.py has one",
    ),
    "jaxrec train --data clicks.parquet --epochs 3 --output logged --log tensorboard": "needs what "
    "README does not install; tests/train/test_loggers.py has it",
    "pip install '.[serve]'": TOGETHER,
    "pip install 'jaxrec[serve]'": "installs what README does not",
    "jaxrec serve model": "ends when it is stopped; README's lines start it",
    "jaxrec train --output run --data.generated-rows 200000": TOGETHER,
    SERVING: TOGETHER,
    "jaxrec serve model --port 8417 &": "tests/test_docs.py runs the page",
    "jaxrec train --data clicks.csv --label click --output run": "is the same with a Parquet file",
    "jaxrec export run model --dtype int8": "tests/commands/test_export.py does it",
    "jaxrec serve model --deltas versions": "ends when it is stopped; tests/serve/http does it",
    "python -m benchmarks.ranker_serving --requests 120": "takes minutes",
    "jaxrec serve ranker --cache-mb 2048": "ends when it is stopped; tests/serve/http does it",
    "python -m benchmarks.serving_http": "needs what README does not install for all",
    "python -m benchmarks.serving_http --only fuzz --fuzz 1000000": "takes half an hour",
    "pip install . && jaxrec train": "both are run, each by itself",
    "pip install .": "is how the environment is made",
    "pip install '.[test]' && pytest": "is run by .ci/run",
    "pip install '.[data,plot]'": "installs what README does not",
    "pip install '.[plot]'": "installs what README does not",
    "pip install 'jaxrec[retrieval]'": "installs what README does not",
    "pip install 'jaxrec[ray]'": "installs what README does not",
    "pip install 'jaxrec[spark]'": "installs what README does not",
    "python -m benchmarks.ray --kill worker trainer": "needs Ray",
    "pip install 'jax[k8s]'": "installs what README does not",
    "pip install 'jaxrec[cuda12]'": "needs a GPU",
    "pip install optuna": "is for a recipe",
    "python -m benchmarks.defaults work --movielens ml-100k --criteo criteo.csv --beauty "
    "beauty.txt --trees PYTHON --torchrec PYTHON": "needs data sets and other libraries",
    "pip install 'jaxrec[rocksdb]'": "installs what README does not",
    "pip install 'jaxrec[redis]'": "installs what README does not",
    "pip install 'jaxrec[kafka]'": "installs what README does not",
    "jaxrec train --data kafka://kafka-1:9092,kafka-2:9092/clicks --follow --vocabulary dynamic "
    "--output topic": "needs brokers; tests/train/test_following.py has one",
    "python -m benchmarks.streams": "needs what README does not install for all",
    "python -m benchmarks.streams --rate --messages 500000": "needs what README does not install "
    "for all",
    "python -m benchmarks.tier stores": "needs rocksdict, redis-py and a server",
    "python -m benchmarks.tier kills": "needs rocksdict, redis-py and a server",
    "python -m benchmarks.tier exact": "needs rocksdict, redis-py and a server",
    f"srun {SELFTEST} && srun python train.py": "needs Slurm",
    f"srun --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 {RUN_ON_HOSTS}": "needs Slurm",
    "mpirun -n 8 --hostfile hosts python train.py": "needs Open MPI",
    f"mpirun -n 8 --hostfile hosts {RUN_ON_HOSTS}": "needs Open MPI",
    f'ssh "${{hosts[$i]}}" "cd job && {SELFTEST} --coordinator ${{hosts[0]}}:8476 '
    '--num-processes ${#hosts[@]} --process-id $i" &': "needs other hosts",
    f"{RUN_ON_HOSTS} --devices 8 --coordinator host0:8476 --num-processes 4 "
    "--process-id $i": "is one of several processes; tests/commands/test_train.py starts them",
    "python -m benchmarks.compare --peer-python PATH --rounds 5 --batches 2048 8192 16384": PEER,
    "python -m benchmarks.compare --peer-python PATH --keras-python PATH --what models": PEER,
    "python -m benchmarks.ranker_stack --peer-python PATH --checkout PATH --rounds 3 --seconds 0.5 "
    "--rows 8 --shortest 1024": PEER,
    "python -m benchmarks.ranker_stack --peer-python PATH --checkout PATH --rounds 1 --seconds 0.5 "
    "--rows 32": PEER,
    "python -m benchmarks.gpu.dlrm_v4": CUDA,
    "python -m benchmarks.score --peer-python PATH": PEER,
    "python -m benchmarks.quantized --peer-python PATH --rounds 2 --seconds 1": PEER,
    "python -m benchmarks.plan_versus_torchrec --peer-python PATH": PEER,
    "python -m benchmarks.plan --plans 32 --passes 2": "needs matplotlib",
    "python -m benchmarks.serving RUN --cpp build --pjrt pjrt": "needs a build of cpp/",
    "python -m benchmarks.ranker_serving_cpp --cpp build --pjrt pjrt": "needs a build of cpp/",
    "python -m benchmarks.mesh": "takes minutes",
    "python -m benchmarks.backbones work --criteo criteo_sample.csv "
    "--generated-rows 0": "takes minutes",
    "python -m benchmarks.backbones work --movielens ml-100k --generated-rows 0 --batch-size 512 "
    "--epochs 1": "takes minutes",
    "python -m benchmarks.backbones work --generated-rows 60000 --batch-size 512 "
    "--epochs 1": "takes minutes",
    "python -m benchmarks.backbones work --scaling --seeds 0 1 --generated-rows 60000 "
    "--output backbones_scaling": "takes minutes",
    "python -m benchmarks.kinds work --movielens ml-100k --beauty beauty.txt": "takes an hour",
    "python -m benchmarks.interaction_baselines work/movielens.parquet work/beauty.parquet "
    "--output interaction_baselines": "needs data sets",
    "python -m benchmarks.generative amazon-beauty.txt --output generative": "takes hours",
    "python -m benchmarks.plan_scale hosts": "takes minutes",
    "python -m benchmarks.plan_scale large": "takes minutes",
    "pip install 'jaxrec[tpu]'": "takes 1.5 GB",
    "python -m benchmarks.tpu.estimates": "needs libtpu",
    "python -m benchmarks.mesh --types table_wise row_wise:rows row_wise:pooled column_wise "
    "--rounds 3 --seconds 1": "takes minutes",
    "python -m benchmarks.gpu.compile": CUDA,
    "python -m benchmarks.gpu.compile --backends mosaic": CUDA,
    "python -m benchmarks.gpu.compile --attention alone": CUDA,
    "python -m benchmarks.gpu.compile --quick --no-steps": CUDA,
    "python -m benchmarks.gpu.compile --only 'fused_update .* D128'": CUDA,
    "python -m benchmarks.gpu.tier --suites cached_0.1": "tests/test_gpu_benchmarks.py runs it",
    "python -m benchmarks.gpu.doc_tables": "writes the docs",
    "python -m benchmarks.report": "writes the docs; tests/test_report.py compares them",
    "python -m benchmarks.gpu.mesh": CUDA,
    "python -m benchmarks.gpu.stash": CUDA,
    "python -m benchmarks.gpu.tier --compile": CUDA,
    "python -m benchmarks.gpu.mesh --exchange rows --topology 1x8x1 --routed True": CUDA,
    "python -m benchmarks.gpu.ahead": CUDA,
    "python -m benchmarks.gpu.ahead --exchange rows --step fetched": CUDA,
    "python -m benchmarks.gpu.ahead --exchange rows --topology 1x8x1 --step fetched": CUDA,
    "python -m pytest tests/plan/test_golden.py": "is run by .ci/run",
}

MODEL = """
batch_size: 8192
tables:
  - {name: product, num_embeddings: 4000000, embedding_dim: 64}
  - {name: user, num_embeddings: 4096, embedding_dim: 64}
"""

# Writes rows with the columns of docs/choosing_a_model.md, and of the schema in docs/data.md.
COLUMNS = """
import gzip, json, pathlib, jaxrec, numpy as np, pyarrow as pa, pyarrow.csv, pyarrow.parquet as pq
draw = np.random.default_rng(0).integers
columns = {"click": draw(2, size=1000), "importance": draw(1, 3, 1000)}
columns |= {"age": draw(90, size=1000) / 2, "price": draw(100, size=1000) / 7}
columns |= {name: draw(9, size=1000).astype(str) for name in ("city", "user")}
columns |= {"item": draw(-(2**63), 2**63, 1000), "tags": [["a", "b"], [], ["a"], ["c"]] * 250}
columns["ts"] = np.datetime64("2024-01-01", "s") + 7200 * np.arange(1000)
for name in ("clicks.parquet", "later.parquet"):
    pq.write_table(pa.table(columns), name)
days = {"country": ["DE", "FR"] * 500, "day": [1, 2, 10, 11] * 250}
pq.write_to_dataset(pa.table(columns | days), "by_day", partition_cols=["country", "day"])
rows = pa.table({"click": columns["click"], "age": columns["age"], "zip": ["00501"] * 1000})
pyarrow.csv.write_csv(rows, "clicks.csv")
pathlib.Path("logs").mkdir()
rows = "".join(json.dumps(row) + "\\n" for row in rows.to_pylist())
pathlib.Path("logs/0.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
jaxrec.data.write_events(jaxrec.data.GeneratedEvents(100), "listens.parquet")
pathlib.Path("ratings").mkdir()
lines = [f"{n % 30}\\t{n % 17}\\t{1 + n % 5}\\t{n}\\n" for n in range(2000)]
pathlib.Path("ratings/u.data").write_text("".join(lines))
rating = draw(1, 6, size=1000)
ratings = {"user": draw(50, size=1000), "movie": draw(40, size=1000), "rating": rating / 1.0}
ratings |= {"liked": rating > 3, "loved": rating > 4, "timestamp": draw(10**9, size=1000)}
ratings |= {"age": draw(90, size=1000) / 2, "gender": ["F", "M"] * 500}
ratings |= {"occupation": ["artist", "doctor"] * 500, "year": draw(1950, 2000, size=1000)}
ratings |= {"genres": [["Drama"], ["Comedy", "Drama"]] * 500}
ratings |= {"history": [draw(40, size=n % 5).tolist() for n in range(1000)]}
pq.write_table(pa.table(ratings), "ratings.parquet")
"""


def documented() -> tuple[set[tuple[str, str]], set[str]]:
    """The files and commands that must be listed, and all commands of the docs.

    Code within a sentence must be listed if it is a whole command for a shell: it begins with
    ``python -m`` or ``pip install``. What begins with ``jaxrec`` is often only a command's name.
    """
    to_list, commands = set(), set()
    made = ("api", "results", "_build")  # folders that the build of the site writes
    pages = [
        path
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if path.relative_to(ROOT / "docs").parts[0] not in made
    ]
    for path in (ROOT / "README.md", *pages):
        text = path.read_text().replace("\\\n", " ")
        blocks = re.findall(r"^```(.*)\n((?s:.*?))^```$", text, re.MULTILINE)
        shell = [body for language, body in blocks if language in ("", "sh", "bash")]
        lines = [re.sub(r"\s#.*", "", line) for line in "\n".join(shell).splitlines()]
        lines = [" ".join(line.split()) for line in lines]
        programs = r"(jaxrec|python|pip|srun|mpirun|ssh) "
        in_blocks = {line for line in lines if re.match(programs, line)}
        prose = re.sub(r"^```.*\n(?s:.*?)^```$|``[^`]+``", "", text, flags=re.MULTILINE)
        in_prose = {" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)}
        whole = {code for code in in_prose if re.match(r"python -m |pip install ", code)}
        to_list |= {(path.name, command) for command in in_blocks | whole}
        commands |= in_blocks | in_prose
    return to_list, commands


def write_files(work: pathlib.Path, checkout: pathlib.Path) -> None:
    """The files that the docs name."""
    log = (checkout / "tests/golden/criteo/kaggle.tsv").read_bytes() * 40
    for name in ("INPUT", "LOG"):
        (work / name).write_bytes(log)
    (work / "model.yaml").write_text(MODEL)
    lines = [f"{user} {1 + (user * 7 + 31 * i) % 400}" for user in range(1, 200) for i in range(8)]
    (checkout / "amazon-beauty.txt").write_text("\n".join(lines) + "\n")
    (checkout / "ml-100k").mkdir()
    schema = (checkout / "docs/data.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    (work / "schema.yaml").write_text(schema)
    page = (checkout / "docs/your_own_data.md").read_text()
    (work / "visits.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    python = work.parent / "environment/bin/python"
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    (visits,) = (block for block in blocks if "write_table(visits" in block)
    subprocess.run([python, "-c", visits], cwd=work, check=True)
    subprocess.run([python, "-c", COLUMNS], cwd=work, check=True)
    make = "import pathlib; from tests.examples.movielens import write; "
    make += "write(pathlib.Path('ml-100k/ml-100k'))"
    subprocess.run([sys.executable, "-c", make], cwd=checkout, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep", type=pathlib.Path, help="directory to work in, and to keep")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the command to begin with, as printed"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = pathlib.Path(temporary if args.keep is None else args.keep)
        return run_all(directory.resolve(), args.first)


def run_all(directory: pathlib.Path, first: int) -> int:
    checkout, work, environment = (directory / x for x in ("checkout", "work", "environment"))
    checkout.mkdir(parents=True)
    work.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "x"], cwd=checkout, check=True, input=archive.stdout)
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"PATH": f"{environment / 'bin'}:{env['PATH']}"}
    subprocess.run(["pip", "install", "--quiet", "."], cwd=checkout, env=env, check=True)
    write_files(work, checkout)
    failed = 0
    for number, (command, small) in enumerate(COMMANDS[first:], first):
        place = checkout if re.search(r"examples/|benchmarks\.", command) else work
        line = re.sub(r"\[CONFIG.yaml\] |\[|\]", "", command) + " " + small
        begun = time.monotonic()
        done = subprocess.run(
            shlex.split(line), cwd=place, env=env, capture_output=True, text=True, timeout=1200
        )
        is_good = done.returncode == 0 and "Traceback" not in done.stderr
        failed += not is_good
        verdict = "ok" if is_good else f"FAILED ({done.returncode})"
        # The number is that of --first, which goes on where an earlier run ended.
        print(f"{verdict:12} {time.monotonic() - begun:4.0f} s  {number:2} {line}", flush=True)
        if not is_good:
            print(done.stdout[-2000:], done.stderr[-4000:], flush=True)
    failed += not serves(checkout, directory / "serving", env)
    return 1 if failed + wrong_entries() else 0


def serves(checkout: pathlib.Path, work: pathlib.Path, env: dict[str, str]) -> bool:
    """Run the lines of README that start a server, in a directory of their own."""
    work.mkdir()
    text = (checkout / "README.md").read_text()
    (lines,) = (x for x in re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S) if SERVING in x)
    lines = lines.replace("'.[serve]'", f"--quiet '{checkout}[serve]'")
    script = f"set -e\n{lines}\nkill %1\nwait %1"
    begun = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", script], cwd=work, env=env, capture_output=True, text=True, timeout=1200
    )
    is_good = done.returncode == 0 and ANSWER in done.stdout
    print(f"{'ok' if is_good else 'FAILED':12} {time.monotonic() - begun:4.0f} s  {SERVING}")
    if not is_good:
        print(done.stdout[-2000:], done.stderr[-4000:], flush=True)
    return is_good


def wrong_entries() -> int:
    """Print the commands that are missing in the lists, twice there, or not in the docs."""
    listed = [*(command for command, _ in COMMANDS), *LEFT_OUT]
    to_list, commands = documented()
    wrong = [f"NOT LISTED   {name}: {x}" for name, x in sorted(to_list) if x not in listed]
    wrong += [f"NOT IN DOCS  {x}" for x in listed if x not in commands]
    wrong += [f"LISTED TWICE {x}" for x in sorted(set(listed)) if listed.count(x) > 1]
    for line in wrong:
        print(line, flush=True)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
