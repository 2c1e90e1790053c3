from jaxrec.embed.kernels.sparse_core.lookups import pooled_lookup as pooled_lookup
from jaxrec.embed.kernels.sparse_core.lookups import row_lookup as row_lookup
from jaxrec.embed.kernels.sparse_core.update import fused_update as fused_update
