"""The training runtime: the step, the loop, checkpoints, the command line."""

from jaxrec.train.memory import keep_freed_memory as keep_freed_memory
from jaxrec.train.model import load_model as load_model
from jaxrec.train.step import compile_step as compile_step
