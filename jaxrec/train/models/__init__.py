"""The kinds of model that ``jaxrec train`` trains, by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrec.data import TableEncoder
from jaxrec.train.config import TrainConfig
from jaxrec.train.features import text_encoder
from jaxrec.train.models.cross_networks import DCNv2Kind, GDCNKind
from jaxrec.train.models.deepfm import DeepFMKind
from jaxrec.train.models.dlrm import DLRMKind
from jaxrec.train.models.finalmlp import FinalMLPKind
from jaxrec.train.models.histories import DINKind, LONGERKind, OneTransKind, TransActKind
from jaxrec.train.models.hstu_ranker import HSTURankerKind
from jaxrec.train.models.kind import ModelKind
from jaxrec.train.models.masknet import MaskNetKind
from jaxrec.train.models.multitask import MMoEKind, PLEKind
from jaxrec.train.models.pepnet import PEPNetKind
from jaxrec.train.models.rankmixer import RankMixerKind
from jaxrec.train.models.sequences import BERT4RecKind, SASRecKind
from jaxrec.train.models.two_tower import TwoTowerKind
from jaxrec.train.models.wide_deep import WideDeepKind
from jaxrec.train.models.wukong import WukongKind

KINDS: dict[str, type[ModelKind]] = {
    kind.name: kind
    for kind in (
        DLRMKind,
        DCNv2Kind,
        DeepFMKind,
        WideDeepKind,
        WukongKind,
        RankMixerKind,
        MaskNetKind,
        FinalMLPKind,
        GDCNKind,
        DINKind,
        TransActKind,
        LONGERKind,
        OneTransKind,
        MMoEKind,
        PLEKind,
        PEPNetKind,
        TwoTowerKind,
        SASRecKind,
        BERT4RecKind,
        HSTURankerKind,
    )
}


def default_config(name: str) -> TrainConfig:
    """Return the default options of a kind of model, by its name."""
    config = TrainConfig()
    if name not in KINDS:
        return config  # parsing the options says which names there are
    options: dict[str, dict[str, Any]] = {}
    for option, value in KINDS[name].defaults.items():
        group, _, field = option.rpartition(".")
        options.setdefault(group, {})[field] = value
    groups = {
        group: dataclasses.replace(getattr(config, group), **fields)
        for group, fields in options.items()
        if group
    }
    return dataclasses.replace(config, **options.get("", {}), **groups)


def model_kind(config: TrainConfig, encoder: TableEncoder | None = None) -> ModelKind:
    """Return the kind of model of a run, for its options and columns.

    ``encoder`` None: the columns are those of text in Criteo's format or of a generated log.
    """
    return KINDS[config.model.name](config, encoder or text_encoder(config))
