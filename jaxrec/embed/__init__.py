"""Tables, lookup and fused update on one device."""

from jaxrec._public import public_names as _public_names
from jaxrec.embed.collection import EmbeddingBagCollection as EmbeddingBagCollection
from jaxrec.embed.collection import EmbeddingCollection as EmbeddingCollection
from jaxrec.embed.collection import TableVariable as TableVariable
from jaxrec.embed.config import EmbeddingBagConfig as EmbeddingBagConfig
from jaxrec.embed.config import EmbeddingConfig as EmbeddingConfig
from jaxrec.embed.functional import apply_gradients as apply_gradients
from jaxrec.embed.functional import init_tables as init_tables
from jaxrec.embed.functional import lookup as lookup
from jaxrec.embed.gradients import Gradients as Gradients
from jaxrec.embed.gradients import mean_gradients as mean_gradients
from jaxrec.embed.optimizer import Optimizer as Optimizer
from jaxrec.embed.store import StoreFactory as StoreFactory
from jaxrec.embed.store import TableStore as TableStore
from jaxrec.embed.tables import Tables as Tables
from jaxrec.embed.training_step import value_and_grad as value_and_grad
from jaxrec.embed.wrapping_store import WrappingStore as WrappingStore

__all__ = _public_names(globals())


def __dir__() -> list[str]:
    return __all__
