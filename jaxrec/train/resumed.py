"""Options that a resumed run must share with the run that it goes on with."""

from __future__ import annotations

from jaxrec.arguments import ConfigError
from jaxrec.train.config import TrainConfig
from jaxrec.train.row_memory import parse_memory


def check_resumed(config: TrainConfig, run: TrainConfig) -> None:
    """Raise ConfigError if the options of a resumed run would change its rows or its model."""
    if (name := config.model.name) != run.model.name:
        raise ConfigError(
            f"--model {name} is not that of the run, which is {run.model.name}; leave --model out, "
            "or train a new run in another --output, without --resume"
        )
    if config.stream.follow != run.stream.follow:
        raise ConfigError(
            f"{'--follow' if config.stream.follow else '--no-follow'} reads other rows than the "
            "run did; leave it out, or train a new run without --resume"
        )
    # A resumed run continues at its batch, and evaluates the rows that it has not trained on: both
    # hold only for the same rows in the same order.
    if config.seed != run.seed:
        drawn = "log" if config.data.path is None else "order of the rows"
        raise ConfigError(
            f"--seed {config.seed} makes another {drawn} than that of the run, whose seed is "
            f"{run.seed}; leave --seed out"
        )
    if (kind := config.vocabulary.kind) != run.vocabulary.kind:
        raise ConfigError(
            f"--vocabulary {kind} is not that of the run, whose tables have "
            f"{run.vocabulary.kind} vocabularies; leave --vocabulary out"
        )
    if (config.ranker, config.windows) != (run.ranker, run.windows):
        raise ConfigError(
            "--ranker and --windows make other requests, or another model, than those of the run; "
            "leave them out"
        )
    # The number of steps so far says which rows come next; a followed run keeps positions instead.
    size = run.data.batch_size
    if config.data.batch_size != size and not (config.eval_only or config.stream.follow):
        raise ConfigError(
            f"--batch-size {config.data.batch_size} would skip rows or repeat some, since the run "
            f"has read batches of {size}; leave --batch-size out"
        )
    columns = ["user", "item", "history", "time", "label_kind", "dense", "categorical"]
    columns += ["hold_out", "hold_out_by", "hold_out_from", "types"]
    # Other models compare --label with the labels that the run has found.
    columns += ["label"] if config.model.name == "hstu_ranker" else []
    for column in columns:
        if getattr(config.data, column) != getattr(run.data, column):
            option = "--data.types" if column == "types" else f"--{column.replace('_', '-')}"
            raise ConfigError(f"{option} differs from that of the run; leave {option} out")
    # The memory decides which rows are shuffled together.
    if not config.eval_only and _bytes(config.data.memory) != _bytes(run.data.memory):
        raise ConfigError("--memory differs from that of the run; leave --memory out")
    # A model may be evaluated on other files, but the rows to train on must stay.
    if (config.data.eval_path is None) != (run.data.eval_path is None) and not config.eval_only:
        raise ConfigError(
            "--hold-out-data makes other training rows than those of the run; leave it out, or "
            "give --eval-only, too"
        )
    # The values of saved checkpoints, of which the best one is kept, are those of other rows.
    path, before = config.data.eval_path, run.data.eval_path
    has_best = (config.patience or config.checkpoint.keep_best) and not config.eval_only
    if has_best and path and before and path.absolute() != before.absolute():
        raise ConfigError(
            f"--hold-out-data {path} has other rows than {before}, on which the run has compared "
            "its steps to keep the best one; leave --hold-out-data out, or give --eval-only, too"
        )
    rows = config.data.generated_rows
    if config.eval_only and config.data.path is None and rows != run.data.generated_rows:
        raise ConfigError(
            f"--data.generated-rows {rows} holds out other rows than the run, which has "
            f"{run.data.generated_rows} before them; leave it out"
        )


def _bytes(memory: str | None) -> int | None:
    return None if memory is None else parse_memory(memory)
