"""Sphinx extension that lets the site's search find pages by words that they do not have."""

from __future__ import annotations

import json
import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

# Names that others use for the subject of a page or a section. A phrase counts as a heading there
# if a query has all of its words. Each of its words finds the page.
PHRASES = {
    "beyond_memory": (
        "bigger, larger than memory, larger GPU memory, does not fit, out of memory, OOM, RAM, "
        "disk, SSD, host memory, offload, out of core, UVM"
    ),
    "choosing_a_model#several-labels": "multitask, multi task, several labels",
    "distributed": "multi node, multi host, multiple machines, Slurm, Kubernetes",
    "fewer_bits": "mixed precision, bf16, bfloat16, fp16, half precision",
    "from_torchrec": (
        "migrate, port, convert, PyTorch, KeyedJaggedTensor, KJT, DistributedModelParallel"
    ),
    "gpu": "CUDA, NVIDIA",
    "metrics": "custom metric, evaluation, AUC",
    "models": "architectures, zoo",
    "models#parts": "negative sampling, sampled softmax",
    "open_vocabularies": (
        "dynamic, unknown ids, unseen ids, new ids, cold start, collisions, out of vocabulary, "
        "growth"
    ),
    "open_vocabularies#eviction-ids-that-lose-their-rows": (
        "evict, remove old ids, drop old ids, forget, expire, stale ids"
    ),
    "planner": "sharding planner, who decides, memory budget, automatic",
    "quantization": "quantize, compress, smaller",
    "recipes#choose-a-row-optimizer": "fused optimizer, fused, sparse optimizer, Adam",
    "recipes#compile-few-steps": "recompile, recompilation, compiles again",
    "recipes#copy-a-model-before-a-donated-step": "array deleted, donated buffer",
    "recipes#find-ids-that-are-out-of-range": (
        "validate ids, invalid ids, check ids, bounds, out of bounds"
    ),
    "recipes#handle-a-loss-that-is-nan-or-infinite": "explode, diverge",
    "recipes#load-pretrained-embeddings-from-numpy-or-read-a-table": (
        "pretrained, transfer learning"
    ),
    "recipes#quantize-to-int8-and-serve-over-http": "quantize serve",
    "recipes#train-on-my-own-csv-or-parquet-file": "own dataset, custom dataset",
    "recipes#use-strings-or-64-bit-ids": "feature hashing, hashing trick",
    "serving": "inference, deploy, production, REST API, latency, endpoint",
    "serving#c": "C inference, without Python",
    "serving#on-the-command-line": "batch predict, batch inference, offline inference",
    "serving#retrieve-and-rank": "nearest neighbour, ANN, faiss, candidate generation",
    "sharding": (
        "table sharding, shard tables, distributed, multi GPU, several GPUs, model parallel, "
        "row-wise, column-wise, sent, bandwidth, placement"
    ),
    "start": (
        "install, quickstart, getting started, tutorial, Flax model, own model, embedding layer, "
        "fused update, custom layer"
    ),
    "tpu": "TPU",
    "training": "loop, warm start",
    "training#stop-and-resume-a-run": (
        "resume, restart, continue, pause, preemption, preempted, elastic, interrupt"
    ),
    "your_own_data": "CSV, own file, dataframe, date",
    "your_own_data#addresses": "S3 bucket, S3, GCS, cloud storage",
    "your_own_data#hold-out": "train test split, split, validation, test set, held out, holdout",
}


def add_words(app: Sphinx, page: str, source: list[str]) -> None:
    texts = [text for place, text in PHRASES.items() if place.partition("#")[0] == page]
    if texts:
        # Sphinx looks keywords up whole, and queries word by word.
        words = sorted({word for text in texts for word in re.findall(r"\w+", text)})
        meta = f"---\nmyst:\n  html_meta:\n    keywords: {', '.join(words)}\n---\n\n"
        source[0] = meta + source[0]


def check_places(app: Sphinx, env: Any) -> None:
    for place in PHRASES:
        page, _, anchor = place.partition("#")
        toc = env.tocs.get(page, nodes.bullet_list())
        anchors = {link["anchorname"].removeprefix("#") for link in toc.findall(nodes.reference)}
        if anchor not in anchors:
            raise ExtensionError(f"search_words.py: there is no {place}")


def add_phrases(app: Sphinx, page: str, *_: Any) -> None:
    if page == "search":
        places = {place: text.split(", ") for place, text in PHRASES.items()}
        app.add_js_file(None, body=f"const PHRASES = {json.dumps(places)};")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", add_words)
    app.connect("env-check-consistency", check_places)
    app.connect("html-page-context", add_phrases)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
