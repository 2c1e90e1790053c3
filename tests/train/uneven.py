"""The scenarios that test_uneven.py and test_early_stopping.py run in two processes."""

from __future__ import annotations

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType

import jaxrec
from jaxrec.data import empty_batch, pad_batch
from jaxrec.train import (
    CheckpointManager,
    EarlyStopping,
    PreservationPolicy,
    SaveCheckpoints,
    Trainer,
)
from tests.train.ranker import (
    BATCH,
    WEIGHTED_GROUP,
    Ranker,
    batches_of,
    weighted_loss,
    weights,
)


def data_of(process, count):
    """Batches of one process; the last is smaller."""
    return batches_of([BATCH] * (count - 1) + [BATCH // 2], seed=process)


def everywhere():
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def sharded():
    plan = jaxrec.plan.ShardingPlan.from_dict({"user": jaxrec.mesh.row_wise()})
    return jaxrec.shard(Ranker, plan, everywhere())


def place(batch):
    """Capacities are known, so that a thread may put batches while a step runs."""
    return jaxrec.mesh.shard_batch(batch, everywhere(), capacities={"user": 2 * BATCH})


def train(counts, uneven, accumulate, directory):
    """Train, evaluate, and train on after the end; return what one device is compared with."""
    model = sharded()
    with CheckpointManager(directory) as manager:
        trainer = Trainer(
            model=model,
            optimizer=jaxrec.Optimizer(model, optax.sgd(0.5)),
            loss=weighted_loss,
            metrics=WEIGHTED_GROUP,
            batch_size=BATCH,
            place=place,
            accumulate=accumulate,
            uneven=uneven,
            callbacks=[SaveCheckpoints(manager)],
        )
        data = data_of(jax.process_index(), counts[jax.process_index()])
        steps = trainer.train(iter(data))
        batches = trainer.restore(manager).batches
        held_out = trainer.evaluate(iter(data))
        trainer.train(iter(data), steps=2)  # readers that are ahead end with the steps
    return steps, batches, held_out, trainer.compute_metrics(), weights(trainer)


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, batch):
    (loss, _), gradients = jaxrec.value_and_grad(
        lambda model: weighted_loss(model, *batch), has_aux=True
    )(model)
    optimizer.update(model, gradients)
    return loss


def loop(counts, uneven):
    """The same in a loop of one's own."""
    model = sharded()
    optimizer = jaxrec.Optimizer(model, optax.sgd(0.5))
    data = data_of(jax.process_index(), counts[jax.process_index()])
    padded = (pad_batch(batch, BATCH) for batch in data)
    steps = 0
    empty = empty_batch if uneven == "empty" else None
    for batch in jaxrec.mesh.even_batches(padded, empty=empty):
        train_step(model, optimizer, jaxrec.mesh.shard_batch(batch, everywhere()))
        steps += 1
    return steps, [np.asarray(x) for x in (model.embeddings.table("user"), model.over.kernel[...])]


class PatienceOfProcess(EarlyStopping):
    """Evaluations whose values differ between processes from the second on."""

    def values(self, trainer, step):
        # Process 0 gets worse. Process 1, by itself, would go on for ever.
        return {"loss": 1.0 + step * (1 if jax.process_index() == 0 else -1) * (step > 1)}


def stop_early(directory):
    """Train with early stopping; return the steps at which this process is, was best and stopped,
    and the best value."""
    model = sharded()
    policy = PreservationPolicy(best=1, metric="loss", mode="min")
    with CheckpointManager(directory, policy) as manager:
        stopping = PatienceOfProcess("loss", 2, every=1, manager=manager)
        trainer = Trainer(
            model=model,
            optimizer=jaxrec.Optimizer(model, optax.sgd(0.1)),
            loss=weighted_loss,
            batch_size=BATCH,
            place=place,
            callbacks=[stopping],
        )
        trainer.train(data_of(jax.process_index(), 8))
    return trainer.step, stopping.best_step, stopping.stopped_step, stopping.best
