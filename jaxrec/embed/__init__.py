"""Tables, lookup and fused update on one device."""

from jaxrec.embed.collection import EmbeddingBagCollection as EmbeddingBagCollection
from jaxrec.embed.collection import EmbeddingCollection as EmbeddingCollection
from jaxrec.embed.collection import TableVariable as TableVariable
from jaxrec.embed.config import EmbeddingBagConfig as EmbeddingBagConfig
from jaxrec.embed.config import EmbeddingConfig as EmbeddingConfig
from jaxrec.embed.differentiate import value_and_grad as value_and_grad
from jaxrec.embed.gradients import Gradients as Gradients
from jaxrec.embed.gradients import mean_gradients as mean_gradients
from jaxrec.embed.lookup import lookup as lookup
from jaxrec.embed.lookup import route as route
from jaxrec.embed.optimizer import Optimizer as Optimizer
from jaxrec.embed.tables import Tables as Tables
from jaxrec.embed.tables import init_tables as init_tables
from jaxrec.embed.tables import read_state as read_state
from jaxrec.embed.tables import read_table as read_table
from jaxrec.embed.tables import write_state as write_state
from jaxrec.embed.tables import write_table as write_table
from jaxrec.embed.update import apply_gradients as apply_gradients
