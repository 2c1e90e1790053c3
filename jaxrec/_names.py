"""The names of `jaxrec` beside its packages."""

from jaxrec.embed import EmbeddingBagCollection as EmbeddingBagCollection
from jaxrec.embed import EmbeddingBagConfig as EmbeddingBagConfig
from jaxrec.embed import EmbeddingCollection as EmbeddingCollection
from jaxrec.embed import EmbeddingConfig as EmbeddingConfig
from jaxrec.embed import Optimizer as Optimizer
from jaxrec.embed import mean_gradients as mean_gradients
from jaxrec.embed import value_and_grad as value_and_grad
from jaxrec.ragged import JaggedArray as JaggedArray
from jaxrec.ragged import KeyedArray as KeyedArray
from jaxrec.ragged import KeyedJaggedArray as KeyedJaggedArray
from jaxrec.ragged import Packer as Packer
