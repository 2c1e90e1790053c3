"""The columns that a model can take."""

from __future__ import annotations

from jaxrec.arguments import ConfigError
from jaxrec.data import Schema
from jaxrec.train.config import ModelConfig


def check_model(model: ModelConfig, schema: Schema) -> None:
    """Check that a model can take the columns of a schema.

    Raises:
        ConfigError: It cannot; the message names the models that can.
    """
    widths = {x.embedding_dim or model.embedding_dim for x in schema.categorical.values()}
    if model.name != "dcn_v2" and len(widths) > 1:
        raise ConfigError(
            f"model.name {model.name} has tables of one width; leave embedding_dim out of the "
            "schema, or take --model.name dcn_v2"
        )
    if model.name == "dlrm" and not schema.dense:
        raise ConfigError(
            "model.name dlrm needs a dense column, and there is none; take --model.name dcn_v2 or "
            "--model.name deepfm"
        )
