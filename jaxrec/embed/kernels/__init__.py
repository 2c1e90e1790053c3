"""Embedding lookup and fused update: the primitives and their implementations."""

from jaxrec.embed.kernels.base import BagLayout as BagLayout
from jaxrec.embed.kernels.base import Buckets as Buckets
from jaxrec.embed.kernels.base import Lookups as Lookups
from jaxrec.embed.kernels.base import Runs as Runs
from jaxrec.embed.kernels.dispatch import Choice as Choice
from jaxrec.embed.kernels.dispatch import describe as describe
from jaxrec.embed.kernels.dispatch import use_kernels as use_kernels
from jaxrec.embed.kernels.primitives import bucket as bucket
from jaxrec.embed.kernels.primitives import build_runs as build_runs
from jaxrec.embed.kernels.primitives import flatten_bags as flatten_bags
from jaxrec.embed.kernels.primitives import fused_update as fused_update
from jaxrec.embed.kernels.primitives import new_rows as new_rows
from jaxrec.embed.kernels.primitives import pooled_lookup as pooled_lookup
from jaxrec.embed.kernels.primitives import row_lookup as row_lookup
from jaxrec.embed.kernels.primitives import shift_rows as shift_rows
from jaxrec.embed.kernels.primitives import sum_rows as sum_rows
