"""The primitives, each with several implementations: lookups, updates, products, attention.

* `base`: data types and operands, and the rules that every implementation obeys. Begin there.
* `reference`, `updates`, `stretches`: the definition of each primitive, in XLA.
* `cpu`, `native_call`: the implementation for CPUs, in C++ (`native/`).
* `triton`, `mosaic`: the implementations for NVIDIA GPUs, by two backends of Pallas; `segments`
  serves both.
* `sparse_core`: the implementation for the SparseCores of TPUs, by Pallas.
* `registry`: the implementations, and the choice of the one that runs a call.
* `trial`, `answers`: trials of kernels on the card at hand, and the file that keeps their results.
"""

from jaxrec.embed.kernels import reference
from jaxrec.embed.kernels.base import BAD_ROW as BAD_ROW
from jaxrec.embed.kernels.base import BagLayout as BagLayout
from jaxrec.embed.kernels.base import Buckets as Buckets
from jaxrec.embed.kernels.base import DroppingFeature as DroppingFeature
from jaxrec.embed.kernels.base import KeptIds as KeptIds
from jaxrec.embed.kernels.base import Lookups as Lookups
from jaxrec.embed.kernels.base import Runs as Runs
from jaxrec.embed.kernels.registry import Choice as Choice
from jaxrec.embed.kernels.registry import Primitive
from jaxrec.embed.kernels.registry import describe as describe
from jaxrec.embed.kernels.registry import use_kernels as use_kernels

# A primitive has the name, signature and docstring of its definition in `reference`. Static
# arguments are part of the compiled program; the others are arrays.
new_rows = Primitive(reference.new_rows, static=("num_rows",))
pooled_lookup = Primitive(reference.pooled_lookup, static=("layout", "dtype"))
max_lookup = Primitive(reference.max_lookup, static=("layout", "dtype", "has_winners"))
max_gradients = Primitive(reference.max_gradients)
drop_ids = Primitive(reference.drop_ids, static=("features",))
flatten_bags = Primitive(reference.flatten_bags, static=("layout", "num_rows"))
row_lookup = Primitive(reference.row_lookup)
build_runs = Primitive(reference.build_runs, static=("num_rows",))
bucket = Primitive(reference.bucket, static=("num_owners",))
shift_rows = Primitive(reference.shift_rows, static=("starts", "shifts", "num_rows", "outside"))
sum_rows = Primitive(reference.sum_rows, static=("num_rows", "bound"))
fused_update = Primitive(reference.fused_update, static=("optimizer", "table_starts"))
pair_products = Primitive(reference.pair_products)
pair_gradients = Primitive(reference.pair_gradients)
attention = Primitive(reference.attention, static=("alpha", "scale"))
attention_gradients = Primitive(reference.attention_gradients, static=("alpha", "scale"))
