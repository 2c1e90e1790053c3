"""MMoE and PLE: several labels of a row, over shared experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxrec.embed import EmbeddingBagCollection
from jaxrec.nn import PLE, MMoE
from jaxrec.nn.click_model import ClickModel, num_columns, with_dense
from jaxrec.ragged import KeyedJaggedArray
from jaxrec.train.models.rows import RowModel

# Numbers of experts, and sizes of the tower of each task.
MMOE_EXPERTS = 4
PLE_LEVELS, PLE_TASK_EXPERTS, PLE_SHARED_EXPERTS = 2, 2, 2
TOWER_SIZES = (32, 1)


class TaskModel(ClickModel):
    """Tables, and layers that compute ``[batch, tasks]`` outputs from embeddings and numbers."""

    def __init__(
        self,
        embeddings: EmbeddingBagCollection,
        layers: Callable[[Array], Array],
        *,
        num_dense: int,
        dtype: DTypeLike | None,
    ):
        self.embeddings = embeddings
        self.layers = layers
        self.num_dense = num_dense
        self.dtype = dtype

    def __call__(self, dense: Any, features: KeyedJaggedArray) -> Float[Array, "batch tasks"]:
        """Return the outputs of a batch, ``[batch, tasks]``."""
        return self.logits(dense, self.lookup(features))

    def logits(self, dense: Any, embedded: Any) -> Float[Array, "batch tasks"]:
        return self.layers(with_dense(embedded, dense, self.num_dense, self.dtype))


class MMoEKind(RowModel):
    """`jaxrec.nn.MMoE` over embeddings and numbers, for rows with one label or several."""

    name = "mmoe"
    has_several_labels = True
    has_one_width = False

    def make(self, num_steps: int, rngs: nnx.Rngs) -> TaskModel:
        embeddings = self.collection(self.tables(), num_steps, rngs)
        layers = self._layers(num_columns(embeddings) + self.num_dense, rngs)
        return TaskModel(embeddings, layers, num_dense=self.num_dense, dtype=self.dtype)

    def _layers(self, columns: int, rngs: nnx.Rngs) -> nnx.Module:
        return MMoE(
            columns,
            num_tasks=len(self.tasks),
            num_experts=MMOE_EXPERTS,
            expert_layer_sizes=self.config.model.top_layer_sizes,
            tower_layer_sizes=TOWER_SIZES,
            dtype=self.dtype,
            rngs=rngs,
        )


class PLEKind(MMoEKind):
    """`jaxrec.nn.PLE` over embeddings and numbers, for rows with one label or several."""

    name = "ple"

    def _layers(self, columns: int, rngs: nnx.Rngs) -> nnx.Module:
        return PLE(
            columns,
            num_tasks=len(self.tasks),
            num_levels=PLE_LEVELS,
            task_experts=PLE_TASK_EXPERTS,
            shared_experts=PLE_SHARED_EXPERTS,
            expert_layer_sizes=self.config.model.top_layer_sizes,
            tower_layer_sizes=TOWER_SIZES,
            dtype=self.dtype,
            rngs=rngs,
        )
