"""Sphinx extension that lets the site's search find pages by words that they do not have."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

# What others call the subject of a page.
WORDS = {
    "beyond_memory": "bigger, larger than memory, RAM, disk, SSD, host, offload, out of core, UVM",
    "from_torchrec": "migrate, port, convert, PyTorch",
    "gpu": "CUDA, NVIDIA",
    "metrics": "custom, evaluation",
    "models": "architectures",
    "open_vocabularies": "dynamic, unknown, unseen, new ids, collisions, out of vocabulary",
    "planner": "memory budget, automatic",
    "quantization": "quantize, compress, smaller",
    "serving": "inference, deploy, production, REST, latency",
    "sharding": "distributed, multi-GPU, model parallel, row-wise, column-wise, sent, bandwidth",
    "training": "resume, restart, early stopping, loop",
    "your_own_data": "dataframe, split, validation, test set, held out, holdout, date",
}


def add_words(app: Sphinx, page: str, source: list[str]) -> None:
    if page in WORDS:
        meta = f"---\nmyst:\n  html_meta:\n    keywords: {WORDS[page]}\n---\n\n"
        source[0] = meta + source[0]


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", add_words)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
