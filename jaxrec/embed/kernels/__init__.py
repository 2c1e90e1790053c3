"""Embedding lookup and fused update: the primitives and their implementations."""

from jaxrec.embed.kernels.base import BagLayout as BagLayout
from jaxrec.embed.kernels.base import Lookups as Lookups
from jaxrec.embed.kernels.base import Runs as Runs
from jaxrec.embed.kernels.reference import build_runs as build_runs
from jaxrec.embed.kernels.reference import flatten_bags as flatten_bags
from jaxrec.embed.kernels.reference import fused_update as fused_update
from jaxrec.embed.kernels.reference import pooled_lookup as pooled_lookup
from jaxrec.embed.kernels.reference import row_lookup as row_lookup
